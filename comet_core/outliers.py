"""ChannelStats -> OutlierReport: how rare outliers are, and how few blocks hold one once channels are sorted.

One cut-off per group serves all figures: `threshold` times the median of the channels' absolute maxima. A channel is an
outlier if its maximum exceeds it, a feature (one element of an activation) if it exceeds it itself. The paper gives
shares (under 1% of features, about 10% of channels, under 20% of blocks after permutation) but not its cut-off, so
ours is printed with every figure.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from comet_core.observe import ChannelStats
from comet_core.whole_files import whole_file
from comet_cuda.affine import BLOCK, num_blocks

HEAT_MAP_COLUMNS = 256  # channels are pooled (by maximum) to this many columns in the picture


@dataclass(frozen=True)
class OutlierReport:
    """Outliers of one group's input. Shares are in 0..1."""

    group: str
    channels: int
    cutoff: float  # threshold x median channel absmax
    peak: float  # largest absolute value over the median channel absmax
    outlier_features: float
    outlier_channels: float
    consistency: float  # mean share of tokens in which an outlier channel exceeds the cut-off
    blocks_before: float  # share of blocks that hold an outlier channel, in the model's channel order
    blocks_after: float  # the same after sorting by absmax

    def row(self) -> dict[str, Any]:
        """The report as a JSON object."""
        return asdict(self)


def outlier_channels(absmax: Tensor, threshold: float) -> Tensor:
    """bool [K]: channels whose absolute maximum exceeds threshold x the median (of the channels that are not dead)."""
    alive = absmax[absmax > 0]
    return absmax > threshold * (alive.median() if len(alive) else absmax.new_tensor(float("inf")))


def report_outliers(group: str, stats: ChannelStats, threshold: float) -> OutlierReport:
    """The report of one group.

    Args:
        group: name to print. stats: what calibration saw. threshold: recipe key blocks.threshold.
    """
    absmax = stats.absmax
    channels = absmax.shape[0]
    is_outlier = outlier_channels(absmax, threshold)
    alive = absmax[absmax > 0]
    median = float(alive.median()) if len(alive) else 0.0
    cutoff = threshold * median
    beyond = stats.sample.abs() > cutoff if median else torch.zeros(1, channels, dtype=torch.bool)
    count = int(is_outlier.sum())
    pad = num_blocks(channels) * BLOCK - channels
    holds = torch.nn.functional.pad(is_outlier, (0, pad)).view(-1, BLOCK).any(1)
    return OutlierReport(
        group=group,
        channels=channels,
        cutoff=cutoff,
        peak=float(absmax.max()) / median if median else 0.0,
        outlier_features=float(beyond.float().mean()),
        outlier_channels=count / channels,
        consistency=float(beyond[:, is_outlier].float().mean()) if count else 0.0,
        blocks_before=float(holds.float().mean()),
        blocks_after=num_blocks(count) / num_blocks(channels),
    )


def ready_to_draw() -> Any:
    """matplotlib.pyplot. Commands import it before their work: whether there is memory for it shows at once then."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def draw_heat_map(title: str, kinds: Sequence[tuple[str, Tensor, Tensor]], png: Path) -> None:
    """Channel maxima of every layer before and after permutation, one row of pictures per kind of linear.

    Args:
        title: heading. kinds: (name, before, after), each f32 [layers, K], absolute maxima. png: file to write.
    """
    pyplot = ready_to_draw()
    height = 1.0 + 2.2 * len(kinds)  # inches; margins are given, since finding them takes as long as drawing
    margins = {"left": 0.06, "right": 0.97, "bottom": 0.35 / height, "top": 1 - 0.65 / height, "hspace": 0.35}
    figure, axes = pyplot.subplots(
        len(kinds),
        2,
        figsize=(11, height),
        squeeze=False,
        gridspec_kw=margins | {"wspace": 0.1, "width_ratios": (1, 1.06)},
    )
    for row, (name, before, after) in enumerate(kinds):
        top = float(torch.log10(_relative(before)).max())
        for column, (label, values) in enumerate((("model order", before), ("permuted", after))):
            axis = axes[row][column]
            image = axis.imshow(
                torch.log10(_pool(_relative(values))).numpy(), aspect="auto", cmap="magma", vmin=-0.5, vmax=top
            )
            axis.set_title(f"{name}, {label}", fontsize=9)
            axis.set_ylabel("expert, layer by layer" if "*" in name else "layer", fontsize=8)
            axis.set_xticks([0, values.shape[1] - 1 if values.shape[1] < HEAT_MAP_COLUMNS else HEAT_MAP_COLUMNS - 1])
            axis.set_xticklabels(["channel 0", str(values.shape[1] - 1)], fontsize=7)
            axis.yaxis.get_major_locator().set_params(integer=True)
            axis.tick_params(labelsize=7)
        figure.colorbar(image, ax=axes[row][1], fraction=0.03, pad=0.02).ax.tick_params(labelsize=7)  # for both
    figure.suptitle(f"{title}: channel maximum over the median channel, log10", fontsize=10)
    with whole_file(png) as partial:
        figure.savefig(partial, format="png", dpi=110)
    pyplot.close(figure)


def _relative(absmax: Tensor) -> Tensor:
    """absmax [layers, K] over each layer's median channel, floored so that dead channels have a logarithm."""
    return (absmax / absmax.median(1, keepdim=True).values.clamp(min=1e-12)).clamp(min=10**-0.5)


def _pool(values: Tensor) -> Tensor:
    """[layers, K] -> [layers, at most HEAT_MAP_COLUMNS] by maximum."""
    if values.shape[1] <= HEAT_MAP_COLUMNS:
        return values
    return torch.nn.functional.adaptive_max_pool1d(values[:, None], HEAT_MAP_COLUMNS)[:, 0]
