"""AWQ and GPTQ checkpoints as input models: their linears appear as 16-bit weights, decoded when they are read.

In: a folder whose linears are stored as qweight, qzeros, scales (and g_idx). Out: the same readers' view as of any
folder. Starting from weights that were rounded once loses accuracy twice; whoever reads a number is told (`note`).

K in-channels, N out-channels, groups of channels share a scale and a zero point. 4- or 8-bit codes stand in int32
words, the first in the lowest bits:
  GPTQ: qweight [K / n, N] along channels, qzeros [G, N / n] holding zero - 1 (checkpoint_format gptq) or zero
        (gptq_v2), scales f16 [G, N], g_idx int32 [K]: the group of each channel.
  AWQ:  qweight [K, N / 8] and qzeros [G, N / 8] along rows, which stand in a word in the order 0 2 4 6 1 3 5 7.
Source: the storage conventions of AutoGPTQ / GPTQModel and AutoAWQ (gemm).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from comet_core.safetensors_files import StoredTensor, find_tensors, load_integers, load_tensor
from comet_core.weight_reader import ParameterTable, SafetensorsReader
from comet_cuda.errors import CometError

if TYPE_CHECKING:
    from torch import Tensor

METHODS = ("awq", "gptq")
WORD = 32  # bits
AWQ_ROWS = (0, 2, 4, 6, 1, 3, 5, 7)  # row of a word's code, lowest bits first
PARTS = ("qweight", "qzeros", "scales")


@dataclass(frozen=True)
class PackedFormat:
    """How a checkpoint says its linears are stored."""

    method: str  # awq | gptq
    bits: int  # 4 or 8
    group_size: int  # channels; -1: all of a linear
    zero_offset: int  # added to stored zero points

    @property
    def note(self) -> str:
        """The sentence that goes with every number."""
        return f"dequantized from a {self.bits}-bit {self.method.upper()} checkpoint"


@dataclass(frozen=True)
class PackedWeight(StoredTensor):
    """A linear's weight [N, K] that is stored in parts; looks like a float16 tensor."""

    parts: Mapping[str, StoredTensor]
    format: PackedFormat


def packed_format(folder: Path, quantization: Any) -> PackedFormat | None:
    """The format that `quantization_config` describes; None if it is another method's.

    Raises:
        CometError: the method is one of these two, but in a variant that cannot be read.
    """
    if not isinstance(quantization, dict) or quantization.get("quant_method") not in METHODS:
        return None
    method = quantization["quant_method"]
    bits: Any = quantization.get("bits", quantization.get("w_bit"))
    group = quantization.get("group_size", quantization.get("q_group_size"))
    version = str(quantization.get("checkpoint_format" if method == "gptq" else "version", "")).lower()
    readable = {"gptq": {"", "gptq", "gptq_v2"}, "awq": {"", "gemm"}}[method]
    good_bits = (4, 8) if method == "gptq" else (4,)
    if bits not in good_bits or not isinstance(group, int) or isinstance(group, bool) or version not in readable:
        raise CometError(
            f"{folder}: a {method.upper()} checkpoint of {bits!r} bits, groups of {group!r}, format {version!r}",
            f"readable are {good_bits} bits in the formats {', '.join(sorted(readable - {''}))}, else the original",
        )
    return PackedFormat(method, bits, group, 1 if method == "gptq" and version != "gptq_v2" else 0)


class QuantizedReader(SafetensorsReader):
    """Parameters of an AWQ or GPTQ folder; what is packed is decoded on reading."""

    def __init__(self, folder: Path, table: ParameterTable, form: PackedFormat) -> None:
        """Checks every parameter, packed ones too.

        Raises:
            CometError: names the file or the parameter that is wrong.
        """
        super().__init__(folder, table, stored=_virtual(find_tensors(folder), form))

    def load(self, name: str) -> "Tensor":
        """One parameter: CPU; a packed one in float16, or in bfloat16 if float16 cannot hold it."""
        stored = self._stored[name]
        return _decode(name, stored) if isinstance(stored, PackedWeight) else load_tensor(name, stored)

    def files(self) -> list[Path]:
        """The shards that are read, sorted."""
        found = set(super().files())
        for stored in self._stored.values():
            if isinstance(stored, PackedWeight):
                found |= {part.file for part in stored.parts.values()}
        return sorted(found)


