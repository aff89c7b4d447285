"""W4AxLinear: a linear layer on packed weights, and putting such layers into a model.

Forward is quantize_act -> w4ax_gemm: the kernels on a GPU, which read weights in that GPU's own layout (made at first
use), the references on a CPU. With 16-bit activations the weights are decoded and multiplied as they are; 8-bit weights
have the reference only.
"""

from collections.abc import Callable
from typing import Any, Self

import torch
from torch import Tensor, nn

from comet_core.plan import BlockPlan
from comet_core.quantize import QuantizedWeight, quantize_rtn, to_storage
from comet_core.recipe import WeightSpec
from comet_cuda.affine import BLOCK, num_blocks, split_blocks
from comet_cuda.prepared_linear import ActivationFormat, PreparedLinear, prepare_linear
from comet_cuda.quantize_act import TOKEN, quantize_act, to_blocks
from comet_cuda.w4ax_gemm import w4ax_gemm, weight_integers

STORED = ("qweight", "w_scale", "w_zero", "weight_base", "block_bits", "perm", "act_clip", "bias")
CHUNK = 1 << 20  # values of an embedding that are converted at once


class W4AxLinear(nn.Module):
    """y = x W^T + bias with W packed. K in_features, N out_features, NB = ceil(K / 128).

    Buffers (their names are the checkpoint's): qweight, w_scale, w_zero (or None), weight_base (or None), block_bits,
    perm (or None when the producer's rows carry the permutation), act_clip, bias (or None).
    """

    qweight: Tensor
    w_scale: Tensor
    w_zero: Tensor | None
    weight_base: Tensor | None
    block_bits: Tensor
    perm: Tensor | None
    act_clip: Tensor
    bias: Tensor | None

    def __init__(
        self, in_features: int, out_features: int, tensors: dict[str, Tensor], hadamard: bool, share: int = 1
    ) -> None:
        super().__init__()
        self.in_features, self.out_features, self.hadamard, self.share = in_features, out_features, hadamard, share
        for name in STORED:
            self.register_buffer(name, tensors.get(name))
        self.act_bits = int(self.block_bits.max())  # 16: weight-only
        self._prepared: PreparedLinear | None = None
        self._added: Tensor | None = None  # the bias as the prepared linear adds it: float32

    def _apply(self, fn: Callable[..., Any], recurse: bool = True) -> Self:
        self._prepared = self._added = None  # they belong to the device that the tensors leave
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return self

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_prepared": None, "_added": None}  # a copy may go to another device

    @property
    def inputs(self) -> ActivationFormat:
        """How the layer's input becomes codes."""
        return ActivationFormat(self.perm, self.block_bits, self.act_clip, self.hadamard, self.share)

    def prepared(self, layout: str | None = None) -> PreparedLinear:
        """The layer in the layout of the GPU that it is on (made once).

        Args:
            layout: of a GPU family, for a layer on a CPU: from then on its forward is the references of that family's
                kernels.
        """
        if self._prepared is None:
            self._prepared = prepare_linear(self.qweight, self.w_scale, self.w_zero, self.inputs, layout)
            self._added = None if self.bias is None else self.bias.float()
        return self._prepared

    def forward(self, x: Tensor) -> Tensor:
        """x: float [..., K] -> the same type [..., N]."""
        rows = x if x.dim() == 2 else x.reshape(-1, self.in_features)
        if self.act_bits == 16:
            y = self._weight_only(rows)
        elif self._prepared is not None or (rows.is_cuda and has_kernel(self)):
            y = self.prepared()(rows, self._added)
        else:
            qx, sx = self._quantize(rows)
            y = w4ax_gemm(qx, sx, self.qweight, self.w_scale, self.w_zero, self.block_bits, self.bias, x.dtype)
        return y if x.dim() == 2 else y.view(*x.shape[:-1], self.out_features)

    def _quantize(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        return quantize_act(rows, self.perm, self.block_bits, self.act_clip, self.hadamard, self.share)

    def _weight_only(self, rows: Tensor) -> Tensor:
        weight = weight_integers(self.qweight, self.w_zero) * self.w_scale.float()[..., None]
        y = to_blocks(rows, self.perm).flatten(1) @ weight.flatten(1).T.to(rows.dtype)
        return y if self.bias is None else y + self.bias.to(y.dtype)

    def fake_quantized(self, x: Tensor) -> Tensor:
        """The same function by dequantized operands and one float32 product: what the packed form must agree with."""
        rows = x.reshape(-1, self.in_features)
        weight = weight_integers(self.qweight, self.w_zero) * self.w_scale.float()[..., None]
        if self.act_bits == 16:
            blocks = to_blocks(rows, self.perm).float()
        else:
            codes, scale = self._quantize(rows)
            blocks = codes.float() * scale[..., None]
        y = blocks.flatten(1) @ weight.flatten(1).T
        y = y if self.bias is None else y + self.bias.float()
        return y.to(x.dtype).view(*x.shape[:-1], self.out_features)

    def extra_repr(self) -> str:
        """Shape and precision, for print(model)."""
        int8 = int((self.block_bits == 8).sum())
        return f"in={self.in_features}, out={self.out_features}, blocks={len(self.block_bits)}, int8_blocks={int8}"


def has_kernel(linear: W4AxLinear) -> bool:
    """Whether a GPU runs this linear by COMET's kernels: 4-bit weights, 4- or 8-bit activations."""
    return linear.act_bits < 16 and linear.qweight.dtype == torch.uint8


def linear_tensors(weight: QuantizedWeight, plan: BlockPlan, bias: Tensor | None, *, folded: bool) -> dict[str, Tensor]:
    """The buffers of a W4AxLinear, by name. `folded`: the producer's rows carry the permutation."""
    tensors = {
        "qweight": weight.qweight,
        "w_scale": weight.scale,
        "w_zero": weight.zero,
        "weight_base": weight.base,
        "block_bits": plan.block_bits,
        "perm": None if folded else plan.perm,
        "act_clip": plan.clip,
        "bias": bias,
    }
    return {name: tensor.contiguous() for name, tensor in tensors.items() if tensor is not None}


def unquantized_input(in_features: int) -> dict[str, Tensor]:
    """block_bits and act_clip of a linear whose input stays in 16 bit."""
    blocks = num_blocks(in_features)
    return {"block_bits": torch.full((blocks,), 16, dtype=torch.uint8), "act_clip": torch.ones(blocks)}


def replace_linear(
    parent: nn.Module, name: str, tensors: dict[str, Tensor], hadamard: bool, share: int = 1
) -> W4AxLinear:
    """Put a W4AxLinear with these tensors in place of the linear `name` (dotted) of `parent`."""
    old = parent.get_submodule(name)
    assert isinstance(old, nn.Linear | W4AxLinear)
    owner, _, leaf = name.rpartition(".")
    new = W4AxLinear(old.in_features, old.out_features, tensors, hadamard, share)
    setattr(parent.get_submodule(owner), leaf, new)
    return new


def expected_shapes(
    in_features: int, out_features: int, weight_bits: int, symmetric: bool, folded: bool = False, share: int = 1
) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """dtype and shape of each tensor that is stored of a linear, but for its bias. folded: there is no permutation."""
    blocks = num_blocks(in_features)
    qweight = (
        (torch.int8, (out_features, BLOCK * blocks))
        if weight_bits == 8
        else (
            torch.uint8,
            (out_features, BLOCK // 2 * blocks),
        )
    )
    shapes = {
        "qweight": qweight,
        "w_scale": (torch.bfloat16, (out_features, blocks)),
        "block_bits": (torch.uint8, (blocks,)),
        "act_clip": (torch.float32, (blocks,)),
    }
    if not folded:
        shapes["perm"] = (torch.int32, (in_features,))
    if share == TOKEN:
        shapes["weight_base"] = (torch.bfloat16, (out_features,))
    if weight_bits == 4 and not symmetric:
        shapes["w_zero"] = (torch.uint8, (out_features, blocks))
    return shapes


class Int8Embedding(nn.Module):
    """Token embedding in 8 bit: one bfloat16 scale per token and block of 128 channels.

    Buffers: qweight int8 [V, 128 * NB], w_scale bf16 [V, NB].
    """

    qweight: Tensor
    w_scale: Tensor

    def __init__(self, qweight: Tensor, w_scale: Tensor, width: int, dtype: torch.dtype, factor: float) -> None:
        super().__init__()
        self.width, self.dtype, self.factor = width, dtype, factor
        self.register_buffer("qweight", qweight)
        self.register_buffer("w_scale", w_scale)

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens: int64 [...] -> dtype [..., width], times the model's embedding factor."""
        codes = split_blocks(self.qweight[tokens].float())
        rows = (codes * self.w_scale[tokens].float()[..., None]).flatten(-2)[..., : self.width]
        embedded: Tensor = (rows * self.factor).to(self.dtype)
        return embedded


def sixteen_bit(parameter: Tensor) -> Tensor:
    """What stays unquantized is stored in bfloat16, or float16 where that holds it exactly and bfloat16 does not."""
    value = parameter.detach()
    if value.dtype in (torch.bfloat16, torch.float16):
        return value
    for dtype in (torch.bfloat16, torch.float16):
        if all(torch.equal(part.to(dtype).to(value.dtype), part) for part in value.flatten().split(CHUNK)):
            return value.to(dtype)
    return value.to(torch.bfloat16)


def eight_bit(weight: Tensor) -> QuantizedWeight:
    """8-bit weights rounded to nearest, one scale per row and 128 channels; a piece of the rows at a time."""
    rows, columns = weight.shape
    identity = torch.arange(columns, dtype=torch.int32)
    bits = torch.full((-(-columns // BLOCK),), 16, dtype=torch.uint8)
    plan = BlockPlan(identity, bits, torch.ones_like(bits, dtype=torch.float32), False)
    spec = WeightSpec(bits=8, method="rtn", clip_search=False)
    codes = torch.empty(rows, BLOCK * len(bits), dtype=torch.int8)
    scale = torch.empty(rows, len(bits), dtype=torch.bfloat16)
    importance = torch.ones(BLOCK * len(bits))
    step = max(1, CHUNK // columns)
    for start in range(0, rows, step):
        part = quantize_rtn(to_storage(weight[start : start + step], plan), importance, spec)
        codes[start : start + step], scale[start : start + step] = part.qweight, part.scale
    return QuantizedWeight(codes, scale, None)
