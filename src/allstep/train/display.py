"""What the terminal shows: a banner, a progress bar with a line per epoch, and a table at the end.

Where standard output is not a terminal the bar is left out and everything is plain lines, so that a log file stays readable.
"""

from collections import Counter
from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.progress import BarColumn, TaskID, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar
from rich.table import Table

from allstep._version import __version__
from allstep.train.config import RunConfig
from allstep.train.watch import EpochEnd, Opening, Progress, Result


class Display:
    """Draws a run."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console(highlight=False)
        self.epochs = 0
        self.num_train = 0
        self.bar: Bar | None = None
        self.task: TaskID | None = None

    def start(self, opening: Opening) -> None:
        self.epochs, self.num_train = opening.config.epochs, opening.num_samples["train"]
        self._print(f"[bold]allstep {__version__}[/] trains [bold]{opening.config.recipe}[/]")
        for name, value in banner(opening):
            self._print(f"  {name:<10} {value}")
        for line in warnings(opening.config):
            self._print(f"[yellow]warning:[/] {line}")
        if self.console.is_terminal:
            self.bar = _bar(self.console)
            self.task = self.bar.add_task("", total=self.num_train * self.epochs, epoch=f"1/{self.epochs}", figures="")
            self.bar.start()

    def progress(self, progress: Progress) -> None:
        if self.bar is not None and self.task is not None:
            figures = f"loss {progress.loss:.3f}  accuracy {progress.accuracy:.1%}  {progress.images_per_second:,.0f} images/s"
            epoch = f"{progress.epoch + 1}/{self.epochs}"
            self.bar.update(self.task, completed=progress.samples, epoch=epoch, figures=figures)

    def epoch(self, end: EpochEnd) -> None:
        speed = self.num_train / end.seconds
        self._print(
            f"epoch {end.epoch + 1:>{len(str(self.epochs))}}/{self.epochs}  loss {end.train.loss:.3f}  "
            f"accuracy {end.train.accuracy:.1%}  validation {end.validation.accuracy:.1%}  "
            f"{speed:,.0f} images/s  {end.seconds:.1f} s"
        )

    def end(self, result: Result) -> None:
        self.close()
        table = Table(box=box.SIMPLE, show_header=False)
        for name, value in figures(result):
            table.add_row(name, value)
        self.console.print(table)
        self._print(f"run folder: {result.out}")

    def close(self) -> None:
        if self.bar is not None:
            self.bar.stop()
            self.bar = None

    def _print(self, line: str) -> None:
        self.console.print(line, soft_wrap=True)


def banner(opening: Opening) -> list[tuple[str, str]]:
    """Names and values of the lines that say what will run, and where."""
    parts = ", ".join(f"{count:,} {part}" for part, count in opening.num_samples.items())
    return [
        ("hosts", _hosts(opening.hosts)),
        (
            "workers",
            f"{len(opening.hosts)}, {_range(opening.threads)} thread{'' if max(opening.threads) == 1 else 's'} each",
        ),
        ("device", opening.device),
        ("data", f"{opening.data}: {parts}, from {opening.data_folder}"),
        ("net", f"{opening.parameters:,} parameters, {opening.flop_per_sample / 1e6:.1f} MFLOP per picture"),
        ("batch", batch_sum(opening.config, len(opening.hosts))),
        ("rate", rate_line(opening.config, opening.peak_lr)),
        ("run folder", str(opening.out)),
    ]


def batch_sum(config: RunConfig, num_workers: int) -> str:
    """Samples per worker and piece x workers x pieces = the global batch."""
    batch, pieces = config.batch or 0, config.accumulation
    low, rest = divmod(batch, num_workers * pieces)
    each = f"{low}" if not rest else f"{low} or {low + 1}"
    workers = f"{num_workers} worker{'s' if num_workers > 1 else ''}"
    accumulation = f" x {pieces} accumulated" if pieces > 1 else ""
    return f"{each} per worker x {workers}{accumulation} = {batch}"


def rate_line(config: RunConfig, peak: float) -> str:
    """The recipe's rate and what the batch made of it."""
    section = config.optimizer
    return (
        f"{section.lr:g} at batch {section.base_batch} -> {peak:g} at batch {config.batch} (scaling: {section.scaling})"
    )


def warnings(config: RunConfig) -> list[str]:
    """What the user may not have meant."""
    section = config.optimizer
    if section.scaling == "none" and config.batch != section.base_batch:
        was = f"the rate {section.lr:g} belongs to batch {section.base_batch}"
        return [f"{was}, the batch is {config.batch} and optimizer.scaling is none"]
    return []


def figures(result: Result) -> list[tuple[str, str]]:
    """Names and values of the final table."""
    return [
        ("test accuracy", f"{result.test.accuracy:.2%} of {result.test.count:,} pictures"),
        ("test loss", f"{result.test.loss:.4f}"),
        ("images/s", f"{result.images_per_second:,.0f}"),
        ("seconds per epoch", f"{result.seconds_per_epoch:.1f}"),
        ("seconds in all", f"{result.seconds:.1f}"),
    ]


def _bar(console: Console) -> Bar:
    return Bar(
        TextColumn("epoch {task.fields[epoch]}"),
        BarColumn(bar_width=24),
        TextColumn("{task.fields[figures]}"),
        TimeRemainingColumn(compact=True),
        TextColumn("left"),
        console=console,
        transient=True,
    )


def _hosts(hosts: Sequence[str]) -> str:
    return ", ".join(f"{host} ({count})" for host, count in Counter(hosts).items())


def _range(values: Sequence[int]) -> str:
    low, high = min(values), max(values)
    return str(low) if low == high else f"{low} to {high}"
