"""What a worker of `allstep landscape` does.

```
all ranks   model of RUN (and RUN2), the samples in memory      rank 0 reads the checkpoints
all ranks   the center, timed: the expected time                rank 0 refuses too many points
all ranks   the points that are left, in rounds                 rank 0 saves each
rank 0      the result files
```

Each worker computes on one thread (or one GPU): points are independent, so a thread per core beats
several threads per point, and the bits do not depend on the number of cores.
"""

import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from allstep import comm
from allstep.comm.group import agree
from allstep.data import Batch
from allstep.errors import ConfigError
from allstep.files.lock import LockTaken, locked
from allstep.study.landscape.allowed import check_allowed, expected_seconds
from allstep.study.landscape.asked import Asked, Expected, Landscape
from allstep.study.landscape.comparable import check_same_model
from allstep.study.landscape.point_file import (
    FOLDER,
    PointWriter,
    Value,
    point_file,
    read_points,
)
from allstep.study.landscape.points import Kind, Point, num_points, points
from allstep.study.landscape.result import (
    Around,
    Line,
    around_result,
    line_result,
    read_around,
    read_line,
    write_result,
)
from allstep.study.landscape.survey import Loss, evaluate_points, seconds_per_point
from allstep.study.landscape.weights import Weights, digest, has_running_statistics
from allstep.train.config.run_config import RunConfig
from allstep.train.folder.existing_run import Evaluation
from allstep.train.task.classification import Classification
from allstep.train.use.load_run import Trained, find_run, make_device, make_trained
from allstep.train.use.samples import make_loader, open_samples
from allstep.world import World

Started = Callable[[Expected], None]
Progressed = Callable[[int, int], None]


def work(
    asked: Asked, started: Started, progressed: Progressed, launcher: str | None = None
) -> Landscape | None:
    """Compute a landscape as a worker; only rank 0 returns the outcome.

    Rank 0 calls `started` before the first point, and `progressed` with the number of computed
    points and of all.
    """
    world = comm.init(launcher)
    torch.set_num_threads(1)
    outcome = landscape(asked, world, started, progressed)
    comm.shutdown()
    return outcome if world.rank == 0 else None


def landscape(asked: Asked, world: World, started: Started, progressed: Progressed) -> Landscape:
    """Compute a landscape on all ranks of `world`. A collective."""
    runs = _load_runs(asked, world)
    with ExitStack() as held:
        agree.rank_0_decides(world, lambda: _lock(held, asked.first.folder))
        return _Job(asked, world, runs, started, progressed).outcome()


@dataclass(frozen=True)
class _Runs:
    """The models and the samples, as every rank has them."""

    trained: Sequence[Trained]
    batches: Sequence[Batch]
    where: str
    num_bad: int

    @property
    def num_samples(self) -> int:
        return sum(batch.weight for batch in self.batches)

    def notes(self) -> tuple[str, ...]:
        bad = f"{self.num_bad} samples could not be read and were left out"
        own = [note for each in self.trained for note in each.notes]
        return (*own, *([bad] if self.num_bad else []))


def _load_runs(asked: Asked, world: World) -> _Runs:
    """Load models and samples on each rank; rank 0 reads the checkpoints."""
    requests = [each for each in (asked.first, asked.second) if each is not None]
    found, config = agree.rank_0_decides(
        world,
        lambda: (
            [find_run(each.folder, each.which, each.trust) for each in requests],
            asked.first.config(),
        ),
    )
    device = make_device(asked.first.device)
    trained = agree.everyone(world, lambda: [make_trained(each, device) for each in found])
    # First on one rank per host, which makes indexes that the others read.
    is_first = world.local_rank == 0
    load = partial(_load_samples, asked.first, config, trained[0], device)
    early = agree.everyone(world, lambda: load() if is_first else None)
    batches, where, num_bad = agree.everyone(world, lambda: load() if early is None else early)
    if len(trained) == 2:
        first, second = trained
        agree.everyone(world, lambda: check_same_model(first, second, asked.folders(), batches[0]))
    return _Runs(trained, batches, where, num_bad)