def _virtual(stored: dict[str, StoredTensor], form: PackedFormat) -> dict[str, StoredTensor]:
    """The stored tensors with every packed linear replaced by its weight."""
    found = {}
    for name, tensor in stored.items():
        owner, _, leaf = name.rpartition(".")
        if f"{owner}.qweight" not in stored:
            found[name] = tensor
        elif leaf == "qweight":
            found[f"{owner}.weight"] = _weight(owner, stored, form)
        elif leaf == "bias":
            found[name] = tensor
    return found


def _weight(owner: str, stored: Mapping[str, StoredTensor], form: PackedFormat) -> PackedWeight:
    """The packed weight of one linear, its parts' shapes and types held against each other."""
    absent = [leaf for leaf in PARTS if f"{owner}.{leaf}" not in stored]
    if absent:
        raise CometError(f"{owner}.{absent[0]} is missing beside its qweight", "Fetch the checkpoint again.")
    parts = {leaf: stored[f"{owner}.{leaf}"] for leaf in (*PARTS, "g_idx") if f"{owner}.{leaf}" in stored}
    per_word = WORD // form.bits
    first, second = parts["qweight"].shape if len(parts["qweight"].shape) == 2 else (0, 0)
    width, rows = (first * per_word, second) if form.method == "gptq" else (first, second * per_word)
    groups = -(-width // form.group_size) if form.group_size > 0 else 1
    wanted: dict[str, tuple[str, tuple[int, ...]]] = {
        "qweight": ("I32", (first, second)),
        "qzeros": ("I32", (groups, rows // per_word)),
        "g_idx": ("I32", (width,)),
    }
    for leaf, part in parts.items():
        kind, shape = wanted.get(leaf, (part.dtype, (groups, rows)))
        if part.dtype != kind or part.shape != shape or not width:
            raise CometError(
                f"{part.file}: {owner}.{leaf} is {part.dtype} {part.shape}, not {kind} {shape}",
                "The files do not belong to this config.json: fetch both from the same place.",
            )
    whole = parts["qweight"]
    return PackedWeight(whole.file, "F16", (rows, width), whole.begin, whole.nbytes, parts, form)


def _decode(name: str, stored: PackedWeight) -> "Tensor":
    """The weight [N, K] of one packed linear."""
    import torch

    form, parts = stored.format, stored.parts
    qweight, qzeros = (load_integers(f"{name} ({leaf})", parts[leaf]) for leaf in ("qweight", "qzeros"))
    codes = _unpack(qweight.T, form) if form.method == "gptq" else _unpack(qweight, form).T  # [N, K]
    zeros = (_unpack(qzeros, form) + form.zero_offset) & ((1 << form.bits) - 1)  # [G, N]
    scales = load_tensor(name, parts["scales"]).float()  # [G, N]
    width = stored.shape[1]
    size = form.group_size if form.group_size > 0 else width
    group = load_integers(name, parts["g_idx"]).long() if "g_idx" in parts else torch.arange(width) // size
    if int(group.min()) < 0 or int(group.max()) >= scales.shape[0]:
        raise CometError(f"{name}: g_idx names a group that is not there", "Fetch the checkpoint again.")
    weight = (codes - zeros[group].T).float() * scales[group].T
    half = weight.to(torch.float16)
    return half if bool(torch.isfinite(half).all()) else weight.to(torch.bfloat16)


def _unpack(words: "Tensor", form: PackedFormat) -> "Tensor":
    """int32 words [R, C] -> int32 codes [R, n * C]."""
    import torch

    places = range(WORD // form.bits)
    order = sorted(places, key=AWQ_ROWS.__getitem__) if form.method == "awq" else list(places)
    shifts = torch.tensor(order, dtype=torch.int32) * form.bits
    return ((words[..., None] >> shifts) & ((1 << form.bits) - 1)).flatten(1)
