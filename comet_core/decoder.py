"""A Hugging Face causal LM, seen as embeddings + layers + LinearGroups, one layer in memory at a time.

In: a ModelSource. Out: a Decoder, whose parameters live on the meta device until a part is asked for. Nothing here
knows a model family by name. Three facts are found by running the model's own code:
  - what each layer is called with (masks, rotary tables, ...): the model runs once with its layers switched off and
    their arguments recorded;
  - which linears share an input (a LinearGroup): they are handed the same tensor object (experts are COMET's own
    modules, whose groups are known);
  - whether a channel permutation can move into the producer's rows: the layer's output does not change when rows of
    the producer and columns of the consumer are permuted alike.
"""

import copy
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from comet_core.experts import Expert, Experts, layer_experts, separate_experts
from comet_core.host_memory import trim
from comet_core.kv_cache import sixteen_name
from comet_core.model_source import ModelSource
from comet_cuda.errors import CometError

PROBE_TOKENS = 16  # length of the short sequence that the structure of a layer is read from
FOLD_TOLERANCE = 1e-3  # relative change of a layer's output that still counts as "the same function" (float rounding)


@dataclass(frozen=True)
class LinearGroup:
    """Linears of one layer that read the same input, so they share one permutation and one activation quantizer."""

    names: tuple[str, ...]  # inside the layer, e.g. ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
    in_channels: int
    out_rows: int  # sum over the linears
    producers: tuple[str, ...] = ()  # linears whose rows can be permuted in place of this group's input


@dataclass
class Call:
    """What the model passes to one layer, beside the hidden states."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]


class StopForward(Exception):
    """Raised by a hook when what was wanted has been seen."""


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Modules built inside keep their buffers real (rotary tables are computed, not loaded) and have no weights."""
    original = nn.Module.register_parameter

    def register(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        if parameter is not None:
            parameter = nn.Parameter(parameter.detach().to("meta"), requires_grad=False)
        original(module, name, parameter)

    nn.Module.register_parameter = register  # type: ignore[method-assign,assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = original  # type: ignore[method-assign]


def build_empty(config: Any, attention: str, dtype: torch.dtype) -> nn.Module:
    """The model of `config` with parameters on the meta device and experts taken apart, in eval mode."""
    from transformers import AutoModelForCausalLM

    config = copy.deepcopy(config)  # transformers writes its choices into it
    with _parameters_on_meta():
        model: nn.Module = AutoModelForCausalLM.from_config(config, attn_implementation=attention, dtype=dtype)
        separate_experts(model)
    return model.eval()


def find_layers(model: nn.Module, kinds: tuple[type, ...] = (nn.Linear,)) -> tuple[str, nn.ModuleList]:
    """The decoder layers: the outermost ModuleList whose members hold linears. Returns (its name, the list).

    Args:
        kinds: classes of linears, where a model has others.
    """
    lists = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList)
        and len(module)
        and any(isinstance(part, kinds) for part in module[0].modules())
    ]
    if not lists:
        raise CometError(
            f"{type(model).__name__}: no list of decoder layers with nn.Linear modules was found",
            "COMET quantizes decoder-only language models whose layers are built from torch.nn.Linear",
        )
    return min(lists, key=lambda item: (item[0].count("."), -len(item[1])))


