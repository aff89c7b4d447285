"""Makes tests/golden/packed-vN: a packed folder of the current format_version N that every later COMET must load.

Run once for each version, from the repository root: PYTHONPATH=cuda:. python tests/golden/make_packed.py
A folder is never made again: a reader that changes is tested against the bytes that users have.
"""

import json
import sys
import tempfile
from pathlib import Path

import torch
from transformers import LlamaConfig

from comet_core.calibrate import calibrate
from comet_core.model_source import resolve_model
from comet_core.pack import pack
from comet_core.packed import FORMAT_VERSION, load_packed
from comet_core.progress import SilentProgress
from comet_core.recipe import load_recipe, recipe_from_dict, recipe_to_dict, with_calibration
from comet_core.shards import tensor_sha256

HERE = Path(__file__).parent
OUT = HERE / f"packed-v{FORMAT_VERSION}"
TOKENS = [[7, 3, 61, 12, 0, 44, 44, 5, 18, 33, 2, 9, 50, 27, 63, 1] * 6]  # 96: one whole page of keys and a part


def main() -> None:
    torch.set_num_threads(1)
    config = LlamaConfig(
        vocab_size=64, hidden_size=128, intermediate_size=320, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=64, max_position_embeddings=256, attention_bias=True, bos_token_id=0,
        eos_token_id=1, pad_token_id=None,
    )  # fmt: skip
    if OUT.exists():
        sys.exit(f"error: {OUT} exists\nhint: golden folders are not made again; raise FORMAT_VERSION first")
    with tempfile.TemporaryDirectory() as home:
        config.save_pretrained(Path(home) / "golden")
        source = resolve_model(str(Path(home) / "golden"), weights="random", seed=1)
        default = recipe_to_dict(load_recipe("w4a4kv4"))
        default["activations"] |= {"share": "token"}  # with the newest kinds of tensor
        recipe = with_calibration(recipe_from_dict(default), samples=8, seq_len=32)
        calibrate(source, recipe, Path(home) / "calibration", device="cpu", progress=SilentProgress())
        pack(source, Path(home) / "calibration", None, OUT, device="cpu", progress=SilentProgress())
    (HERE / f".{OUT.name}.lock").unlink(missing_ok=True)
    model = load_packed(OUT, verify=True).model
    with torch.no_grad():
        logits = model(input_ids=torch.tensor(TOKENS), use_cache=False).logits[0, -3:]
    integers = {
        name: tensor_sha256(tensor) for name, tensor in model.state_dict().items() if not tensor.is_floating_point()
    }
    expected = {"tokens": TOKENS, "last_logits": logits.tolist(), "sha256_of_integers": integers}
    OUT.with_suffix(".json").write_text(json.dumps(expected, indent=1) + "\n")


if __name__ == "__main__":
    main()
