"""One function per plot of a landscape, on the axes that the caller made.

All losses are on a logarithmic scale: around a trained model they differ by factors of 100 to
10,000, and on a linear scale every landscape is a flat valley with steep walls. Plots that are
compared share one scale (`Scale`), since the same colors must mean the same loss.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from allstep.console.quantities import figure as number_text
from allstep.study.axes import set_log_y
from allstep.study.landscape.points import coordinates
from allstep.study.landscape.result import Around, Line, Number

_LEAST = 1e-6
"""Smaller losses are drawn as this one: 0 has no logarithm."""
_FEWEST_LEVELS, _USUAL_LEVELS, _MOST_LEVELS = 5, 9, 30
_PLACES = (-1, -0.5, 0, 0.5, 1)
_AXIS = "direction {} (norms of the filters)"


@dataclass(frozen=True)
class Scale:
    """The range of losses of plots that are compared."""

    low: float
    high: float

    @classmethod
    def of(cls, losses: Sequence[Number]) -> "Scale":
        """Return the scale of some losses, of which None is not finite."""
        known = [max(_LEAST, loss) for loss in losses if loss is not None]
        if not known:
            return cls(0.1, 10.0)
        return cls(min(known), max(max(known), 1.001 * min(known)))

    def levels(self) -> list[float]:
        """Return the losses of the contour lines: 0.1, 0.2, 0.5, 1, ... or more, if few fit."""
        found = list(_one_two_five(self.low, self.high))
        if len(found) >= _FEWEST_LEVELS:
            return found[:: 1 + len(found) // _MOST_LEVELS]
        ratio = self.high / self.low
        return [self.low * ratio ** ((i + 1) / (_USUAL_LEVELS + 1)) for i in range(_USUAL_LEVELS)]

    def norm(self) -> Any:
        """Return matplotlib's norm of the colors."""
        from matplotlib.colors import LogNorm

        return LogNorm(self.low, self.high)


def _one_two_five(low: float, high: float) -> Iterator[float]:
    for power in range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1):
        for factor in (1, 2, 5):
            if low < (level := float(f"{factor}e{power}")) < high:
                yield level


def contour(axes: Any, found: Around, scale: Scale) -> Any:
    """Draw the loss over two directions, a cell for each point, with contour lines.

    Return the colors.
    """
    x, y, z = _table(found)
    colors = axes.pcolormesh(x, y, z, norm=scale.norm(), cmap="viridis", shading="nearest")
    lines = axes.contour(x, y, z, levels=scale.levels(), colors="white", linewidths=0.7)
    axes.clabel(lines, fmt=number_text, fontsize=7)
    axes.plot([0], [0], "+", color="red", markersize=9)
    axes.set_aspect("equal")
    axes.set_xticks(_PLACES)
    axes.set_yticks(_PLACES)
    axes.set_xlabel(_AXIS.format(1))
    axes.set_ylabel(_AXIS.format(2))
    return colors


def color_bar(figure: Any, colors: Any, axes: Any, scale: Scale) -> None:
    """Draw the scale of the colors next to `axes`, with labels such as 0.2."""
    bar = figure.colorbar(colors, ax=axes, label="loss")
    bar.set_ticks(levels := scale.levels(), labels=[number_text(level) for level in levels])
    bar.minorticks_off()


def surface(axes: Any, found: Around, scale: Scale) -> None:
    """Draw the loss over two directions as a surface, on axes with the projection "3d"."""
    import numpy as np

    x, y, z = _table(found)
    across, along = np.meshgrid(x, y)
    heights = np.log10(z.filled(np.nan))
    # Not the norm of the contours: the heights are logarithms already.
    low, high = math.log10(scale.low), math.log10(scale.high)
    axes.plot_surface(
        across,
        along,
        heights,
        cmap="viridis",
        vmin=low,
        vmax=high,
        rcount=60,
        ccount=60,
        linewidth=0.1,
        edgecolor=(0, 0, 0, 0.25),
    )
    axes.set_zlim(low, high)
    levels = scale.levels()
    powers = [level for level in levels if _is_power(level)]
    ticks = powers if len(powers) > 2 else levels
    axes.set_zticks([math.log10(level) for level in ticks], [number_text(each) for each in ticks])
    axes.set_xticks(_PLACES)
    axes.set_yticks(_PLACES)
    for axis in (axes.xaxis, axes.yaxis, axes.zaxis):
        axis.set_pane_color((0, 0, 0, 0))
    axes.set_xlabel("direction 1")
    axes.set_ylabel("direction 2")
    axes.view_init(elev=35, azim=-60)
    # A label of the z axis would be cut off.
    axes.text2D(0.02, 0.92, "loss", transform=axes.transAxes)
    axes.tick_params(labelsize=7)


def _is_power(level: float) -> bool:
    return abs(math.log10(level) - round(math.log10(level))) < 1e-9


def _table(found: Around) -> tuple[Any, Any, Any]:
    """Return both coordinates, and the losses as [y][x], those that are not finite masked."""
    import numpy as np

    rows = np.array([np.nan if loss is None else max(_LEAST, loss) for loss in found.losses])
    table = np.ma.masked_invalid(rows.reshape(found.grid).T)
    return np.array(coordinates(found.grid[0])), np.array(coordinates(found.grid[1])), table


def curves(axes: Any, found: Sequence[Around]) -> None:
    """Draw the loss along one direction, a curve for each run."""
    for each in found:
        axes.plot(coordinates(each.grid[0]), _clipped(each.losses), ".-", label=each.run)
    set_log_y(axes)
    axes.set_xlabel(_AXIS.format(1))
    axes.set_ylabel("loss")
    axes.grid(alpha=0.3)
    if len(found) > 1:
        axes.legend(fontsize="small")


def between(axes: Any, line: Line) -> None:
    """Draw loss and accuracy on the line between two runs."""
    count = len(line.losses)
    places = [i / (count - 1) for i in range(count)]
    axes.plot(places, _clipped(line.losses), ".-", color="C0")
    set_log_y(axes)
    axes.set_xticks([0, 0.5, 1], [line.runs[0], "half way", line.runs[1]])
    axes.set_ylabel("loss", color="C0")
    axes.grid(alpha=0.3)
    right = axes.twinx()
    shares = [math.nan if each is None else 100 * each for each in line.accuracies]
    right.plot(places, shares, "--", color="C1")
    right.set_ylabel("accuracy, % (dashed)", color="C1")
    right.set_ylim(0, 100)


def rises(axes: Any, line: Line) -> None:
    """Draw the rise of the loss of both runs in each direction of the flatness figure."""
    for number, (name, flatness) in enumerate(zip(line.runs, line.flatness, strict=True)):
        places = [i + 0.4 * number - 0.2 for i in range(len(flatness.rises))]
        axes.bar(places, [each or 0.0 for each in flatness.rises], 0.38, label=name)
    axes.set_xlabel("direction")
    axes.set_xticks(range(len(line.flatness[0].rises)))
    axes.set_ylabel("rise of the loss at half the filters' norm")
    axes.legend(fontsize="small")


def _clipped(losses: Sequence[Number]) -> list[float]:
    return [math.nan if loss is None else max(_LEAST, loss) for loss in losses]