class Decoder:
    """A model whose parts are materialized on demand.

    Attributes:
        model: the transformers model; parameters are on meta except where `load` put them.
        layers: its decoder layers. `layer_prefix` is their name, e.g. "model.layers".
    """

    def __init__(self, source: ModelSource, *, device: str, dtype: torch.dtype, attention: str | None = None) -> None:
        self.source, self.device, self.dtype = source, torch.device(device), dtype
        self.width = int(source.config.get_text_config().hidden_size)  # channels between layers
        self.model = build_empty(source.config, attention or sixteen_name(source.config), dtype)
        self.layer_prefix, self.layers = find_layers(self.model)
        self._reader = source.weights()
        for module in self.model.modules():
            for name, buffer in module.named_buffers(recurse=False):
                setattr(module, name, buffer.to(self.device))
        self._refuse_stacks()
        self._tuple_output = False

    def _refuse_stacks(self) -> None:
        for name, parameter in self.layers.named_parameters():
            if parameter.dim() > 2:
                raise CometError(
                    f"{self.layer_prefix}.{name}: shape {tuple(parameter.shape)} is a stack of matrices in a layout "
                    f"that COMET cannot take apart ({type(self.model).__name__})",
                    "use a dense model, or experts stored as gate_up_proj [E, 2F, H] and down_proj [E, H, F]",
                )

    def load(self, module: nn.Module, prefix: str) -> None:
        """Materialize meta parameters and stored buffers of `module` (called `prefix` in the model) on the device."""
        for name, tensor in [*module.named_parameters(), *stored_buffers(module).items()]:
            if isinstance(tensor, nn.Parameter) and tensor.device.type != "meta":
                continue
            value = self._reader.load(f"{prefix}.{name}" if prefix else name).to(self.device)
            if value.shape != tensor.shape:
                raise CometError(
                    f"{prefix}.{name}: has shape {tuple(value.shape)}, the model wants {tuple(tensor.shape)}",
                    "config.json and the weights do not belong together",
                )
            if not all_finite(value):
                raise CometError(f"{prefix}.{name}: holds NaN or Inf", "the checkpoint is damaged; fetch it again")
            put_tensor(module, name, value, self.dtype)

    def unload(self, module: nn.Module) -> None:
        """Send the parameters that `module` owns itself back to meta, freeing their memory."""
        for leaf, parameter in list(module.named_parameters(recurse=False)):
            setattr(module, leaf, nn.Parameter(parameter.detach().to("meta"), requires_grad=False))

    def release_layer(self, index: int) -> None:
        """Drop layer `index` and all it holds; it cannot be used again."""
        self.layers[index] = nn.Module()
        trim()

    def load_layer(self, index: int) -> nn.Module:
        """Layer `index` with its weights in memory."""
        self.load(self.layers[index], f"{self.layer_prefix}.{index}")
        return self.layers[index]

    def non_layer_modules(self) -> list[tuple[str, nn.Module]]:
        """(name, module) of every module outside the layers that owns parameters: embeddings, final norm, lm_head."""
        inside = f"{self.layer_prefix}."
        found = []
        for name, module in self.model.named_modules():
            if not f"{name}.".startswith(inside) and list(module.named_parameters(recurse=False)):
                found.append((name, module))
        return found

    def load_non_layers(self) -> None:
        """Materialize embeddings, final norm and lm_head; tied embeddings stay one tensor."""
        head = self.model.get_output_embeddings()  # type: ignore[operator]
        tied = is_tied(self.model)
        for name, module in self.non_layer_modules():
            if not (tied and module is head):
                self.load(module, name)
        if tied:
            head.weight = self.model.get_input_embeddings().weight  # type: ignore[operator]

    @torch.no_grad()
    def first_hidden(self, tokens: Tensor) -> Tensor:
        """Tokens int64 [batch, length] -> hidden states [batch, length, D] that enter layer 0."""
        return self._record(tokens)[0]

    @torch.no_grad()
    def calls(self, tokens: Tensor) -> list[Call]:
        """What the model passes to each of its layers for tokens of this shape (values of the tokens do not matter)."""
        return self._record(tokens)[1]

    def _record(self, tokens: Tensor) -> tuple[Tensor, list[Call]]:
        """Run the model with every layer replaced by a recorder that hands the hidden states on.

        Layers return a tensor in some models and a tuple in others. A model that expects a tuple takes element 0 of
        the recorder's tensor, so the next layer sees another shape: then the run is repeated with tuples.
        """
        calls: list[Call] = []
        hidden: list[Tensor] = []
        misread = False

        def recorder(*args: Any, **kwargs: Any) -> Any:
            nonlocal misread
            states = kwargs.pop("hidden_states") if "hidden_states" in kwargs else args[0]
            hidden.append(states.detach())
            misread = states.shape != hidden[0].shape
            calls.append(Call(args[1:], kwargs))
            if misread or len(calls) == len(self.layers):
                raise StopForward
            return (states,) if self._tuple_output else states

        for layer in self.layers:
            layer.forward = recorder
        try:
            self.model(input_ids=tokens.to(self.device), use_cache=False)
        except StopForward:
            pass
        finally:
            for layer in self.layers:
                del layer.forward
        if misread and not self._tuple_output:
            self._tuple_output = True
            return self._record(tokens)
        if len(calls) != len(self.layers):
            raise CometError(
                f"{type(self.model).__name__}: its forward called {len(calls)} of the {len(self.layers)} modules of "
                f"{self.layer_prefix}",
                "COMET cannot walk this model layer by layer",
            )
        return hidden[0], calls


