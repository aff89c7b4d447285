"""Finished shards -> the files that make a packed folder whole, and the summary that `pack` returns.

A Ledger keeps what the manifest needs of each shard, whether it was written just now or found from an earlier run, so
both ways end in the same bytes. config.json is written last: a folder that has one is whole.
"""

import json
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from comet_core.calibration import Calibration
from comet_core.experts import expert_of, list_experts
from comet_core.inspection import read_headers
from comet_core.model_card import model_card
from comet_core.model_source import ModelSource
from comet_core.packed import FORMAT_VERSION, MANIFEST, STARTED, LinearEntry, Manifest, manifest_json, read_manifest
from comet_core.provenance import comet_version
from comet_core.recipe import Recipe, digest, recipe_to_dict
from comet_core.shards import INDEX, tensor_sha256
from comet_core.whole_files import whole_file, write_text
from comet_cuda.errors import CometError

# A transformers that does not know COMET would skip the unknown quant_method with a warning and go on with random
# weights. It checks this key of config.json for every model and stops with an error that quotes it.
GUARD = "none, because COMET packed this model: `import comet_core` (pip install comet-w4a4kv4) before you load it"
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "generation_config.json",
)
LAYERS_NAMED = 3  # in warnings; more are counted


@dataclass(frozen=True)
class PackedInfo:
    """What `pack` made."""

    folder: Path
    bytes: int  # of all files
    linear_bytes: int  # of the packed linears
    linear_bytes_16bit: int  # of the same linears in 16 bit
    int4_mac_fraction: float
    kept_rtn: tuple[str, ...]  # linears where GPTQ was not better on held-out tokens
    warnings: tuple[str, ...]


@dataclass
class Ledger:
    """What has been written so far, by tensor or linear name."""

    entries: dict[str, LinearEntry] = field(default_factory=dict)
    notes: list[dict[str, Any]] = field(default_factory=list)
    checks: list[dict[str, Any]] = field(default_factory=list)
    sha256: dict[str, str] = field(default_factory=dict)
    weight_map: dict[str, str] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)  # bytes

    def record(self, shard: Path, tensors: dict[str, Tensor], notes: dict[str, Any]) -> None:
        """Keep what the manifest needs of a finished shard."""
        self.entries |= {name: LinearEntry(**entry) for name, entry in notes["linears"].items()}
        self.notes += notes["layers"]
        self.checks += notes.get("checks", [])
        self.sha256 |= {name: tensor_sha256(tensor) for name, tensor in tensors.items()}
        self.weight_map |= dict.fromkeys(tensors, shard.name)
        self.sizes |= {name: tensor.nbytes for name, tensor in tensors.items()}

    def finish(self, source: ModelSource, found: Calibration, recipe: Recipe, out: Path) -> PackedInfo:
        """Tokenizer, card, index, manifest; config.json last, because it makes the folder whole."""
        manifest = Manifest(
            recipe=recipe,
            recipe_digest=digest(recipe),
            model=found.model | {"spec": str(source.folder) if source.origin == "folder" else source.name},
            data=found.data,
            int4_mac_fraction=found.int4_mac_fraction if _is_w4(recipe) else 0.0,
            linears=self.entries,
            embedding_bits=recipe.embedding_bits,
            layers=self.notes,
            checks=self.checks,
            sha256=self.sha256,
            made={"version": comet_version(), "calibration": found.sha256()},
        )
        _copy_tokenizer(source.folder, out)
        index = {
            "metadata": {"total_size": sum(self.sizes.values())},
            "weight_map": dict(sorted(self.weight_map.items())),
        }
        write_text(out / INDEX, json.dumps(index, indent=1) + "\n")
        write_text(out / "README.md", model_card(manifest))
        write_text(out / MANIFEST, manifest_json(manifest, recipe_to_dict(recipe)))
        config = source.config.to_dict()
        config["quantization_config"] = {
            "quant_method": "comet",
            "format_version": FORMAT_VERSION,
            "recipe": recipe.name,
            "recipe_digest": manifest.recipe_digest,
        }
        config["experts_implementation"] = GUARD
        write_text(out / "config.json", json.dumps(config, indent=1, sort_keys=True) + "\n")
        (out / STARTED).unlink(missing_ok=True)
        return self.summary(manifest, out)

    def summary(self, manifest: Manifest, out: Path) -> PackedInfo:
        """The summary; linears outside the layers, of which packing notes nothing, do not count as packed linears."""
        noted = {note["linear"] for note in self.notes}
        linears = {name: entry for name, entry in self.entries.items() if name in noted}
        return PackedInfo(
            folder=out,
            bytes=sum(file.stat().st_size for file in out.iterdir() if file.is_file()),
            linear_bytes=sum(size for name, size in self.sizes.items() if name.rpartition(".")[0] in linears),
            linear_bytes_16bit=sum(2 * entry.in_features * entry.out_features for entry in linears.values()),
            int4_mac_fraction=manifest.int4_mac_fraction,
            kept_rtn=tuple(
                note["linear"]
                for note in self.notes
                if note.get("method") == "rtn" and "gptq" in note["relative_output_error"]
            ),
            warnings=(*_warnings(self.notes), *_layer_warnings(self.checks)),
        )


def summary_of(folder: Path) -> PackedInfo:
    """What `pack` returned when it made this folder, from its manifest and its shards' headers.

    Errors:
        CometError if the folder is not finished, or a file of it is missing or damaged.
    """
    manifest = read_manifest(folder)
    sizes, _ = read_headers(folder, manifest)
    made = Ledger(entries=manifest.linears, notes=manifest.layers, checks=manifest.checks, sizes=sizes)
    return made.summary(manifest, folder)


def _warnings(notes: list[dict[str, Any]]) -> list[str]:
    """What went wrong, by linear; experts of one layer share a line."""
    lines: list[str] = []
    experts: dict[str, list[str]] = {}
    for note in (note for note in notes if "warning" in note):
        if expert_of(note["linear"]):
            experts.setdefault(note["warning"], []).append(note["linear"])
        else:
            lines.append(f"{note['linear']}: {note['warning']}")
    return lines + [f"{where}: {text}" for text, names in experts.items() for where in list_experts(names)]


def _layer_warnings(checks: list[dict[str, Any]]) -> list[str]:
    """The first layers that break a limit, and how many more do: a naive recipe breaks it in nearly every one."""
    lines = [f"{check['layer']}: {check['warning']}" for check in checks if "warning" in check]
    more = len(lines) - LAYERS_NAMED
    return lines if more < 2 else [*lines[:LAYERS_NAMED], f"{more} more layers are as far off; comet report shows each"]


def _copy_tokenizer(folder: Path | None, out: Path) -> None:
    """Tokenizer files as the source has them; random weights have none."""
    try:
        for file in sorted(folder.iterdir()) if folder is not None else ():
            if file.name in TOKENIZER_FILES:
                with whole_file(out / file.name) as partial:
                    shutil.copyfile(file, partial)
    except OSError as error:
        raise CometError(
            f"{folder}: its tokenizer files cannot be copied to {out} ({error.strerror})",
            "free disk space and start the same command again",
        ) from error


def _is_w4(recipe: Recipe) -> bool:
    """False for weight schemes that are not 4 bit, where no multiply-add is W4A4 whatever the activations are."""
    return recipe.weights.bits == 4
