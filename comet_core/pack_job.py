"""One run of packing on one folder: layer by layer, shard by shard, going on where an earlier run stopped.

For every layer: fold permutations into producers, then for each group in execution order collect the moments of its
input (the hidden states have passed through all layers packed so far), quantize its linears and put them in place;
at last run the packed layer to make the next layer's input, and write its shard. A shard under its final name is
complete, so a restart reads the finished layers back, runs the windows through them, and continues: since every step
is a function of bytes on disk, the result has the same bytes.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from comet_core.calibrate import embed_windows
from comet_core.calibration import Calibration, GroupPlan
from comet_core.decoder import Decoder, all_finite, is_tied, layer_linears, permute_rows, put_tensor, stored_buffers
from comet_core.finished import REMEDY, UNFINISHED, asked_of, look_into
from comet_core.hidden import DEFAULT_LIMIT, HiddenStates
from comet_core.kv_cache import attention_name, sixteen_name
from comet_core.lanes import Copies, Lanes, calls_by_lane
from comet_core.layer_check import Probe, check_reloaded, layer_note
from comet_core.ledger import Ledger, PackedInfo
from comet_core.linear import eight_bit, linear_tensors, replace_linear, sixteen_bit, unquantized_input
from comet_core.model_source import ModelSource
from comet_core.packed import (
    FORMAT_VERSION,
    MANIFEST,
    STARTED,
    LinearEntry,
    module_name,
    put_linears,
    split_linear_tensors,
)
from comet_core.plan import BlockPlan, fold_permutation
from comet_core.progress import Progress
from comet_core.quantize_group import needs_sixteen, needs_windows, quantize_group
from comet_core.recipe import Recipe, WeightSpec, digest
from comet_core.shards import INDEX, read_shard, shard_name, write_checked_shard
from comet_core.whole_files import cannot_write, write_text
from comet_core.windows import OutputMemo, Sixteen, Windows, memo_bytes, sixteen_layer
from comet_cuda.errors import CometError


def judged(note: dict[str, Any], limit: float) -> dict[str, Any]:
    """The note of a packed linear, with a warning if its error (of its output's energy) is over the recipe's limit."""
    error = note["relative_output_error"].get(note["method"])
    if error is None or error <= limit or "warning" in note:  # NaN is not below
        return note
    return note | {"warning": f"its output error is {error:.0%} of the output's energy; `skip` keeps it in 16 bit"}


class PackJob:
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
        limit_share: float = 1.0,
        lanes: Lanes | None = None,
    ) -> None:
        self.source, self.calibration, self.recipe, self.out = source, calibration, recipe, out
        self.progress, self.limit_share = progress, limit_share
        self.lanes = lanes or Lanes.of(device)
        attention = attention_name(recipe.kv_cache, source.config)
        self.decoder = Decoder(source, device=device, dtype=dtype, attention=attention)
        self.count = len(self.decoder.layers) + 1  # shards
        self.ledger = Ledger()
        self._check_groups()

    def run(self) -> PackedInfo:
        """Start or go on, and finish."""
        self.begin()
        tokens = self.calibration.tokens
        hidden = HiddenStates(
            (tokens.shape[0], tokens.shape[1], self.decoder.width),
            dtype=self.decoder.dtype,
            device=self.lanes.devices,
            limit=int(DEFAULT_LIMIT * self.limit_share),
            spill_folder=self.out,
        )
        calls = calls_by_lane(self.lanes, embed_windows(self.decoder, tokens, hidden))
        probe = Probe(self.decoder, tokens)
        names = self._quantized_names()
        hidden16 = None
        if any(needs_sixteen(self.recipe.for_linear(name).weights) for name in names):
            hidden16 = hidden.copy()
        for _, module in self.decoder.non_layer_modules():
            self.decoder.unload(module)
        by_layer: dict[int, list[GroupPlan]] = {}
        for item in self.calibration.groups:
            by_layer.setdefault(item.layer, []).append(item)
        last_missing = max((i for i in range(self.count - 1) if not self.shard(i).exists()), default=-1)
        follow = any(needs_windows(self.recipe.for_linear(name).weights) for name in names)
        with self.progress.task("pack", self.count) as task:
            for index in range(self.count - 1):
                layer_calls = [{size: every[index] for size, every in sizes.items()} for sizes in calls]
                needed = index <= last_missing  # by layers that come later
                sixteen = None
                if not self.shard(index).exists() or (needed and hidden16 is not None):
                    self._fold(self.decoder.load_layer(index), by_layer[index])
                if needed and hidden16 is not None:
                    twin = Copies(
                        self.lanes, sixteen_layer(self.decoder.layers[index], sixteen_name(self.source.config))
                    )
                    twin.refresh()
                    sixteen = Sixteen(hidden16, twin, self._memos())
                copies = Copies(self.lanes, self.decoder.layers[index])
                windows = Windows(self.lanes, copies, hidden, layer_calls, len(tokens), self._memos(), sixteen)
                if self.shard(index).exists():
                    layer = self._reload_layer(index, needed=needed)
                else:
                    layer = self._pack_layer(index, by_layer[index], windows, probe)
                if needed:
                    probe.advance(layer, index)
                if index < self.count - 2 and needed and follow:  # nobody reads what leaves the last layer
                    windows.advance()
                self.decoder.release_layer(index)
                task.advance()
            if self.shard(self.count - 1).exists():
                self.ledger.record(self.shard(self.count - 1), *read_shard(self.shard(self.count - 1)))
            else:
                self._pack_non_layers()
            task.advance()
        return self.ledger.finish(self.source, self.calibration, self.recipe, self.out)

    def _memos(self) -> list[OutputMemo]:
        """One a lane."""
        return [OutputMemo(int(memo_bytes(device) * self.limit_share)) for device in self.lanes.devices]

    def is_done(self) -> bool:
        """Whether the folder holds the finished outcome of this very job, whatever its recipe is called."""
        return look_into(self.out, asked_of(self.calibration, self.recipe))[0] is not None

    def _check_groups(self) -> None:
        """The calibration must fit the model: its groups every linear of every layer once, its tokens known ones."""
        token, size = int(self.calibration.tokens.max()), self.source.config.get_text_config().vocab_size
        if token >= size:
            raise CometError(
                f"the calibration holds token {token}, the vocabulary of {self.source.name} ends before {size}",
                "run `comet calibrate` again",
            )
        wanted = {
            (f"{self.decoder.layer_prefix}.{index}.{name}", linear.in_features)
            for index, layer in enumerate(self.decoder.layers)
            for name, linear in layer_linears(layer).items()
        }
        prefix = self.calibration.layer_prefix
        given = [
            (f"{prefix}.{item.layer}.{name}", item.group.in_channels)
            for item in self.calibration.groups
            for name in item.group.names
        ]
        if len(given) != len(wanted) or set(given) != wanted:
            name, width = min(set(given) ^ wanted, default=given[0])
            raise CometError(
                f"the calibration's groups are not the linears of {self.source.name}: {name} ({width} channels)",
                "run `comet calibrate` again",
            )

    def _quantized_names(self) -> list[str]:
        prefix = self.decoder.layer_prefix
        return [f"{prefix}.{item.layer}.{name}" for item in self.calibration.groups for name in item.quantized]

    def shard(self, index: int) -> Path:
        return self.out / shard_name(index, self.count)

    def begin(self) -> None:
        """Claim the folder, or recognise an unfinished run of the same job. What another job made is refused."""
        look_into(self.out, asked_of(self.calibration, self.recipe))
        job = {
            "format_version": FORMAT_VERSION,
            "recipe": digest(self.recipe),
            "model": self.calibration.model["digest"],
            "calibration": self.calibration.sha256(),
            "shards": self.count,
            "dtype": str(self.decoder.dtype),
            "device": self.decoder.device.type,
        } | ({"devices": len(self.lanes)} if len(self.lanes) > 1 else {})
        marker = self.out / STARTED
        try:
            self.out.mkdir(parents=True, exist_ok=True)
            if marker.exists():
                if json.loads(marker.read_text(encoding="utf-8")) != job:
                    raise CometError(f"{self.out}: {UNFINISHED}", REMEDY)
                for leftover in self.out.glob("*.tmp"):
                    leftover.unlink()
                return
            if (self.out / MANIFEST).exists():
                self._clear_finished()
            write_text(marker, json.dumps(job))
        except OSError as error:
            raise cannot_write(self.out, error) from error
        except ValueError as error:
            raise CometError(f"{marker}: cannot be understood", "remove the folder and pack again") from error

    def _clear_finished(self) -> None:
        """Remove the files of the same job's earlier packing, config.json first, because without it the folder is not
        whole. The manifest stays until it is replaced: whoever is killed in here finds by it what the folder was."""
        for name in ("config.json", INDEX):
            (self.out / name).unlink(missing_ok=True)
        for shard in self.out.glob("model-*-of-*.safetensors"):
            shard.unlink()

    def _reload_layer(self, index: int, *, needed: bool) -> nn.Module:
        """Layer `index` from its finished shard; its weights are put in place only if the windows must pass it."""
        tensors, notes = read_shard(self.shard(index))
        self.ledger.record(self.shard(index), tensors, notes)
        layer = self.decoder.layers[index]
        if needed:
            self._put_packed(layer, f"{self.decoder.layer_prefix}.{index}", tensors)
        return layer

    def _put_packed(self, layer: nn.Module, prefix: str, tensors: dict[str, Tensor]) -> None:
        """Let the layer called `prefix` be what a shard of the ledger says, after checking its tensors."""
        entries = self.ledger.entries
        names = [name for name in entries if name.startswith(f"{prefix}.")]
        put_linears(layer, prefix, split_linear_tensors(tensors, names), entries)
        self._put_sixteen(layer, f"{prefix}.", tensors)
        layer.to(self.decoder.device)

    def _fold(self, layer: nn.Module, groups: Sequence[GroupPlan]) -> None:
        """Move permutations into the producers' rows; the layer stays the same function."""
        linears = layer_linears(layer)
        for item in groups:
            order = item.plan.perm.long().to(self.decoder.device)
            for name in item.group.producers:
                permute_rows(linears[name], order)
        for item in groups:
            if item.folded:
                order = item.plan.perm.long().to(self.decoder.device)
                for name in item.group.names:
                    linears[name].weight = nn.Parameter(linears[name].weight[:, order], requires_grad=False)

    def _pack_layer(self, index: int, groups: Sequence[GroupPlan], windows: Windows, probe: Probe) -> nn.Module:
        """Quantize layer `index`, loaded and folded, group by group, write its shard, return it as read back."""
        prefix = f"{self.decoder.layer_prefix}.{index}"
        layer = self.decoder.layers[index]
        before = probe.added(sixteen_layer(layer, sixteen_name(self.source.config)), index)
        linears = layer_linears(layer)
        packed = {name for item in groups for name in item.quantized}
        kept = {name: p for name, p in layer.named_parameters() if name.rpartition(".")[0] not in packed}
        rounded = {name: sixteen_bit(p) for name, p in kept.items()} | stored_buffers(layer)
        self._put_sixteen(layer, "", rounded)  # as a later run will find them
        tensors: dict[str, Tensor] = {}
        entries: dict[str, dict[str, Any]] = {}
        notes: list[dict[str, Any]] = []
        for item in groups:
            if not item.quantized:
                continue
            plan = self._device_plan(item)
            for names, spec in self._by_spec(prefix, item):
                quantized, found = quantize_group(layer, names, plan, spec, windows)
                named = (note | {"linear": f"{prefix}.{note['linear']}"} for note in found)
                notes += [judged(note, self.recipe.checks.error) for note in named]
                for name, weight in quantized.items():
                    linear = linears.pop(name)  # its 16-bit weight is not needed any more
                    leaves = linear_tensors(weight, plan, linear.bias, folded=item.folded)
                    entries[f"{prefix}.{name}"] = asdict(
                        LinearEntry(
                            linear.in_features,
                            linear.out_features,
                            spec.bits,
                            spec.symmetric,
                            plan.hadamard,
                            item.folded,
                            plan.share,
                        )
                    )
                    tensors |= {f"{prefix}.{name}.{leaf}": value for leaf, value in leaves.items()}
                    replace_linear(layer, name, leaves, plan.hadamard, plan.share)
        tensors |= {f"{prefix}.{name}": tensor for name, tensor in rounded.items()}
        check = layer_note(prefix, probe.added(layer, index), before, self.recipe.checks)
        shard_notes = {"linears": entries, "layers": notes, "checks": [check]}
        stored = write_checked_shard(self.shard(index), tensors, shard_notes)
        self.ledger.record(self.shard(index), tensors, shard_notes)
        del tensors
        self._put_packed(layer, prefix, stored)
        check_reloaded(check, probe.added(layer, index), before)
        return layer

    def _put_sixteen(self, layer: nn.Module, prefix: str, tensors: dict[str, Tensor]) -> None:
        """Set what stays unquantized, by name after `prefix`, in the type of the computation."""
        for name, tensor in tensors.items():
            put_tensor(layer, name.removeprefix(prefix), tensor.to(self.decoder.device), self.decoder.dtype)

    def _device_plan(self, item: GroupPlan) -> BlockPlan:
        plan = replace(item.plan, perm=fold_permutation(item.plan.perm)) if item.folded else item.plan
        return plan.to(self.decoder.device)

    def _by_spec(self, prefix: str, item: GroupPlan) -> list[tuple[list[str], WeightSpec]]:
        """The group's linears, together where they are quantized alike (one GPTQ run then serves them all)."""
        sets: dict[WeightSpec, list[str]] = {}
        for name in item.quantized:
            sets.setdefault(self.recipe.for_linear(f"{prefix}.{name}").weights, []).append(name)
        return [(names, spec) for spec, names in sets.items()]

    def _pack_non_layers(self) -> None:
        """Embeddings, final norm and lm_head: 16 bit, or 8 bit where the recipe says so. They are read as they are
        stored and never held in the type of the computation: nothing is larger in a model with a large vocabulary."""
        model, reader = self.decoder.model, self.source.weights()
        embedding, head = model.get_input_embeddings(), model.get_output_embeddings()  # type: ignore[operator]
        tied = is_tied(model)
        tensors: dict[str, Tensor] = {}
        entries: dict[str, dict[str, Any]] = {}
        for name, module in self.decoder.non_layer_modules():
            if module is head and tied:
                continue
            bits = {id(embedding): self.recipe.embedding_bits, id(head): self.recipe.lm_head_bits}.get(id(module), 16)
            for leaf, _ in list(module.named_parameters(recurse=False)):
                stored = reader.load(f"{name}.{leaf}")
                if not all_finite(stored):
                    raise CometError(f"{name}.{leaf}: holds NaN or Inf", "the checkpoint is damaged; fetch it again")
                if bits == 16 or leaf != "weight":
                    tensors[f"{name}.{leaf}"] = sixteen_bit(stored)
                    continue
                weight = eight_bit(stored)
                rows, columns = stored.shape
                tensors |= {f"{name}.qweight": weight.qweight, f"{name}.w_scale": weight.scale}
                if module is head:
                    tensors |= {f"{name}.{key}": value for key, value in unquantized_input(columns).items()}
                if module is head or tied:
                    entries[module_name(model, head)] = asdict(LinearEntry(columns, rows, 8, True, False, True))
        notes = {"linears": entries, "layers": []}
        write_checked_shard(self.shard(self.count - 1), tensors, notes)
        self.ledger.record(self.shard(self.count - 1), tensors, notes)