def stored_buffers(module: nn.Module) -> dict[str, Tensor]:
    """The buffers that a checkpoint holds (the bias of a router, for example), by name; not those that are computed."""
    return {
        f"{prefix}.{name}" if prefix else name: buffer
        for prefix, owner in module.named_modules()
        for name, buffer in owner.named_buffers(recurse=False)
        if name not in owner._non_persistent_buffers_set
    }


def put_tensor(module: nn.Module, name: str, value: Tensor, dtype: torch.dtype) -> None:
    """Let `value` be the parameter `name` of `module`, in `dtype`; or the buffer, in the buffer's own type."""
    owner, _, leaf = name.rpartition(".")
    parent = module.get_submodule(owner)
    buffer = dict(parent.named_buffers(recurse=False)).get(leaf)
    new = nn.Parameter(value.to(dtype), requires_grad=False) if buffer is None else value.to(buffer.dtype)
    setattr(parent, leaf, new)


def all_finite(tensor: Tensor) -> bool:
    """Whether a tensor holds neither NaN nor Inf, looked at in pieces so that no mask of its size is made."""
    if not tensor.is_floating_point() or not tensor.numel():
        return True
    rows = tensor.detach().reshape(1) if tensor.dim() == 0 else tensor.detach()
    step = max(1, (1 << 20) * len(rows) // rows.numel())
    return all(bool(torch.isfinite(part).all()) for part in rows.split(step))


def is_tied(model: nn.Module) -> bool:
    """Whether lm_head and the input embedding are one tensor."""
    return bool(getattr(model.config, "tie_word_embeddings", False)) and model.get_output_embeddings() is not None  # type: ignore[operator]


def run_layer(layer: nn.Module, hidden: Tensor, call: Call) -> Tensor:
    """Output hidden states of one layer."""
    out = layer(hidden, *call.args, **call.kwargs)
    return out if isinstance(out, Tensor) else out[0]


def layer_linears(layer: nn.Module) -> dict[str, nn.Linear]:
    """Linears of a layer by their name inside it. A linear of one row is a gate (of Qwen's shared expert) and none of
    these: like a router it stays as it is."""
    return {
        name: module
        for name, module in layer.named_modules()
        if isinstance(module, nn.Linear) and module.out_features > 1
    }


@torch.no_grad()
def linear_groups(layer: nn.Module, hidden: Tensor, call: Call, label: str) -> list[LinearGroup]:
    """The LinearGroups of a materialized layer in execution order, with the producers that can absorb a permutation.

    Args:
        layer: materialized layer. hidden: [1, PROBE_TOKENS, D] real hidden states. call: the layer's arguments.
        label: the layer's name, for errors.
    """
    stacks = layer_experts(layer)
    inside = tuple(f"{name}." for name in stacks)
    linears = {name: module for name, module in layer_linears(layer).items() if not name.startswith(inside)}
    inputs: list[Tensor] = []  # kept alive, so that ids stay unique
    members: dict[int, list[str]] = {}
    places: dict[str, int] = {}  # how many groups run before the experts

    def hook(name: str) -> Any:
        def see(_: nn.Module, args: tuple[Tensor, ...]) -> None:
            inputs.append(args[0])
            members.setdefault(id(args[0]), []).append(name)

        return see

    def mark(name: str) -> Any:
        def see(*_: Any) -> None:
            places[name] = len(members)

        return see

    handles = [module.register_forward_pre_hook(hook(name)) for name, module in linears.items()]
    handles += [module.register_forward_pre_hook(mark(name)) for name, module in stacks.items()]
    try:
        run_layer(layer, hidden, call)
    finally:
        for handle in handles:
            handle.remove()
    reached = [name for names in members.values() for name in names]
    if len(set(reached)) != len(reached):
        raise CometError(f"{label}: a linear runs more than once a layer", "COMET cannot quantize shared linears")
    missing = sorted(set(linears) - set(reached) | set(stacks) - set(places))
    if missing:
        raise CometError(
            f"{label}: {', '.join(missing[:4])} did not run on {PROBE_TOKENS} tokens",
            "COMET quantizes linears that every token passes, and experts that transformers keeps in a stack",
        )
    groups = []
    for names in members.values():
        rows = sum(linears[name].out_features for name in names)
        groups.append(LinearGroup(tuple(names), linears[names[0]].in_features, rows))
    groups = [_with_producers(group, groups, layer, hidden, call) for group in groups]
    for name, experts in reversed(stacks.items()):
        groups[places[name] : places[name]] = _expert_groups(name, experts)
    return groups


def _expert_groups(stack: str, experts: Experts) -> list[LinearGroup]:
    """The groups of the experts module `stack`, expert by expert: what experts.py makes them of."""
    groups = []
    for index, expert in enumerate(experts):
        assert isinstance(expert, Expert)
        gate, up, down = (f"{stack}.{index}.{name}" for name in ("gate_proj", "up_proj", "down_proj"))
        groups.append(LinearGroup((gate, up), expert.hidden, 2 * expert.inner))
        groups.append(LinearGroup((down,), expert.inner, expert.hidden, producers=(gate, up)))
    return groups


def _with_producers(
    group: LinearGroup, groups: Sequence[LinearGroup], layer: nn.Module, hidden: Tensor, call: Call
) -> LinearGroup:
    """Try each earlier group as the place to fold this group's input permutation into."""
    linears = layer_linears(layer)
    generator = torch.Generator().manual_seed(0)
    perm = torch.randperm(group.in_channels, generator=generator).to(hidden.device)
    before = run_layer(layer, hidden, call).float()
    for candidate in groups[: groups.index(group)]:
        if any(linears[name].out_features % group.in_channels for name in candidate.names):
            continue
        saved = {name: (linears[name].weight, linears[name].bias) for name in candidate.names + group.names}
        for name in candidate.names:
            permute_rows(linears[name], perm)
        for name in group.names:
            linears[name].weight = nn.Parameter(linears[name].weight[:, perm], requires_grad=False)
        after = run_layer(layer, hidden, call).float()
        for name, (weight, bias) in saved.items():
            linears[name].weight, linears[name].bias = weight, bias
        if (after - before).norm() <= FOLD_TOLERANCE * (before - hidden.float()).norm():
            return LinearGroup(group.names, group.in_channels, group.out_rows, candidate.names)
    return group


def permute_rows(linear: nn.Linear, perm: Tensor) -> None:
    """Permute the rows of a producer by `perm` [K]; a fused producer of n * K rows is permuted part by part."""
    parts = linear.out_features // perm.shape[0]
    rows = torch.cat([perm + part * perm.shape[0] for part in range(parts)])
    linear.weight = nn.Parameter(linear.weight[rows], requires_grad=False)
    if linear.bias is not None:
        linear.bias = nn.Parameter(linear.bias[rows], requires_grad=False)


def load_sixteen(source: ModelSource, device: str, dtype: torch.dtype) -> nn.Module:
    """The unquantized model of a source, whole, in `dtype` on `device`."""
    decoder = Decoder(source, device=device, dtype=dtype)
    decoder.load_non_layers()
    for index in range(len(decoder.layers)):
        decoder.load_layer(index)
    return decoder.model
