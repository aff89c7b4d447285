"""A model whose experts are stacked -> the same model with one module per expert, made of plain linears.

transformers keeps the experts of a layer in two parameters, gate_up_proj [E, 2F, H] and down_proj [E, H, F]. Everything
here works on linears, so the stack is taken apart where a model is built, and nothing downstream knows of experts but
for two facts: an expert sees the tokens that are routed to it, and perhaps none. Routing stays the model's own.

Files name experts one by one, or hold the stack; which name means what is read off transformers' own table.
"""

import re
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

STACKS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}  # parameter -> linears of an expert
FLAGS = {  # what transformers says of a stack's layout, and what is taken apart here
    "has_gate": True,
    "has_bias": False,
    "is_transposed": False,
    "is_concatenated": True,
}
INSIDE = re.compile(r"(?P<experts>.*)\.(?P<index>\d+)\.(?:gate_proj|up_proj|down_proj)$")


class ExpertLinear(nn.Linear):
    """A linear that draws no weights: they are read, and large mixtures have twenty thousand of it."""

    def reset_parameters(self) -> None:
        """Nothing."""


class Expert(nn.Module):
    """down(act(gate(x)) * up(x)). H channels in and out, F inside."""

    def __init__(self, hidden: int, inner: int, activation: Callable[[Tensor], Tensor], dtype: torch.dtype) -> None:
        super().__init__()
        self.hidden, self.inner = hidden, inner
        kind: dict[str, Any] = {"bias": False, "device": "meta", "dtype": dtype}
        self.gate_proj, self.up_proj = ExpertLinear(hidden, inner, **kind), ExpertLinear(hidden, inner, **kind)
        self.down_proj = ExpertLinear(inner, hidden, **kind)
        self.act_fn = activation

    def forward(self, x: Tensor) -> Tensor:
        """x: float [T, H] -> [T, H]."""
        y: Tensor = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
        return y


class Experts(nn.ModuleList):
    """The experts of one layer, called as the stack that they replace."""

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Each token's weighted sum over its experts.

        Args:
            hidden_states: float [T, H]. top_k_index: int64 [T, k], experts of a token. top_k_weights: [T, k].
        """
        summed = torch.zeros_like(hidden_states)
        for index in top_k_index.unique().tolist():
            if index < len(self):  # transformers marks "no expert" by a number past the last
                token, place = torch.where(top_k_index == index)
                y = self[index](hidden_states[token]) * top_k_weights[token, place, None]
                summed.index_add_(0, token, y.to(summed.dtype))
        return summed


def separate_experts(model: nn.Module) -> nn.Module:
    """Replace every stack of experts that can be taken apart by `Experts` without weights (meta device).

    Args:
        model: without weights. Returns the same object.
    """
    for name, module in list(model.named_modules()):
        if _is_stack(module):
            stack: Any = module
            count, hidden, inner = stack.down_proj.shape
            parts = (Expert(hidden, inner, stack.act_fn, stack.down_proj.dtype) for _ in range(count))
            owner, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(owner), leaf, Experts(parts))
    return model


def _is_stack(module: nn.Module) -> bool:
    """Whether a module is a stack of gated experts in the common layout that computes what `Expert` computes."""
    shapes = {name: tuple(parameter.shape) for name, parameter in module.named_parameters()}
    if shapes.keys() != STACKS.keys() or any(len(shape) != 3 for shape in shapes.values()):
        return False
    count, hidden, inner = shapes["down_proj"]
    laid_out = all(getattr(module, flag, None) is value for flag, value in FLAGS.items())
    if not laid_out or shapes["gate_up_proj"] != (count, 2 * inner, hidden) or hasattr(module, "post_expert_norm"):
        return False
    stack: Any = module
    both = torch.linspace(-30, 30, 4 * inner, device="cpu").view(2, -1)  # wide enough to meet a clamp
    gate, up = both.chunk(2, -1)
    return torch.equal(stack._apply_gate(both), stack.act_fn(gate) * up)


def layer_experts(layer: nn.Module) -> dict[str, Experts]:
    """The experts modules of a layer by their name inside it; empty for a dense layer."""
    return {name: module for name, module in layer.named_modules() if isinstance(module, Experts)}


def expert_of(linear: str) -> tuple[str, int] | None:
    """ "mlp.experts.3.up_proj" -> ("mlp.experts", 3); None for a linear outside experts."""
    found = INSIDE.match(linear)
    return (found["experts"], int(found["index"])) if found else None


def any_expert(linear: str) -> str:
    """ "mlp.experts.3.up_proj" -> "mlp.experts.*.up_proj"; other names as they are."""
    found = expert_of(linear)
    return f"{found[0]}.*.{linear.rpartition('.')[2]}" if found else linear


def list_experts(linears: Iterable[str]) -> list[str]:
    """Names of experts' linears -> one line per layer: "model.layers.3.mlp.experts 1, 5"."""
    numbers: dict[str, set[int]] = {}
    for name in linears:
        if found := expert_of(name):
            numbers.setdefault(found[0], set()).add(found[1])
    return [f"{name} {', '.join(map(str, sorted(indices)))}" for name, indices in numbers.items()]


def file_names(model: nn.Module) -> Callable[[str], str]:
    """A function: a tensor's name in the files -> its name in `model` once its experts are separate.

    Args:
        model: a transformers model. Its table of conversions says what the files of its family are called.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter

    table = get_model_conversion_mapping(model, add_legacy=False)  # type: ignore[arg-type]
    merges = [entry for entry in table if isinstance(entry, WeightConverter)]
    renames = [entry for entry in table if not isinstance(entry, WeightConverter)]

    def rename(name: str) -> str:
        for entry in renames:
            name, _ = entry.rename_source_key(name)
        for merge in merges:
            merged, source = merge.rename_source_key(name)
            owner, _, leaf = merged.rpartition(".")
            number = re.search(r"\.(\d+)\.\w+\.weight$", name)
            if source is not None and number and leaf in STACKS:
                return f"{owner}.{number[1]}.{STACKS[leaf][merge.source_patterns.index(source)]}.weight"
        return name

    return rename
