"""Calibration -> packed checkpoint, one layer in memory at a time, going on after a crash where it stopped.

For every layer: fold permutations into producers, then for each group in execution order collect the Hessian of its
input (the hidden states have passed through all layers packed so far), quantize its linears and put them in place;
at last run the packed layer to make the next layer's input, and write its shard. A shard under its final name is
complete, so a restart reads the finished layers back, runs the windows through them, and continues: since every step
is a function of bytes on disk, the result has the same bytes.
"""

import json
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout
from torch import Tensor, nn

from comet_core.calibrate import embed_windows, resolve_compute
from comet_core.calibration import Calibration, GroupPlan, load_calibration
from comet_core.decoder import Decoder, is_tied, layer_linears, permute_rows, run_layer
from comet_core.hidden import HiddenStates
from comet_core.kv_cache import attention_name
from comet_core.linear import linear_tensors, replace_linear, unquantized_input
from comet_core.model_card import model_card
from comet_core.model_source import ModelSource
from comet_core.packed import (
    FORMAT_VERSION,
    INDEX,
    MANIFEST,
    LinearEntry,
    Manifest,
    manifest_json,
    module_name,
    put_linears,
    read_shard,
    shard_name,
    split_linear_tensors,
    tensor_sha256,
    write_atomic,
    write_shard,
)
from comet_core.plan import BlockPlan, fold_permutation
from comet_core.progress import Progress
from comet_core.quantize import QuantizedWeight, quantize_rtn, to_storage
from comet_core.quantize_group import Windows, needs_windows, quantize_group
from comet_core.recipe import Recipe, WeightSpec, digest, recipe_to_dict
from comet_cuda.errors import CometError

STARTED = "packing.json"  # what a folder holds while packing is under way


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


@torch.no_grad()
def pack(
    source: ModelSource,
    calibration: Path,
    recipe: Recipe | None,
    out: Path,
    *,
    device: str = "auto",
    dtype: str = "auto",
    progress: Progress,
) -> PackedInfo:
    """Quantize and write the model to `out`; the same call after a crash goes on.

    Args:
        source: the model that was calibrated. calibration: folder that `calibrate` wrote.
        recipe: None takes the calibration's; another one may differ in weights, kv_cache, embedding and lm_head only.
        out: folder to write. device, dtype: "auto" or torch names. progress: told about every step.

    Errors:
        CometError if the parts do not belong together, the folder holds something else, or the disk is full.
    """
    found = load_calibration(calibration)
    recipe = _agreed_recipe(found, recipe)
    if source.digest() != found.model["digest"]:
        raise CometError(
            f"{calibration}: was made from {found.model['name']} (digest {found.model['digest']}), not from "
            f"{source.name} (digest {source.digest()})",
            "calibrate this model, or name the other one",
        )
    _check_embedding_bits(source, recipe)
    device, compute = resolve_compute(device, dtype)
    out.parent.mkdir(parents=True, exist_ok=True)
    try:
        with FileLock(out.parent / f".{out.name}.lock", timeout=0):
            job = _Job(source, found, recipe, out, device, compute, progress)
            return job.run()
    except Timeout as error:
        raise CometError(
            f"{out}: another command is packing into this folder", "wait for it, or choose --out"
        ) from error


def _agreed_recipe(found: Calibration, recipe: Recipe | None) -> Recipe:
    if recipe is None:
        return found.recipe
    aligned = replace(
        recipe,
        name=found.recipe.name,
        description=found.recipe.description,
        calibration=found.recipe.calibration,
        weights=found.recipe.weights,
        kv_cache=found.recipe.kv_cache,
        embedding_bits=found.recipe.embedding_bits,
        lm_head_bits=found.recipe.lm_head_bits,
    )
    if digest(aligned) != digest(found.recipe):
        raise CometError(
            f"recipe {recipe.name}: its activations, blocks, skip or overrides differ from those of the calibration "
            f"({found.recipe.name})",
            "run `comet calibrate` with this recipe",
        )
    return replace(recipe, calibration=found.recipe.calibration)


def _check_embedding_bits(source: ModelSource, recipe: Recipe) -> None:
    tied = bool(getattr(source.config, "tie_word_embeddings", False))
    if tied and recipe.embedding_bits != recipe.lm_head_bits:
        raise CometError(
            f"{source.name} ties embedding and lm_head to one tensor, but the recipe wants "
            f"embedding.bits={recipe.embedding_bits} and lm_head.bits={recipe.lm_head_bits}",
            "give both the same bits",
        )


