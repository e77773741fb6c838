"""What the terminal shows: a banner, a progress bar, a line per evaluation, and a table at the end.

```
allstep 0.1.0 trains digits
  workers    2, 1 thread each                        what runs, where, on which device
epoch 1/2  loss 0.512  accuracy 84.1%  validation 91.2% best  1,234 images/s  1.0 s
epoch 2/2 ━━━━━━━━━━━━━━━  loss 0.3  ...             only on a terminal: redrawn by a thread

  test accuracy   91.23% of 360 images
look at it: allstep report runs/digits-20260101-120000
```

If standard output is not a terminal, there is no bar and everything is plain lines, so that a log
file is readable: one line per evaluation, and at most one a minute in between. Square brackets in a
path are not interpreted as colors, and control characters in a name are escaped.
"""

import contextlib
import shlex
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.padding import Padding
from rich.progress import BarColumn, TaskID, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from allstep._version import __version__
from allstep.console.escape import escaped, print_notice
from allstep.console.quantities import nbytes
from allstep.console.rich_table import name_value_table
from allstep.data.order import lengths
from allstep.train.config.differences import set_by_recipe, set_by_user
from allstep.train.config.initial_weights import initial_weights
from allstep.train.config.recipes import BASES
from allstep.train.config.run_config import ResolvedConfig
from allstep.train.watch.callback import Callback
from allstep.train.watch.events import Evaluated, Opening, Pace, Progress, Result, Score
from allstep.train.watch.sync_line import servers_text, sync_line

_TOP5_FROM = 11
"""Number of classes from which top-5 is shown: with fewer it is high by chance."""
_LISTED = 8
"""Number of workers whose uneven shares are listed; of more, the smallest and the largest."""
_LINE_INTERVAL = 60.0
"""Seconds between two lines of a kind that replace the progress bar."""


class Display(Callback):
    """Callback that shows a run on the console (default: standard output)."""

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console(highlight=False)
        self.epochs = self.num_train = 1
        self.with_top5 = False
        self.bar: Bar | None = None
        self.task = TaskID(0)
        self._pace = Pace()
        self._reported = False
        self._last = {"progress": 0.0, "saved": float("-inf")}

    def take_over(self, opening: Opening) -> None:
        """Continue without the banner, which the lost rank 0 has printed."""
        self._last["progress"] = time.monotonic()
        self.epochs = opening.config.num_epochs
        self.num_train = max(1, opening.num_samples["train"])
        self.with_top5 = len(opening.classes) >= _TOP5_FROM
        if self.console.is_terminal:
            self._start_bar(opening.position)

    def start(self, opening: Opening) -> None:
        self._print(f"allstep {__version__} trains {opening.config.title}", "bold")
        for name, value in banner(opening):
            self._print(f"  {name:<10} {value}")
        for line in warnings(opening.config):
            self._print(f"warning: {line}", "yellow")
        for note in opening.notes:
            self._print(f"note: {note}")
        self.take_over(opening)

    def _start_bar(self, position: int) -> None:
        """Show the progress bar of a run that has been trained on `position` samples."""
        self.bar = _bar(self.console)
        total, epoch = (
            self.num_train * self.epochs,
            f"{position // self.num_train + 1}/{self.epochs}",
        )
        self.task = self.bar.add_task(
            "", total=total, completed=position, epoch=epoch, figures="", saved=""
        )
        self.bar.start()

    def progress(self, progress: Progress) -> None:
        self._pace.add(progress)
        epoch = f"{progress.epoch + 1}/{self.epochs}"
        if self.bar is not None:
            self.bar.update(
                self.task, completed=progress.samples, epoch=epoch, figures=_figures(progress)
            )
        elif self._is_time("progress"):
            self._print(f"epoch {epoch}  {progress.samples:,} samples  {_figures(progress)}")

    def evaluated(self, evaluated: Evaluated) -> None:
        over, rest = divmod(evaluated.samples, self.num_train)
        epoch = f"{evaluated.samples / self.num_train:.2f}" if rest else f"{over}"
        validation = f"validation {self._accuracy(evaluated.validation)}"
        columns = [
            f"epoch {epoch:>{len(str(self.epochs))}}/{self.epochs}",
            f"loss {evaluated.train.loss:.3f}",
            f"accuracy {evaluated.train.accuracy:.1%}",
            f"{validation} best" if evaluated.is_best else f"{validation}     ",
            *_speed(self._pace.take(evaluated)),
            f"{evaluated.seconds:.1f} s",
        ]
        columns += [f"{evaluated.num_bad:,} bad samples skipped"] if evaluated.num_bad else []
        self._print("  ".join(columns))

    def saved(self, samples: int, path: Path) -> None:
        if self.bar is not None:
            self.bar.update(self.task, saved=f"  saved at {samples:,}")
        elif self._is_time("saved"):
            self._print(f"saved after {samples:,} samples", "dim")

    def event(self, text: str, **figures: Any) -> None:
        self._print(f"note: {text}")

    def end(self, result: Result) -> None:
        self.close()
        figures = name_value_table(final_figures(result, self.with_top5))
        self._write(Padding(figures, (1, 2), expand=False))
        self._print(f"look at it: allstep report {shlex.quote(str(result.out))}")

    def close(self) -> None:
        if self.bar is not None:
            self.bar.stop()
            self.bar = None

    def _is_time(self, kind: str) -> bool:
        """Return whether a line of this kind may be printed again, and note the time if so."""
        now = time.monotonic()
        if now - self._last[kind] < _LINE_INTERVAL:
            return False
        self._last[kind] = now
        return True

    def _accuracy(self, score: Score) -> str:
        """Return the accuracy as text, with top-5 where it is shown."""
        top5 = f" (top-5 {score.top5:.1%})" if self.with_top5 else ""
        return f"{score.accuracy:.1%}{top5}"

    def _print(self, line: str, style: str | None = None) -> None:
        """Print one line of text, without interpretation of markup."""
        self._write(escaped(line), soft_wrap=True, markup=False, style=style)

    def _write(self, drawn: Any, **options: Any) -> None:
        """Print an object of rich; report the first write error on standard error.

        Such an error is a full disk. It is raised, too, so that other callbacks record it. A closed
        pipe is not reported.
        """
        try:
            self.console.print(drawn, **options)
        except BrokenPipeError:
            raise
        except OSError as error:
            if not self._reported:
                self._reported = True
                with contextlib.suppress(OSError):
                    print_notice(
                        f"standard output cannot be written: {error.strerror or error}; the run"
                        " continues"
                    )
            raise