def _load_samples(
    asked: Evaluation, config: RunConfig, trained: Trained, device: torch.device
) -> tuple[list[Batch], str, int]:
    """Return all samples as batches of the size of an evaluation, their place, and the bad ones.

    Pixels stay bytes: converting them for each point costs little, and floats four times the
    memory.
    """
    opened = open_samples(asked, config, trained)
    loader = make_loader(config, trained, opened, World.alone(), device)
    task = Classification(trained.num_classes)
    try:
        batches = []
        for batch in loader.batches():
            if batch.weight:
                task.check_targets(batch, loader)
                # The loader uses its memory again.
                batches.append(replace(batch, data=batch.data.clone()))
    finally:
        loader.close()
    if not batches:
        raise ConfigError(f"{opened.where}: has no sample that can be read")
    return batches, opened.where, loader.num_bad


def _lock(held: ExitStack, run: Path) -> None:
    """Hold the lock of the run's landscape until `held` is closed."""
    folder = run / FOLDER
    try:
        folder.mkdir(exist_ok=True)
        held.enter_context(locked(folder / ".lock"))
    except LockTaken:
        raise ConfigError(
            f"{folder}: another process computes the landscape of this run; wait for its end"
        ) from None
    except OSError as error:
        raise ConfigError(
            f"{folder}: cannot be written: {error.strerror or error}; the landscape of a run is"
            " stored in its folder"
        ) from error