class _Job:
    """One run of `pack` on one folder."""

    def __init__(
        self,
        source: ModelSource,
        calibration: Calibration,
        recipe: Recipe,
        out: Path,
        device: str,
        dtype: torch.dtype,
        progress: Progress,
    ) -> None:
        self.source, self.calibration, self.recipe, self.out = source, calibration, recipe, out
        self.progress = progress
        self.decoder = Decoder(source, device=device, dtype=dtype, attention=attention_name(recipe.kv_cache))
        self.count = len(self.decoder.layers) + 1  # shards
        self.entries: dict[str, LinearEntry] = {}
        self.notes: list[dict[str, Any]] = []
        self.sha256: dict[str, str] = {}
        self.weight_map: dict[str, str] = {}

    def run(self) -> PackedInfo:
        """Start or go on, and finish."""
        self._begin()
        tokens = self.calibration.tokens
        hidden = HiddenStates(
            (tokens.shape[0], tokens.shape[1], self.decoder.width),
            dtype=self.decoder.dtype,
            device=self.decoder.device,
            spill_folder=self.out,
        )
        calls = embed_windows(self.decoder, tokens, hidden)
        for _, module in self.decoder.non_layer_modules():
            self.decoder.unload(module)
        by_layer: dict[int, list[GroupPlan]] = {}
        for item in self.calibration.groups:
            by_layer.setdefault(item.layer, []).append(item)
        last_missing = max((i for i in range(self.count - 1) if not self._shard(i).exists()), default=-1)
        if not any(needs_windows(self.recipe.for_linear(name).weights) for name in self._quantized_names()):
            last_missing = -1  # the windows need not pass through any layer
        with self.progress.task("pack", self.count) as task:
            for index in range(self.count - 1):
                layer_calls = {size: all_calls[index] for size, all_calls in calls.items()}
                if self._shard(index).exists():
                    layer = self._reload_layer(index, needed=index <= last_missing)
                else:
                    layer = self._pack_layer(index, by_layer[index], Windows(hidden, layer_calls, len(tokens)))
                if index < self.count - 2 and index <= last_missing:  # nobody reads what leaves the last layer
                    for start, stop in hidden.ranges():
                        hidden.write(start, stop, run_layer(layer, hidden.read(start, stop), layer_calls[stop - start]))
                self.decoder.release_layer(index)
                task.advance()
            if self._shard(self.count - 1).exists():
                self._record(self.count - 1, *read_shard(self._shard(self.count - 1)))
            else:
                self._pack_non_layers()
            task.advance()
        return self._finish()

    def _quantized_names(self) -> list[str]:
        prefix = self.decoder.layer_prefix
        return [f"{prefix}.{item.layer}.{name}" for item in self.calibration.groups for name in item.quantized]

    def _shard(self, index: int) -> Path:
        return self.out / shard_name(index, self.count)

    def _begin(self) -> None:
        """Claim the folder, or recognise an unfinished run of the same job."""
        job = {
            "format_version": FORMAT_VERSION,
            "recipe": digest(self.recipe),
            "model": self.calibration.model["digest"],
            "calibration": tensor_sha256(self.calibration.tokens),
            "shards": self.count,
            "dtype": str(self.decoder.dtype),
            "device": self.decoder.device.type,
        }
        marker = self.out / STARTED
        try:
            self.out.mkdir(parents=True, exist_ok=True)
            if marker.exists():
                if json.loads(marker.read_text()) != job:
                    raise CometError(
                        f"{self.out}: holds the unfinished packing of another model, recipe or calibration",
                        "remove the folder, or choose another with --out",
                    )
                for leftover in self.out.glob("*.tmp"):
                    leftover.unlink()
                return
            if (self.out / MANIFEST).exists():
                self._clear_finished()
            elif any(self.out.iterdir()):
                raise CometError(
                    f"{self.out}: is not empty and holds no packed model", "choose another folder with --out"
                )
            write_atomic(marker, json.dumps(job))
        except OSError as error:
            raise CometError(
                f"{self.out}: cannot be written ({error.strerror})", "choose another folder with --out"
            ) from error
        except ValueError as error:
            raise CometError(f"{marker}: cannot be understood", "remove the folder and pack again") from error

    def _clear_finished(self) -> None:
        """Remove the files of an earlier finished packing, the ones that make it valid first."""
        for name in ("config.json", MANIFEST, INDEX):
            (self.out / name).unlink(missing_ok=True)
        for shard in self.out.glob("model-*-of-*.safetensors"):
            shard.unlink()

    def _reload_layer(self, index: int, *, needed: bool) -> nn.Module:
        """Layer `index` from its finished shard; its weights are put in place only if the windows must pass it."""
        tensors, notes = read_shard(self._shard(index))
        self._record(index, tensors, notes)
        layer = self.decoder.layers[index]
        if needed:
            prefix = f"{self.decoder.layer_prefix}.{index}"
            names = [name for name in self.entries if name.startswith(f"{prefix}.")]
            put_linears(layer, prefix, split_linear_tensors(tensors, names), self.entries)
            for name, tensor in tensors.items():
                owner, _, leaf = name.removeprefix(f"{prefix}.").rpartition(".")
                setattr(
                    layer.get_submodule(owner), leaf, nn.Parameter(tensor.to(self.decoder.dtype), requires_grad=False)
                )
            layer.to(self.decoder.device)
        return layer

    def _pack_layer(self, index: int, groups: Sequence[GroupPlan], windows: Windows) -> nn.Module:
        """Quantize layer `index` group by group, write its shard, return it packed."""
        prefix = f"{self.decoder.layer_prefix}.{index}"
        layer = self.decoder.load_layer(index)
        linears = layer_linears(layer)
        for item in groups:
            for name in item.group.producers:
                permute_rows(linears[name], item.plan.perm.long().to(self.decoder.device))
        tensors: dict[str, Tensor] = {}
        entries: dict[str, dict[str, Any]] = {}
        notes: list[dict[str, Any]] = []
        for item in groups:
            if item.folded:
                for name in item.group.names:
                    columns = item.plan.perm.long().to(self.decoder.device)
                    linears[name].weight = nn.Parameter(linears[name].weight[:, columns], requires_grad=False)
            if not item.quantized:
                continue
            plan = self._device_plan(item)
            for names, spec in self._by_spec(prefix, item):
                quantized, found = quantize_group(layer, names, plan, spec, windows)
                notes += [note | {"linear": f"{prefix}.{note['linear']}"} for note in found]
                for name, weight in quantized.items():
                    linear = linears[name]
                    leaves = linear_tensors(weight, plan, linear.bias, folded=item.folded)
                    entries[f"{prefix}.{name}"] = asdict(
                        LinearEntry(
                            linear.in_features,
                            linear.out_features,
                            spec.bits,
                            spec.symmetric,
                            plan.hadamard,
                            item.folded,
                        )
                    )
                    tensors |= {f"{prefix}.{name}.{leaf}": value for leaf, value in leaves.items()}
                    replace_linear(layer, name, leaves, plan.hadamard)
        tensors |= {f"{prefix}.{name}": _sixteen(parameter) for name, parameter in layer.named_parameters()}
        shard_notes = {"linears": entries, "layers": notes}
        write_shard(self._shard(index), tensors, shard_notes)
        self._record(index, tensors, shard_notes)
        return layer

    def _device_plan(self, item: GroupPlan) -> BlockPlan:
        device = self.decoder.device
        perm = fold_permutation(item.plan.perm) if item.folded else item.plan.perm
        return replace(
            item.plan,
            perm=perm.to(device),
            block_bits=item.plan.block_bits.to(device),
            clip=item.plan.clip.to(device),
        )

    def _by_spec(self, prefix: str, item: GroupPlan) -> list[tuple[list[str], WeightSpec]]:
        """The group's linears, together where they are quantized alike (one GPTQ run then serves them all)."""
        sets: dict[WeightSpec, list[str]] = {}
        for name in item.quantized:
            sets.setdefault(self.recipe.for_linear(f"{prefix}.{name}").weights, []).append(name)
        return [(names, spec) for spec, names in sets.items()]

    def _pack_non_layers(self) -> None:
        """Embeddings, final norm and lm_head: 16 bit, or 8 bit where the recipe says so."""
        decoder, model = self.decoder, self.decoder.model
        embedding, head = model.get_input_embeddings(), model.get_output_embeddings()  # type: ignore[operator]
        tied = is_tied(model)
        tensors: dict[str, Tensor] = {}
        entries: dict[str, dict[str, Any]] = {}
        for name, module in decoder.non_layer_modules():
            if module is head and tied:
                continue
            decoder.load(module, name)
            own = {f"{name}.{leaf}": _sixteen(value) for leaf, value in module.named_parameters(recurse=False)}
            bits = {id(embedding): self.recipe.embedding_bits, id(head): self.recipe.lm_head_bits}.get(id(module), 16)
            if bits == 8:
                matrix = module.get_parameter("weight")
                weight = _eight_bit(matrix)
                del own[f"{name}.weight"]
                own |= {f"{name}.qweight": weight.qweight, f"{name}.w_scale": weight.scale}
                if module is head:
                    own |= {f"{name}.{leaf}": value for leaf, value in unquantized_input(matrix.shape[1]).items()}
                if module is head or tied:
                    entry = LinearEntry(matrix.shape[1], matrix.shape[0], 8, True, False, True)
                    entries[module_name(model, head)] = asdict(entry)
            tensors |= own
            decoder.unload(module)
        notes = {"linears": entries, "layers": []}
        write_shard(self._shard(self.count - 1), tensors, notes)
        self._record(self.count - 1, tensors, notes)

    def _record(self, index: int, tensors: dict[str, Tensor], notes: dict[str, Any]) -> None:
        """Keep what the manifest needs of a finished shard."""
        self.entries |= {name: LinearEntry(**entry) for name, entry in notes["linears"].items()}
        self.notes += notes["layers"]
        self.sha256 |= {name: tensor_sha256(tensor) for name, tensor in tensors.items()}
        self.weight_map |= dict.fromkeys(tensors, shard_name(index, self.count))
        self.sizes = getattr(self, "sizes", {}) | {name: tensor.nbytes for name, tensor in tensors.items()}

    def _finish(self) -> PackedInfo:
        """Tokenizer, card, index, manifest; config.json last, because it makes the folder whole."""
        found = self.calibration
        manifest = Manifest(
            recipe=self.recipe,
            recipe_digest=digest(self.recipe),
            model=found.model
            | {"spec": str(self.source.folder) if self.source.origin == "folder" else self.source.name},
            data=found.data,
            int4_mac_fraction=found.int4_mac_fraction if _is_w4(self.recipe) else 0.0,
            linears=self.entries,
            embedding_bits=self.recipe.embedding_bits,
            layers=self.notes,
            sha256=self.sha256,
        )
        if self.source.folder is not None:
            for file in sorted(self.source.folder.iterdir()):
                if file.name in TOKENIZER_FILES:
                    shutil.copyfile(file, self.out / file.name)
        index = {
            "metadata": {"total_size": sum(self.sizes.values())},
            "weight_map": dict(sorted(self.weight_map.items())),
        }
        write_atomic(self.out / INDEX, json.dumps(index, indent=1) + "\n")
        write_atomic(self.out / "README.md", model_card(manifest))
        write_atomic(self.out / MANIFEST, manifest_json(manifest, recipe_to_dict(self.recipe)))
        config = self.source.config.to_dict()
        config["quantization_config"] = {
            "quant_method": "comet",
            "format_version": FORMAT_VERSION,
            "recipe": self.recipe.name,
            "recipe_digest": manifest.recipe_digest,
        }
        write_atomic(self.out / "config.json", json.dumps(config, indent=1, sort_keys=True) + "\n")
        (self.out / STARTED).unlink(missing_ok=True)
        inside = f"{self.decoder.layer_prefix}."
        linears = {name: entry for name, entry in self.entries.items() if name.startswith(inside)}
        return PackedInfo(
            folder=self.out,
            bytes=sum(file.stat().st_size for file in self.out.iterdir() if file.is_file()),
            linear_bytes=sum(size for name, size in self.sizes.items() if name.rpartition(".")[0] in linears),
            linear_bytes_16bit=sum(2 * entry.in_features * entry.out_features for entry in linears.values()),
            int4_mac_fraction=manifest.int4_mac_fraction,
            kept_rtn=tuple(
                note["linear"]
                for note in self.notes
                if note["method"] == "rtn" and "gptq" in note["relative_output_error"]
            ),
            warnings=tuple(f"{note['linear']}: {note['warning']}" for note in self.notes if "warning" in note),
        )


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


