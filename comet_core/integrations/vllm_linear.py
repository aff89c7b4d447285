"""A packed linear inside vLLM: its tensors by rank, and quantize_act -> w4ax_gemm on them.

Rows of linears that share an input (qkv, gate_up) stand on top of each other in one set of tensors, as vLLM fuses
them; what belongs to the input (perm, block_bits, act_clip) is stored with each of them and must be the same.
vLLM's own weight loaders cut the pieces: `output_dim` and `input_dim` of a parameter say along which axes.
"""

from typing import Any

import torch
from torch import Tensor, nn
from vllm.config import get_current_vllm_config
from vllm.model_executor.layers.linear import LinearMethodBase, RowParallelLinear
from vllm.model_executor.utils import set_weight_attrs

from comet_core.integrations.tensor_parallel import check_row_parallel, local_permutation, local_shapes
from comet_core.packed import PACK_TENSORS, LinearEntry
from comet_cuda.affine import num_blocks
from comet_cuda.bank_order import spread_over_banks
from comet_cuda.errors import CometError
from comet_cuda.prepared_linear import ActivationFormat, prepare_linear
from comet_cuda.quantize_act import quantize_act
from comet_cuda.w4ax_gemm import w4ax_gemm

# Where vLLM loads no weights (load_format dummy, for measuring speed):
DUMMY_SCALE = 2.0**-10  # weight scale
DUMMY_INT8 = 6  # one block in so many is INT8, about what the default recipe keeps


class CometLinearMethod(LinearMethodBase):  # type: ignore[misc]
    """vLLM's view of packed linears of one kind."""

    def __init__(self, entry: LinearEntry, granularity: int) -> None:
        self.entry, self.granularity = entry, granularity

    def create_weights(
        self,
        layer: Any,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra: Any,
    ) -> None:
        """Register empty parameters for this rank's part of `layer`."""
        loader, rows, width = extra.pop("weight_loader"), sum(output_partition_sizes), input_size_per_partition
        row_parallel = isinstance(layer, RowParallelLinear)
        if row_parallel:
            check_row_parallel(layer.prefix, self.entry, layer.tp_size, self.granularity)
        for leaf, (dtype, shape, row_axis, input_axis) in local_shapes(self.entry, rows, width).items():
            parameter = nn.Parameter(_initial(leaf, dtype, shape), requires_grad=False)
            shared = row_axis is None and not row_parallel
            attributes = {"output_dim": row_axis, "input_dim": input_axis, "weight_loader": loader}
            if shared:  # the members of a fused linear each bring a copy
                attributes = {"weight_loader": _SharedLoader(f"{layer.prefix}.{leaf}")}
            set_weight_attrs(parameter, {key: value for key, value in attributes.items() if value is not None} | extra)
            layer.register_parameter(leaf, parameter)

    def process_weights_after_loading(self, layer: Any) -> None:
        """Put the weights into the layout of the GPU and drop the loaded ones."""
        leaves = {leaf: getattr(layer, leaf).data for leaf in _leaves(layer)}
        rank = layer.tp_rank if isinstance(layer, RowParallelLinear) else 0
        if get_current_vllm_config().load_config.load_format == "dummy":
            rank = 0  # what follows has no other rank's channels in it
            for leaf, tensor in leaves.items():
                with tensor.device:
                    tensor.copy_(_initial(leaf, tensor.dtype, tuple(tensor.shape)))
        _check(layer.prefix, leaves)
        perm = leaves.get("perm")
        if perm is not None:
            perm = local_permutation(layer.prefix, perm, rank)
        entry = self.entry
        inputs = ActivationFormat(perm, leaves["block_bits"], leaves["act_clip"], entry.hadamard, entry.share)
        layer.comet_inputs = inputs
        if leaves["qweight"].is_cuda:
            weight = (leaves["qweight"], leaves["w_scale"], leaves.get("w_zero"))
            layer.comet_prepared = prepare_linear(*weight, inputs)
            for leaf in leaves:
                delattr(layer, leaf)
            if getattr(layer, "bias", None) is not None and not layer.skip_bias_add:
                layer.bias.data = layer.bias.data.float()  # what the kernel adds

    def apply(self, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """x: float [..., K] -> the same type [..., N]."""
        rows = x.reshape(-1, x.shape[-1])
        prepared = getattr(layer, "comet_prepared", None)
        if prepared is not None:
            y: Tensor = prepared(rows, bias)
        else:
            f = layer.comet_inputs
            codes, scale = quantize_act(rows, f.perm, f.block_bits, f.clip, f.hadamard, f.share)
            zero = getattr(layer, "w_zero", None)
            y = w4ax_gemm(codes, scale, layer.qweight, layer.w_scale, zero, f.block_bits, bias, x.dtype)
        return y.view(*x.shape[:-1], y.shape[-1])


class _SharedLoader:
    """Loads a tensor that every member of a fused linear brings: the first is kept, the others must equal it."""

    def __init__(self, name: str) -> None:
        self.name, self.loaded = name, False

    def __call__(self, parameter: nn.Parameter, loaded: Tensor, *_: Any) -> None:
        if self.loaded and not torch.equal(parameter.data, loaded.to(parameter.device)):
            raise CometError(
                f"{self.name}: the linears that run as one have different plans", "the folder is damaged; pack it again"
            )
        parameter.data.copy_(loaded)
        self.loaded = True


def _initial(leaf: str, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """What a tensor holds before anything is loaded, which must be harmless: weights may never come (dummy)."""
    if leaf == "perm":
        return spread_over_banks(torch.randperm(shape[0], dtype=dtype), _dummy_bits(num_blocks(shape[0])))
    if leaf == "block_bits":
        return _dummy_bits(shape[0]).to(dtype)
    value = {"act_clip": 1.0, "w_zero": 8, "w_scale": DUMMY_SCALE, "weight_base": DUMMY_SCALE}.get(leaf, 0)
    if leaf == "qweight":
        return torch.randint(0, 256, shape, dtype=dtype)
    return torch.full(shape, value, dtype=dtype)


def _dummy_bits(blocks: int) -> Tensor:
    return torch.where(torch.arange(blocks) < blocks // DUMMY_INT8, 8, 4)


def _leaves(layer: Any) -> list[str]:
    return [name for name in PACK_TENSORS if getattr(layer, name, None) is not None]


def _check(name: str, leaves: dict[str, Tensor]) -> None:
    """Raise CometError for values that no packing writes."""
    clip, scale = leaves["act_clip"], leaves["w_scale"].float()
    good = {
        "block_bits": bool(((leaves["block_bits"] == 4) | (leaves["block_bits"] == 8)).all()),
        "act_clip": bool(((clip > 0) & (clip <= 1)).all()),
        "w_scale": bool((torch.isfinite(scale) & (scale > 0)).all()),
    }
    for leaf, is_good in good.items():
        if not is_good:
            raise CometError(f"{name}.{leaf}: holds a value that no packing writes", "the folder is damaged")