def banner(opening: Opening) -> list[tuple[str, str]]:
    """Return names and values of the lines that describe the run and where it runs."""
    config, num_workers = opening.config, len(opening.hosts)
    threads = f"{_range(opening.threads)} thread{'' if max(opening.threads) == 1 else 's'} each"
    lines = [
        *recipe_lines(config),
        ("hosts", _hosts(opening.hosts)),
        ("workers", f"{num_workers}, {threads}"),
        ("device", opening.device),
        ("data", f"{opening.data}: {sample_counts(opening)}, from {opening.data_folder}"),
        ("model", model_line(opening)),
        ("execution", opening.execution),
    ]
    if num_workers > 1:
        lines += [("weights", weights_line(opening))]
    if config.sync.name != "allreduce":
        num_hosts = len(set(opening.hosts))
        text = sync_line(config, num_workers, servers_text(opening), num_hosts)
        lines += [("sync", text)]
    if opening.precision_why or opening.precision != "float32":
        lines += [("precision", precision_line(opening))]
    lines += [
        ("batch", batch_line(config, num_workers)),
        ("lr", lr_line(config, opening.peak_lr)),
        ("schedule", schedule_line(config)),
    ]
    if opening.position:
        lines += [("resumes", f"after {opening.position:,} samples")]
    return [*lines, ("run folder", str(opening.out))]


def recipe_lines(config: ResolvedConfig) -> list[tuple[str, str]]:
    """Return what the recipe sets against the defaults, and what the run changes in either.

    Both are written as `key=value` arguments of the command line.
    """
    if config.recipe not in BASES:
        return []
    sets = set_by_recipe(config.recipe)
    lines = [("recipe", f"{config.recipe} sets {' '.join(sets)}" if sets else "none: the defaults")]
    changed = set_by_user(config)
    return [*lines, ("changed", " ".join(changed))] if changed else lines


def sample_counts(opening: Opening) -> str:
    """Return the samples of each split, and how many training samples are not used."""
    counts = [f"{count:,} {split}" for split, count in opening.num_samples.items()]
    if opening.num_unused:
        counts[0] += f" ({opening.num_unused:,} unused)"
    return ", ".join(counts)


def model_line(opening: Opening) -> str:
    """Return the size of the model, and its work per image if that could be counted."""
    work = (
        f", {opening.flop_per_sample / 1e6:,.1f} MFLOP per image" if opening.flop_per_sample else ""
    )
    return f"{opening.parameters:,} parameters{work}"


def precision_line(opening: Opening) -> str:
    """Return the precision, and the reason if `precision: auto` chose it."""
    return opening.precision + (
        f" (auto: {opening.precision_why})" if opening.precision_why else ""
    )


def batch_line(config: ResolvedConfig, num_workers: int) -> str:
    """Return `samples per worker and micro-batch x workers x micro-batches = batch`."""
    batch, num_micro_batches = config.batch or 0, config.accumulation
    if not isinstance(config.shares, str):
        return _uneven_batch_line(config, num_workers)
    low, rest = divmod(batch, num_workers * num_micro_batches)
    each = f"{low}" if not rest else f"{low} or {low + 1}"
    workers = f"{num_workers} worker{'s' if num_workers > 1 else ''}"
    accumulation = f" x {num_micro_batches} accumulated" if num_micro_batches > 1 else ""
    speed = ", then by speed" if config.shares == "speed" and num_workers > 1 else ""
    return f"{each} per worker x {workers}{accumulation} = {batch}{speed}"