def _is_w4(recipe: Recipe) -> bool:
    """False for weight schemes that are not 4 bit, where no multiply-add is W4A4 whatever the activations are."""
    return recipe.weights.bits == 4


def _sixteen(parameter: Tensor) -> Tensor:
    """What stays unquantized is stored in bfloat16, or float16 where that holds it exactly and bfloat16 does not."""
    value = parameter.detach()
    if value.dtype != torch.float32:
        return value
    for dtype in (torch.bfloat16, torch.float16):
        if torch.equal(value.to(dtype).float(), value):
            return value.to(dtype)
    return value.to(torch.bfloat16)


def _eight_bit(weight: Tensor) -> QuantizedWeight:
    """8-bit weights rounded to nearest, one scale per row and 128 channels."""
    identity = torch.arange(weight.shape[1], dtype=torch.int32, device=weight.device)
    bits = torch.full((-(-weight.shape[1] // 128),), 16, dtype=torch.uint8, device=weight.device)
    plan = BlockPlan(identity, bits, torch.ones_like(bits, dtype=torch.float32), False)
    stored = to_storage(weight, plan)
    importance = torch.ones(stored.shape[1] * 128, device=weight.device)
    return quantize_rtn(stored, importance, WeightSpec(bits=8, method="rtn", clip_search=False))