class _Job:
    """The surveys of one request."""

    def __init__(
        self, asked: Asked, world: World, runs: _Runs, started: Started, progressed: Progressed
    ) -> None:
        self.asked, self.world, self.runs = asked, world, runs
        self.started, self.progressed = started, progressed
        first, *others = runs.trained
        second = others[0].model if others else None
        self.loss = Loss(
            Weights(first.model, second, asked.seed),
            runs.batches,
            first.to_input,
            Classification(first.num_classes),
            first.config.evaluation.flip,
        )
        self.settings = agree.rank_0_decides(world, self._settings)
        self.total = sum(num_points(kind, asked.grid) for kind in asked.kinds)

    def outcome(self) -> Landscape:
        """Compute what is missing, and return the results."""
        run, rank_0 = self.asked.first.folder, self.world.rank == 0
        ended, found = agree.rank_0_decides(self.world, self._found)
        notes = list(self.runs.notes())
        counts = {kind: num_points(kind, self.asked.grid) for kind in self.asked.kinds}
        num_left = sum(
            count - len(found[kind]) for kind, count in counts.items() if kind not in ended
        )
        if num_left > 0:
            notes += self._estimate(num_left)
        num_done, results, files = self.total - num_left, dict(ended), []
        for kind in self.asked.kinds:
            if kind not in ended:
                values = found[kind] | self._evaluate(kind, found[kind], num_done)
                num_done += counts[kind] - len(found[kind])
                results[kind] = self._result(kind, values, results)
                if rank_0:
                    files.append(write_result(run, results[kind]))
                    point_file(run, kind, self.settings[kind]).unlink(missing_ok=True)
        return self._outcome(results, tuple(files), tuple(notes))

    def _settings(self) -> dict[Kind, dict[str, Any]]:
        """Return what a result depends on, by kind of survey."""
        first, *others = self.runs.trained
        common = {
            "points": list(self.asked.grid),
            "seed": self.asked.seed,
            "part": self.asked.first.split,
            "num_samples": self.runs.num_samples,
            "where": self.runs.where,
            "samples": digest(
                [
                    entry
                    for batch in self.runs.batches
                    for entry in (("data", batch.data), ("target", batch.target))
                ]
            ),
            "weights": digest(first.model.state_dict()),
            "which": first.which,
            "trained_on": first.samples,
            "flip": first.config.evaluation.flip,
        }
        settings: dict[Kind, dict[str, Any]] = {"around": common}
        for other in others:
            more = {
                "second_weights": digest(other.model.state_dict()),
                "second_trained_on": other.samples,
            }
            settings["line"] = common | more
        return settings

    def _found(self) -> tuple[dict[Kind, Any], dict[Kind, dict[str, Value]]]:
        """Return results that exist already, and the points of interrupted surveys."""
        run = self.asked.first.folder
        ended: dict[Kind, Any] = {}
        found: dict[Kind, dict[str, Value]] = {}
        for kind in self.asked.kinds:
            try:
                result = (read_around if kind == "around" else read_line)(run)
            except (OSError, ValueError):
                # It is replaced.
                result = None
            if result is not None and result.settings == self.settings[kind]:
                ended[kind] = result
            found[kind] = read_points(point_file(run, kind, self.settings[kind]))
        return ended, found

    def _estimate(self, num_left: int) -> list[str]:
        """Show the expected time, or refuse too many points; return notes."""
        seconds, is_equal = seconds_per_point(self.world, self.loss)
        asked, size = self.asked, self.world.size
        expected = expected_seconds(num_left, seconds, size)

        def begin() -> None:
            free = shutil.disk_usage(asked.first.folder).free
            check_allowed(asked.grid, num_left, expected, size, asked.limit, free)
            runs = self.runs
            self.started(
                Expected(
                    runs.where, runs.num_samples, self.total, num_left, seconds, expected, size
                )
            )

        agree.rank_0_decides(self.world, begin)
        if is_equal:
            return []
        return [
            "the workers compute slightly different losses for the same weights: their CPUs differ,"
            " so the figures depend on which worker has a point"
        ]

    def _evaluate(self, kind: Kind, found: Mapping[str, Value], num_done: int) -> dict[str, Value]:
        """Evaluate the points of a survey that are not in `found`."""
        todo: list[Point] = [
            point for point in points(kind, self.asked.grid) if point.name not in found
        ]
        with _saving(self, kind, num_done) as save:
            return evaluate_points(self.world, todo, self.loss, save)

    def _result(
        self, kind: Kind, values: Mapping[str, Value], results: Mapping[Kind, Any]
    ) -> Around | Line:
        """Return the result of a survey whose points are all computed."""
        names, grid, settings = self.asked.names(), self.asked.grid, self.settings[kind]
        has_any = has_running_statistics(self.loss.weights.model)
        if kind == "around":
            return around_result(settings, names[0], _treatment(kind, has_any), grid, values)
        runs = (names[0], names[1])
        around: Around = results["around"]
        return line_result(settings, runs, _treatment(kind, has_any), grid[0], values, around)

    def _outcome(
        self, results: Mapping[Kind, Any], files: tuple[Path, ...], notes: tuple[str, ...]
    ) -> Landscape:
        first = self.runs.trained[0]
        return Landscape(
            results["around"],
            results.get("line"),
            first.which,
            first.samples,
            self.runs.where,
            self.runs.num_samples,
            files,
            notes,
        )


@contextmanager
def _saving(job: _Job, kind: Kind, num_done: int) -> "Iterator[Callable[[str, Value], None]]":
    """Yield a function that saves a point and shows the progress; rank 0 calls it."""
    if job.world.rank != 0:
        yield lambda name, value: None
        return
    writer, done = (
        PointWriter(point_file(job.asked.first.folder, kind, job.settings[kind])),
        num_done,
    )

    def save(name: str, value: Value) -> None:
        nonlocal done
        writer.add(name, value)
        done += 1
        job.progressed(done, job.total)

    try:
        yield save
    finally:
        writer.close()


def _treatment(kind: Kind, has_any: bool) -> str:
    """Return how running statistics were treated, as text."""
    if not has_any:
        return "the model has none"
    if kind == "line":
        return "interpolated between those of the two runs, like the weights"
    return "those of the trained weights at every point, though moved weights would have others"
