"""The calibration windows on their way through one layer: rows of what enters any of its linears.

The windows run through a layer once per group, up to that group. For experts that would be hundreds of runs, and each
would show only the tokens that were routed there. So the windows run once up to the router's decision; from then on an
expert is run alone on the tokens that were sent to it. In the unquantized model it sees the same tokens, wherever that
model would have sent them: the two kinds of row must belong together.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from comet_core.decoder import Call, StopForward, run_layer
from comet_core.experts import expert_of
from comet_core.hidden import HiddenStates
from comet_core.lanes import Copies, Lanes
from comet_core.linear import W4AxLinear

MEMO_BYTES = 1 << 30  # of outputs remembered inside one layer, on a CPU
MEMO_SHARE = 5  # on a GPU a fifth of what is free when the layer begins
WINDOWS_A_SUM = {"cuda": 8}  # whose rows are added at once; on a CPU one: its rows stay in the caches


@dataclass(frozen=True)
class Rows:
    """Some rows of a linear's input, f [T, K]: in the model as it is packed, and what they should have been."""

    own: Tensor
    wanted: Tensor
    first: Tensor  # bool [T], the first tokens of windows
    held_out: bool  # of windows that judge and do not fit
    lane: int  # that they came through, and live on


@dataclass(frozen=True)
class Windows:
    """What enters this layer, and with which arguments it is called."""

    lanes: Lanes
    layer: Copies
    hidden: HiddenStates
    calls: Sequence[dict[int, Call]]  # by lane, then by number of windows a step
    count: int
    outputs: "Sequence[OutputMemo]"  # by lane
    sixteen: "Sixteen | None" = None
    _routed: "dict[str, _Routed]" = field(default_factory=dict)  # by name of the experts module

    def run(self, start: int, stop: int) -> Tensor:
        """Windows [start, stop) through the layer; linears that are packed already do not compute again."""
        lane = self.hidden.lane(start)
        layer = self.layer.on(lane)
        with self.outputs[lane].reading(layer, start):
            return run_layer(layer, self.hidden.read(start, stop), self.calls[lane][stop - start])

    def run_sixteen(self, start: int, stop: int) -> Tensor:
        """The same through the unquantized layer, with what enters it in the unquantized model."""
        assert self.sixteen is not None
        lane = self.hidden.lane(start)
        layer = self.sixteen.layer.on(lane)
        with self.sixteen.outputs[lane].reading(layer, start, nn.Linear):
            return run_layer(layer, self.sixteen.hidden.read(start, stop), self.calls[lane][stop - start])

    def advance(self) -> None:
        """Let all windows pass the layer: `hidden` is what enters the next one then."""

        def move(span: tuple[int, int]) -> None:
            self.hidden.write(*span, self.run(*span))
            if self.sixteen is not None:
                self.sixteen.hidden.write(*span, self.run_sixteen(*span))

        self.layer.refresh()
        for _ in self.lanes.map(move, self.hidden.ranges()):
            pass

    def rows(self, name: str, every: int, *, follow: bool) -> Iterator[Rows]:
        """What enters the linear `name` of the layer, some rows at a time; nothing for an expert that no token reaches.

        Args:
            every: each so-manieth window is held out; 0: none. follow: `wanted` comes from the unquantized model.
        """
        self.layer.refresh()
        sixteen = self.sixteen if follow else None
        if found := expert_of(name):
            stack, index = found
            if stack not in self._routed:
                self._routed[stack] = _route(self, stack)
            yield from self._routed[stack].rows(self, name, index, every, sixteen)
            return

        def inputs(span: tuple[int, int]) -> tuple[Tensor, Tensor]:
            lane = self.hidden.lane(span[0])
            own = other = _input_of(self.layer.on(lane), name, partial(self.run, *span))
            if sixteen is not None:
                other = _input_of(sixteen.layer.on(lane), name, partial(self.run_sixteen, *span))
            return own, other

        spans = self.hidden.ranges()
        for (start, stop), (own, other) in zip(spans, self.lanes.map(inputs, spans), strict=True):
            own, other = (x.reshape(stop - start, -1, x.shape[-1]) for x in (own, other))  # some modules flatten
            judging = _judging(start, stop, every)
            for chosen, held_out in ((~judging, False), (judging, True)):
                for part in chosen.nonzero().flatten().split(WINDOWS_A_SUM.get(own.device.type, 1)):
                    if not len(part):  # of no window at all
                        continue
                    x = own[part]
                    first = _first_tokens(x[..., 0]).flatten()
                    lane = self.hidden.lane(start)
                    yield Rows(x.flatten(0, -2), other[part].flatten(0, -2), first, held_out, lane)


@dataclass(frozen=True)
class _Routed:
    """What enters the experts of one layer.

    Attributes:
        hidden: [windows, length, H]. sixteen: the same in the unquantized model.
        chosen: int16 [windows, length, k] on the CPU, the experts of each token.
    """

    hidden: HiddenStates
    sixteen: HiddenStates | None
    chosen: Tensor

    def rows(self, windows: Windows, name: str, index: int, every: int, sixteen: "Sixteen | None") -> Iterator[Rows]:
        """`Windows.rows` of a linear of expert `index`; a lane after the other, for an expert has few tokens."""
        owner, _, leaf = name.rpartition(".")
        for start, stop in self.hidden.ranges():
            lane = self.hidden.lane(start)
            hits = (self.chosen[start:stop] == index).any(-1)  # bool [windows, length]
            judging = _judging(start, stop, every)[:, None]
            for chosen, held_out in ((hits & ~judging, False), (hits & judging, True)):
                if not bool(chosen.any()):
                    continue
                with windows.lanes.on(lane):
                    own = wanted = _expert_input(
                        windows.layer.on(lane), owner, leaf, self.hidden.read(start, stop), chosen
                    )
                    if sixteen is not None and self.sixteen is not None:
                        states = self.sixteen.read(start, stop)
                        wanted = _expert_input(sixteen.layer.on(lane), owner, leaf, states, chosen)
                yield Rows(own, wanted, _first_tokens(chosen)[chosen].to(own.device), held_out, lane)


