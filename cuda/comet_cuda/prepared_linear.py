"""A packed linear on one GPU: its weights in that GPU's layout, and quantize_act -> w4ax_gemm on them.

In: the canonical tensors of a packed linear, on a GPU. Out: a function of its input. Which layout, which kernel is
decided once, here, by the compute capability (dispatch.py); everything after is two launches a call.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from comet_cuda.dispatch import device_capability, family_of
from comet_cuda.quantize_act_cuda import quantize_act_tiled
from comet_cuda.w4ax_gemm_sm80 import Sm80Weight, prepare_weight_sm80, w4ax_gemm_sm80
from comet_cuda.w4ax_gemm_sm90 import TiledWeight, prepare_weight_sm90, w4ax_gemm_tiled


@dataclass(frozen=True)
class ActivationFormat:
    """How the input of a linear becomes codes: the arguments of `quantize_act` after x. NB blocks, K channels."""

    perm: Tensor | None  # int32 [K]
    block_bits: Tensor  # uint8 [NB], 4 or 8
    clip: Tensor  # f32 [NB]
    hadamard: bool
    share: int = 1
    unit: Tensor | None = None  # f32 [NB], with share 4


@dataclass(frozen=True)
class PreparedLinear:
    """Weights in the layout of one GPU family, and the format of the activations that meet them."""

    layout: str  # of activations: "sm_90", "sm_80" or "portable"
    weight: TiledWeight | Sm80Weight
    inputs: ActivationFormat

    def quantize(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x: float [M, K] -> codes and meta in this layout."""
        f = self.inputs
        return quantize_act_tiled(x, f.perm, f.block_bits, f.clip, f.hadamard, self.layout, f.share, f.unit)

    def multiply(self, codes: Tensor, meta: Tensor, tokens: int, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
        """What `quantize` (or a fused form of it) returned for M tokens -> dtype [M, N]."""
        if isinstance(self.weight, TiledWeight):
            return w4ax_gemm_tiled(codes, meta, self.weight, tokens, bias, dtype)
        return w4ax_gemm_sm80(codes, meta, self.weight, bias, dtype)

    def __call__(self, x: Tensor, bias: Tensor | None) -> Tensor:
        """x: float [M, K] -> the same type [M, N]."""
        codes, meta = self.quantize(x)
        return self.multiply(codes, meta, x.shape[0], bias, x.dtype)


def prepare_linear(
    qweight: Tensor, w_scale: Tensor, w_zero: Tensor | None, inputs: ActivationFormat, layout: str | None = None
) -> PreparedLinear:
    """Canonical 4-bit weights (w4ax_gemm.py) -> the layout of the GPU that they are on.

    Args:
        qweight: uint8 [N, 64 * NB]; w_scale: bf16 [N, NB]; w_zero: uint8 [N, NB] or None. Several linears that share
            an input are one linear whose rows are stacked.
        inputs: of their common input, on the same device.
        layout: overrides the GPU's own (tests; tensors on a CPU, where the ops are the references).

    Errors:
        CometError for a GPU older than compute capability 8.0.
    """
    layout = layout or family_of(device_capability(qweight.get_device())).name
    if layout == "sm_90":
        sm90 = prepare_weight_sm90(qweight, w_scale, w_zero, inputs.block_bits, inputs.share)
        return PreparedLinear(layout, sm90, inputs)
    portable = layout == "portable"
    return PreparedLinear(layout, prepare_weight_sm80(qweight, w_scale, w_zero, inputs.block_bits, portable), inputs)
