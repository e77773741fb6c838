"""Print the results of `allstep data info` and `allstep data verify` as tables."""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from allstep.console.quantities import nbytes
from allstep.console.rich_table import cell, name_value_table, print_table, text_columns

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
    console.print(name_value_table(_figures(info)))
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
    table = text_columns("class", "samples", "")
    most = max(1, *(count for _, count in info.classes))
    for name, count in _some(info.classes):
        bar = "" if count is None else block * round(count / most * _BAR)
        table.add_row(cell(name), "" if count is None else str(count), bar)
    return table


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
    table = text_columns("sample", "file", "byte", "reason")
    for each in bad[:_BAD_SHOWN]:
        name = cell(Path(each.place.file).name)
        table.add_row(str(each.number), name, str(each.place.offset), cell(each.reason))
    print_table(table)
    if len(bad) > _BAD_SHOWN:
        print(f"... and {len(bad) - _BAD_SHOWN} more; --list FILE writes all of them")
