"""A packed layer beside the 16-bit layer that it was made from: do they still add the same to the hidden states?

In: the first tokens of the first calibration window, on their way through the packed layers. Out: per layer the cosine
and the relative error of what it adds, which the recipe's `checks` limit. Every token counts the same, because a
single attention sink is often a thousand times as large as all others and would hide them. The layer that is judged
here is the one that was read back from its shard, so that a file which means something else is found as well.
"""

from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor, nn

from comet_core.decoder import Decoder, run_layer
from comet_core.recipe import ChecksSpec
from comet_cuda.errors import CometError

PROBE_TOKENS = 256  # more than a page of the default KV cache, so that keys are read in 4 bit too
SAME = 1e-3  # by which figures of one layer may differ where a GPU adds in another order


@dataclass(frozen=True)
class Likeness:
    """How alike the outputs of two layers are, means over tokens.

    Attributes:
        cosine: of the angle between them, 1 at best. error: energy of the difference over the energy of the 16-bit one.
    """

    cosine: float
    error: float

    @classmethod
    def of(cls, packed: Tensor, sixteen: Tensor) -> "Likeness":
        """Of outputs f32 [tokens, D]."""
        energy, own = sixteen.square().sum(-1), packed.square().sum(-1)
        least = energy.mean() * 1e-12 + 1e-30  # a token to which the layer adds nothing
        cosine = ((packed * sixteen).sum(-1) + least) / ((energy + least) * (own + least)).sqrt()
        error = ((packed - sixteen).square().sum(-1) / (energy + least)).mean()
        return cls(float(cosine.mean()), float(error))


class Probe:
    """The tokens between two packed layers."""

    def __init__(self, decoder: Decoder, tokens: Tensor) -> None:
        """decoder: with its embeddings loaded. tokens: int64 [windows, length]."""
        few = tokens[:1, :PROBE_TOKENS]
        self._states, self._calls = decoder.first_hidden(few), decoder.calls(few)

    def added(self, layer: nn.Module, index: int) -> Tensor:
        """What `layer`, the model's layer `index`, adds to the hidden states: f32 [tokens, D]."""
        out = run_layer(layer, self._states, self._calls[index])
        return (out.float() - self._states.float()).flatten(0, -2)

    def advance(self, layer: nn.Module, index: int) -> None:
        """Go through the packed layer `index`."""
        self._states = run_layer(layer, self._states, self._calls[index])


def layer_note(label: str, packed: Tensor, sixteen: Tensor, limits: ChecksSpec) -> dict[str, Any]:
    """What the manifest says of the layer called `label`; with a warning if a limit is broken.

    Errors:
        CometError if an output is not finite.
    """
    for what, output in (("in 16 bit", sixteen), ("packed", packed)):
        if not bool(torch.isfinite(output).all()):
            raise CometError(f"{label}: {what}, its output holds NaN or Inf", "use --dtype float32")
    found = Likeness.of(packed, sixteen)
    note: dict[str, Any] = {"layer": label, **asdict(found)}
    broken = []
    if found.cosine < limits.cosine:
        broken.append(f"a cosine of {found.cosine:.3f} to its 16-bit output (checks.cosine: {limits.cosine:g})")
    if found.error > limits.error:
        broken.append(f"an error of {found.error:.0%} of its output's energy (checks.error: {limits.error:g})")
    return note | ({"warning": "packed, it has " + " and ".join(broken)} if broken else {})


def check_reloaded(note: dict[str, Any], packed: Tensor, sixteen: Tensor) -> None:
    """Raise CometError unless the layer, read back from its shard, has the likeness that was noted before."""
    again = Likeness.of(packed, sixteen)
    if not abs(again.cosine - note["cosine"]) <= SAME or not abs(again.error - note["error"]) <= SAME:
        raise CometError(
            f"{note['layer']}: read back from its shard it computes something else (cosine to 16 bit "
            f"{again.cosine:.4f} instead of {note['cosine']:.4f})",
            "the disk or the memory is failing; choose another --out",
        )