def _expert_input(layer: nn.Module, owner: str, leaf: str, states: Tensor, chosen: Tensor) -> Tensor:
    """What enters the linear `leaf` of the expert `owner` for the chosen tokens of states [windows, length, H]."""
    expert = layer.get_submodule(owner)
    return _input_of(expert, leaf, partial(expert, states[chosen.to(states.device)]))


def _route(windows: Windows, stack: str) -> _Routed:
    """Run all windows up to the experts module `stack`, in the unquantized model too if it is followed."""
    length = windows.hidden.shape[1]

    def inputs(span: tuple[int, int]) -> list[tuple[Tensor, Tensor]]:
        lane = windows.hidden.lane(span[0])
        seen = [_experts_input(windows.layer.on(lane), stack, partial(windows.run, *span))]
        if windows.sixteen is not None:
            seen.append(_experts_input(windows.sixteen.layer.on(lane), stack, partial(windows.run_sixteen, *span)))
        return seen

    chosen: list[Tensor] = []
    buffers: list[HiddenStates] = []
    spans = windows.hidden.ranges()
    for (start, stop), seen in zip(spans, windows.lanes.map(inputs, spans), strict=True):
        chosen.append(seen[0][1].view(stop - start, length, -1).to("cpu", torch.int16))
        for place, (states, _) in enumerate(seen):
            if place == len(buffers):
                buffers.append(windows.hidden.like(states.shape[-1]))
            buffers[place].write(start, stop, states.view(stop - start, length, -1))
    return _Routed(buffers[0], buffers[1] if len(buffers) > 1 else None, torch.cat(chosen))


def _experts_input(layer: nn.Module, stack: str, run: Callable[[], Tensor]) -> tuple[Tensor, Tensor]:
    """hidden_states [T, H] and top_k_index [T, k] that the experts module `stack` is called with while `run` runs."""
    seen: list[tuple[Tensor, Tensor]] = []

    def see(hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> None:
        seen.append((hidden_states, top_k_index))
        raise StopForward

    experts: Any = layer.get_submodule(stack)
    experts.forward = see
    try:
        run()
    except StopForward:
        pass
    finally:
        del experts.forward
    return seen[0]


def _first_tokens(like: Tensor) -> Tensor:
    """bool [windows, length], on the device of `like` of that shape: True for the first token of each window."""
    return (torch.arange(like.shape[1], device=like.device) == 0).expand(like.shape)


def _judging(start: int, stop: int, every: int) -> Tensor:
    """bool [stop - start]: which of these windows are held out."""
    return torch.arange(start, stop) % every == every - 1 if every else torch.zeros(stop - start).bool()


def _input_of(layer: nn.Module, name: str, run: Callable[[], Tensor]) -> Tensor:
    """What enters the linear `name` of `layer`, [..., K], while `run` runs it."""
    seen: list[Tensor] = []

    def see(_: nn.Module, args: tuple[Tensor, ...]) -> None:
        seen.append(args[0])
        raise StopForward

    handle = layer.get_submodule(name).register_forward_pre_hook(see)
    try:
        run()
    except StopForward:
        pass
    finally:
        handle.remove()
    return seen[0]


@dataclass(frozen=True)
class Sixteen:
    """The same windows in the unquantized model: what enters this layer there, and the layer as it was."""

    hidden: HiddenStates
    layer: Copies
    outputs: "Sequence[OutputMemo]"  # by lane


def sixteen_layer(layer: nn.Module, attention: str) -> nn.Module:
    """A copy of the layer's modules on the same parameters, with the 16-bit `attention`: what packing replaces in
    `layer` stays as it was in the copy."""
    shared = {id(tensor): tensor for tensor in (*layer.parameters(), *layer.buffers())}
    twin = copy.deepcopy(layer, shared)
    for module in twin.modules():
        config: Any = getattr(module, "config", None)
        if config is not None:
            config._attn_implementation = attention
    return twin


def memo_bytes(device: torch.device) -> int:
    """How much of a layer's outputs to remember."""
    return torch.cuda.mem_get_info(device)[0] // MEMO_SHARE if device.type == "cuda" else MEMO_BYTES


class OutputMemo:
    """Outputs of a layer's linears by window range, up to `limit` bytes.

    The windows run through a layer once per group, and linears packed for an earlier group give the same output every
    time. On a CPU, where the reference computes them, remembering is much cheaper than computing.
    """

    def __init__(self, limit: int = MEMO_BYTES) -> None:
        self._room = limit
        self._kept: dict[tuple[str, int], Tensor] = {}

    @contextmanager
    def reading(self, layer: nn.Module, start: int, kind: type[nn.Module] = W4AxLinear) -> Iterator[None]:
        """While inside, linears of this kind in `layer` return what they returned before for the range from `start`."""
        packed = {name: module for name, module in layer.named_modules() if isinstance(module, kind)}
        for name, module in packed.items():
            module.forward = partial(self._output, (name, start), module.forward)
        try:
            yield
        finally:
            for module in packed.values():
                del module.forward

    def _output(self, key: tuple[str, int], compute: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        if key in self._kept:
            return self._kept[key]
        y = compute(x)
        if y.nbytes <= self._room:
            self._room -= y.nbytes
            self._kept[key] = y
        return y
