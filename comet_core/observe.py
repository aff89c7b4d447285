"""Hooks -> ChannelStats: what calibration learns about the inputs of each LinearGroup.

Statistics stream over all tokens and merge, so neither order nor split of the data matters beyond float rounding; a
small evenly spaced sample of whole input rows is kept for what needs them (errors of a block plan, outlier shares).
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from comet_core.decoder import LinearGroup, layer_linears

SAMPLE_TOKENS = 1024  # input rows kept per group
ROWS_AT_ONCE = 256  # in float64, on a CPU


@dataclass
class ChannelStats:
    """Statistics of one group's input, K channels.

    Attributes:
        tokens: rows seen.
        absmax: f32 [K].
        weighted_square_sum: f64 [K], sum of x^2 / |row|^2: the Hessian diagonal when every token counts the same.
        sample: f32 [S, K], rows kept.
    """

    tokens: int
    absmax: Tensor
    weighted_square_sum: Tensor
    sample: Tensor

    @classmethod
    def of(cls, x: Tensor, keep: int) -> "ChannelStats":
        """Statistics of x, float [T, K], keeping `keep` evenly spaced rows."""
        absmax = torch.zeros(x.shape[1], device=x.device)
        weighted = torch.zeros(x.shape[1], dtype=torch.float64, device=x.device)
        for part in x.split(max(1, len(x)) if x.is_cuda else ROWS_AT_ONCE):
            part = part.float()
            torch.maximum(absmax, part.abs().amax(0), out=absmax)
            square = part.double().square_()
            energy = square.sum(1, keepdim=True)
            weighted += square.div_(energy.masked_fill_(energy == 0, 1)).sum(0)
        rows = torch.linspace(0, x.shape[0] - 1, min(keep, x.shape[0]), device=x.device).round().long()
        return cls(x.shape[0], absmax, weighted, x[rows].float())

    @classmethod
    def none(cls, channels: int) -> "ChannelStats":
        """Statistics of no rows: of an expert that no token reaches."""
        zeros = torch.zeros(channels)
        return cls(0, zeros, zeros.double(), torch.zeros(0, channels))

    def to(self, device: torch.device) -> "ChannelStats":
        """The same on a device."""
        return ChannelStats(
            self.tokens, self.absmax.to(device), self.weighted_square_sum.to(device), self.sample.to(device)
        )

    def merge(self, other: "ChannelStats") -> "ChannelStats":
        """Statistics of both token sets together."""
        return ChannelStats(
            self.tokens + other.tokens,
            torch.maximum(self.absmax, other.absmax),
            self.weighted_square_sum + other.weighted_square_sum,
            torch.cat((self.sample, other.sample)),
        )


@contextmanager
def observe(layer: nn.Module, groups: Sequence[LinearGroup], keep: int) -> Iterator[dict[str, ChannelStats]]:
    """Collect ChannelStats of every group while the layer runs inside the with block.

    Args:
        layer: a materialized layer. groups: its groups. keep: sample rows kept per forward.

    Yields:
        stats by the name of the group's first linear, filled as the layer runs; none where no token came.
    """
    stats: dict[str, ChannelStats] = {}
    linears = layer_linears(layer)
    handles = []
    for group in groups:

        def see(_: nn.Module, args: tuple[Tensor, ...], name: str = group.names[0]) -> None:
            seen = ChannelStats.of(args[0].reshape(-1, args[0].shape[-1]), keep)
            stats[name] = stats[name].merge(seen) if name in stats else seen

        handles.append(linears[group.names[0]].register_forward_pre_hook(see))
    try:
        yield stats
    finally:
        for handle in handles:
            handle.remove()
