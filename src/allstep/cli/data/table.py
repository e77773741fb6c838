"""Print the results of `allstep data info` and `allstep data verify` as tables."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

from allstep.console.escape import escaped
from allstep.console.quantities import nbytes

if TYPE_CHECKING:
    from allstep.data.inspect.info import Info, Spread
    from allstep.data.sources.source import BadSample

_BAD_SHOWN = 20
_CLASSES_SHOWN = 20
# Width of the longest bar in characters.
_BAR = 30


def info_table(info: "Info", *, stderr: bool = False) -> None:
    """Print the figures of a dataset, then its classes with a bar for each number of samples."""
    console = Console(stderr=stderr, highlight=False)
    figures = Table(show_header=False, box=None)
    figures.add_column()
    # A long path is wrapped, not cut: without a terminal the width is 80.
    figures.add_column(overflow="fold")
    for name, value in _figures(info):
        figures.add_row(name, _shown(value))
    console.print(figures)
    if info.classes:
        console.print(_classes(info, "#" if console.options.ascii_only else "█"))


def _figures(info: "Info") -> Iterator[tuple[str, str]]:
    """Yield the rows of the table: name and text of each figure."""
    yield "source", f"{info.where} ({info.kind})"
    yield "samples", f"{info.num_samples}"
    yield "files", f"{info.num_files}, {nbytes(info.nbytes)}, {nbytes(info.mean_nbytes)} a sample"
    images = info.images
    formats = ", ".join(f"{count} {kind}" for kind, count in images.formats.items())
    bad = f", {images.bad} bad: `allstep data verify` lists all" if images.bad else ""
    yield "images", f"{formats or 'none'} of {images.looked_at} looked at{bad}"
    if images.height and images.width:
        yield "height", _spread(images.height)
        yield "width", _spread(images.width)
    yield "labels", info.labels
    yield "classes", f"{info.num_classes}" + (f", {_balance(info)}" if info.classes else "")
    if info.num_unlabelled:
        yield "no class", f"{info.num_unlabelled} samples"


def _spread(spread: "Spread") -> str:
    """Return the range and the median as text, or the value if all are equal."""
    if spread.smallest == spread.largest:
        return str(spread.median)
    return f"{spread.smallest} to {spread.largest}, median {spread.median}"


def _balance(info: "Info") -> str:
    """Return the range of the classes' sample counts as text."""
    counts = [count for _, count in info.classes]
    low, high = min(counts), max(counts)
    return f"{low} samples each" if low == high else f"{low} to {high} samples each"


def _classes(info: "Info", block: str) -> Table:
    """Return a table of all classes, or of the largest and smallest ones, with bars of `block`."""
    table = Table("class", "samples", "", box=None)
    most = max(1, *(count for _, count in info.classes))
    for name, count in _some(info.classes):
        bar = "" if count is None else block * round(count / most * _BAR)
        table.add_row(_shown(name), "" if count is None else str(count), bar)
    return table


def _shown(text: str) -> Text:
    """Return a cell without markup; the name of a file or folder may be any bytes."""
    return Text(escaped(text))


def _some(classes: Sequence[tuple[str, int]]) -> Iterator[tuple[str, int | None]]:
    """Yield all classes; if there are many, the largest ones, a line "... N more", the smallest."""
    if len(classes) <= _CLASSES_SHOWN:
        yield from classes
        return
    ordered = sorted(classes, key=lambda each: -each[1])
    yield from ordered[: _CLASSES_SHOWN // 2]
    yield f"... {len(classes) - _CLASSES_SHOWN} more", None
    yield from ordered[-_CLASSES_SHOWN // 2 :]


def bad_table(bad: "Sequence[BadSample]") -> None:
    """Print the first bad samples with file, byte offset and reason."""
    table = Table("sample", "file", "byte", "reason", box=None)
    for each in bad[:_BAD_SHOWN]:
        name = _shown(Path(each.place.file).name)
        table.add_row(str(each.number), name, str(each.place.offset), _shown(each.reason))
    Console().print(table)
    if len(bad) > _BAD_SHOWN:
        print(f"... and {len(bad) - _BAD_SHOWN} more; --list FILE writes all of them")