def _uneven_batch_line(config: ResolvedConfig, num_workers: int) -> str:
    """Return `samples of each worker = batch (shares, micro-batches)`."""
    counts = lengths(config.batch, initial_weights(config.shares, num_workers))
    listed = " + ".join(map(str, counts))
    if num_workers > _LISTED:
        listed = f"{min(counts)} to {max(counts)} per worker x {num_workers} workers"
    accumulated = f", {config.accumulation} accumulated" if config.accumulation > 1 else ""
    return f"{listed} = {config.batch} (shares {list(config.shares)}{accumulated})"


def lr_line(config: ResolvedConfig, peak: float) -> str:
    """Return the learning rate of the config and the peak after scaling to the batch."""
    section = config.optimizer
    return (
        f"{section.lr:g} at batch {section.base_batch} -> {peak:g} at batch {config.batch}"
        f" (scaling: {section.scaling})"
    )


def schedule_line(config: ResolvedConfig) -> str:
    """Return the number of epochs and the schedule of the learning rate."""
    shape, warmup = config.schedule.shape, config.warmup
    rise = f"warm-up of {warmup:.3g}, then {shape}" if warmup else f"no warm-up, {shape}"
    return f"{config.num_epochs} epochs: {rise}"


def warnings(config: ResolvedConfig) -> list[str]:
    """Return warnings about settings that are probably not intended."""
    section = config.optimizer
    if section.scaling == "none" and config.batch != section.base_batch:
        was = f"optimizer.lr={section.lr:g} is for batch {section.base_batch}"
        return [f"{was}, the batch is {config.batch} and optimizer.scaling is none"]
    return []


def final_figures(result: Result, with_top5: bool = False) -> list[tuple[str, str]]:
    """Return names and values of the final table, the test score first."""
    test, best = result.test, result.best
    lines = [("test accuracy", f"{test.accuracy:.2%} of {test.count:,} images")]
    lines += [("test top-5", f"{test.top5:.2%}")] if with_top5 else []
    lines += [
        ("images/s", f"{result.images_per_second:,.0f}"),
        ("seconds per epoch", f"{result.seconds_per_epoch:.1f}"),
        ("validation accuracy", f"{result.validation.accuracy:.2%}"),
    ]
    if (train := result.train) is not None:
        of = f"{train.score.count:,} training samples, evaluated in {train.seconds:.2f} s"
        lines += [("training accuracy", f"{train.score.accuracy:.2%} of {of}")]
    lines += [("best validation", f"{best.accuracy:.2%}")] if best is not None else []
    lines += [
        ("weights tested", f"the {result.chosen} ones"),
        ("test loss", f"{test.loss:.4f}"),
        ("total seconds", f"{result.seconds:.1f}"),
    ]
    lines += [("bad samples", f"{result.num_bad:,} skipped")] if result.num_bad else []
    lines += [("ended early", result.why)] if result.why else []
    return lines


def _speed(images_per_second: float) -> list[str]:
    """Return the column of a speed; none if it is unknown, as right after a loss."""
    digits = ",.0f" if images_per_second >= 10 else ".2g"
    return [f"{images_per_second:{digits}} images/s"] if images_per_second > 0 else []


def _figures(progress: Progress) -> str:
    """Return the figures of the progress bar or line."""
    found = [f"loss {progress.loss:.3f}", f"accuracy {progress.accuracy:.1%}"]
    return "  ".join([*found, *_speed(progress.images_per_second)])


def _bar(console: Console) -> Bar:
    """Return a progress bar that disappears when it stops."""
    return Bar(
        TextColumn("epoch {task.fields[epoch]}", markup=False),
        BarColumn(bar_width=24),
        TextColumn("{task.fields[figures]}", markup=False),
        TimeRemainingColumn(compact=True),
        TextColumn("left{task.fields[saved]}", markup=False),
        console=console,
        transient=True,
        # Drawing takes 0.8 ms of the training process.
        refresh_per_second=2,
    )


def weights_line(opening: Opening) -> str:
    """Return which workers have a copy of the weights, and what an undo copy takes."""
    if opening.config.sync.mode.name == "elastic":
        return "the center on each host, and each worker's own"
    if not opening.config.sync.mode.has_equal_steps:
        return "one copy on each host, to which workers push, and one of each worker"
    if not opening.share_weights:
        return "each worker has its own"
    if not opening.undo_nbytes:
        return "one copy on each host"
    size = nbytes(opening.undo_nbytes)
    return f"one copy on each host; updates keep an undo copy of {size} and the optimizer's state"


def _hosts(hosts: Sequence[str]) -> str:
    """Return each host with its number of workers."""
    return ", ".join(f"{host} ({count})" for host, count in Counter(hosts).items())


def _range(values: Sequence[int]) -> str:
    """Return the smallest and largest value, or the value if all are equal."""
    low, high = min(values), max(values)
    return str(low) if low == high else f"{low} to {high}"
