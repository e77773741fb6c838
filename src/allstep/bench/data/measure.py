"""Images per second of allstep and of other loaders, on the same images in the same run.

The images are written once, to a temporary folder, in each contender's own format: one file each
(torch's DataLoader, DALI), tar shards (WebDataset), TFRecords (tf.data and allstep);
and packed by `allstep data pack` in two forms that only allstep reads: longer side cut to 400 at
quality 90, and decoded with the longer side cut to 256. All data is in the page cache: the
benchmark measures computation, not disks.

Each contender is a separate process (see `reader`) with the same number of threads or worker
processes. In a round every contender has a turn of some seconds while the others wait with full
queues. The first round is a warm-up and does not count. Ratios are taken within a round. After each
of allstep's contenders, plain threads and processes do the same work without a loader (`ceiling`)
for the same time.

Small images (up to 64 pixels a side) are kept decoded; there the work is a crop of the padded
image and a flip.
"""

import contextlib
import itertools
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from allstep import machine
from allstep.bench.comm.measure import CommFailed, Team, start_team
from allstep.bench.data.ceiling import KINDS
from allstep.bench.data.peers import ARRAYS, FILES, NEEDS, RECORDS, TARS, Settings
from allstep.bench.data.reader import FOLDERS, PACKED, RAW, SMALL, names, operations
from allstep.bench.data.result import STAGES, WHOLE, DataResult, DataRow
from allstep.bench.result import Missing
from allstep.data import Transform
from allstep.data.image.decode import decode
from allstep.data.opening import open_source
from allstep.data.packing.pack import pack
from allstep.data.packing.shard_plan import Options
from allstep.data.sources.source import BadSample, Place, Sample, Source
from allstep.errors import DataError
from allstep.process.python import run_module

REPETITIONS = 5
# Phases of the run besides the repetitions: preparing, warming up, stages.
NUM_EXTRA = 3
MAX_SAMPLES = 2000
_SECONDS_PER_TURN = 3.0
_SECONDS_PER_STAGE = 1.0

Progress = Callable[[str], None]


class First(Source):
    """The first `limit` samples of a source."""

    def __init__(self, whole: Source, limit: int) -> None:
        self.whole, self.num_samples, self.classes = whole, min(limit, len(whole)), whole.classes

    def __len__(self) -> int:
        return self.num_samples

    def read(self, number: int) -> Sample:
        return self.whole.read(number)

    def place(self, number: int) -> Place:
        return self.whole.place(number)


def measure_data(
    where: Sequence[str],
    size: int = 224,
    batch: int = 64,
    num_threads: int | None = None,
    repetitions: int = REPETITIONS,
    max_samples: int = MAX_SAMPLES,
    progress: Progress = lambda text: None,
) -> DataResult:
    """Time every contender `repetitions` times.

    `where` lists the folders or files of one dataset, `size` is the output's height and width in
    pixels, `num_threads` the workers of each contender (default: all allowed cores), `max_samples`
    the number of images that are used. `progress` is called with the current phase, NUM_EXTRA +
    `repetitions` times.
    """
    source = First(open_source(list(where) if len(where) > 1 else where[0]), max_samples)
    with contextlib.ExitStack() as ending:
        folder = ending.enter_context(tempfile.TemporaryDirectory(prefix="allstep-bench-"))
        settings = prepare(
            source, Settings(folder, size, batch, num_threads or machine.allowed_cores()), progress
        )
        progress("warming up")
        rounds = DataRounds(settings, ending)
        rounds.take(_SECONDS_PER_TURN)
        rounds.forget()
        for number in range(1, repetitions + 1):
            progress(f"round {number} of {repetitions}")
            rounds.take(_SECONDS_PER_TURN)
        progress("stages")
        stages = {
            row.name: measure_stages(settings, row.name)
            for row in rounds.rows()
            if row.name in FOLDERS
        }
    title = where[0] if len(where) == 1 else f"{where[0]} and {len(where) - 1} more"
    sizes = (settings.size, settings.batch, settings.num_threads)
    return DataResult(
        title, len(source), *sizes, rounds.rows(), stages, rounds.missing, rounds.alone()
    )


def prepare(source: Source, settings: Settings, progress: Progress) -> Settings:
    """Write the images in all formats and return the settings.

    For small images, the settings have the images' own size.
    """
    progress("preparing")
    pixels = _pixels(source, 0)
    if max(pixels.shape[:2]) <= SMALL:
        settings = Settings(
            settings.folder, max(pixels.shape[:2]), settings.batch, settings.num_threads
        )
        np.save(settings.path / ARRAYS, _stacked(source, pixels.shape))
        _pack(source, settings.path / FOLDERS[RAW], raw=True)
        return settings
    _write_files(source, settings.path / FILES)
    # WebDataset gives whole shards to its workers.
    per_tar = -(-len(source) // (2 * settings.num_threads))
    _pack(source, settings.path / RECORDS)
    _pack(source, settings.path / TARS, to="tar", shard_samples=per_tar)
    _pack(source, settings.path / FOLDERS[PACKED], max_side=400, quality=90)
    _pack(source, settings.path / FOLDERS[RAW], max_side=256, raw=True)
    return settings


def _pixels(source: Source, number: int) -> NDArray[np.uint8]:
    """Return a decoded image; raise BadSample if it is broken."""
    try:
        return decode(source.read(number).data)
    except ValueError as error:
        raise BadSample(
            number, source.place(number), f"{error}; `allstep data verify` lists all bad ones"
        ) from error


def _stacked(source: Source, shape: tuple[int, ...]) -> NDArray[np.uint8]:
    """Return all small images in one array."""
    images = np.empty((len(source), *shape), np.uint8)
    for number, row in enumerate(images):
        pixels = _pixels(source, number)
        if pixels.shape != shape:
            place, found = source.place(number), f"{pixels.shape[0]}x{pixels.shape[1]}"
            raise BadSample(
                number, place, f"expected {shape[0]}x{shape[1]} as the first one, found {found}"
            )
        row[:] = pixels
    return images


def _pack(source: Source, folder: Path, **options: Any) -> None:
    pack(source, "bench", folder, Options(folder.name, **options), strict=True)


def _write_files(source: Source, folder: Path) -> None:
    folder.mkdir()
    for number in range(len(source)):
        content = source.read(number).data
        if isinstance(content, np.ndarray):
            raise DataError(
                "these images are stored decoded; give the benchmark encoded ones, or small ones"
            )
        (folder / f"{number:06}.jpg").write_bytes(content)


class DataRounds:
    """The measurements of all available contenders, round by round."""

    def __init__(self, settings: Settings, ending: contextlib.ExitStack) -> None:
        self.missing: list[Missing] = []
        self._teams: dict[str, Team] = {}
        self._answers: dict[str, list[Mapping[str, float]]] = {}
        self._alone: dict[str, list[Mapping[str, float]]] = {}
        self._plain: dict[str, Team] = {}
        for number, name in enumerate(names(settings.size <= SMALL)):
            if reason := _absent(name):
                self.missing.append(Missing(name, reason))
            else:
                self._start(name, number, settings, ending)

    def _start(
        self, name: str, number: int, settings: Settings, ending: contextlib.ExitStack
    ) -> None:
        command = run_module("allstep.bench.data.reader", name, settings.to_json())
        try:
            self._teams[name] = start_team(f"reader-{number}", command, 1, settings.path, ending)
        except CommFailed as error:
            if name in FOLDERS:
                raise
            self.missing.append(Missing(name, f"it fails here: {str(error).splitlines()[-1]}"))
        else:
            self._answers[name] = []
            if name in FOLDERS:
                self._start_plain(name, number, settings, ending)

    def _start_plain(
        self, name: str, number: int, settings: Settings, ending: contextlib.ExitStack
    ) -> None:
        command = run_module("allstep.bench.data.ceiling", name, settings.to_json())
        self._plain[name] = start_team(f"plain-{number}", command, 1, settings.path, ending)
        self._alone[name] = []

    def take(self, seconds: float) -> None:
        """Give each contender one turn of `seconds`."""
        for name, team in self._teams.items():
            self._answers[name] += team.request({"seconds": seconds})
            if name in self._plain:
                self._alone[name] += self._plain[name].request({"seconds": seconds})

    def forget(self) -> None:
        """Discard the measurements so far."""
        for answers in (*self._answers.values(), *self._alone.values()):
            answers.clear()

    def rows(self) -> list[DataRow]:
        """Return a row for each contender."""
        return [_row(name, answers) for name, answers in self._answers.items()]

    def alone(self) -> dict[str, dict[str, list[float]]]:
        """Return images per second of plain workers in each round, by format and kind of worker."""
        return {
            name: {kind: [answer[kind] for answer in answers] for kind in KINDS}
            for name, answers in self._alone.items()
        }


def _absent(name: str) -> str:
    """Return why a peer cannot be measured, or "" if it can."""
    needed = NEEDS.get(name)
    try:
        return "" if needed is None or find_spec(needed) else f"{needed} is not installed"
    # The parent package is not installed.
    except ModuleNotFoundError:
        return f"{needed} is not installed"


def _row(name: str, answers: Sequence[Mapping[str, float]]) -> DataRow:
    speeds = [answer["pictures"] / answer["seconds"] for answer in answers]
    return DataRow(name, speeds, answers[-1]["first"], answers[-1]["bytes"])


def measure_stages(settings: Settings, name: str) -> dict[str, float]:
    """Return images per second of each stage on this thread."""
    source = open_source(str(settings.path / FOLDERS[name]))
    size = settings.size
    transform = Transform(*operations(settings))
    numbers = np.random.default_rng(0).permutation(len(source))[: 4 * settings.batch]
    stored = [source.read(int(number)).data for number in numbers]
    pixels = [decode(data) for data in stored]
    draws = transform.draw(0, 0, numbers)
    out = np.empty((len(numbers), size, size, pixels[0].shape[-1]), np.uint8)
    work: dict[str, Callable[[int], Any]] = {
        "read": lambda row: source.read(int(numbers[row])),
        "decode": lambda row: decode(stored[row]),
        "augment": lambda row: transform.one(pixels[row], out[row], draws, row),
        "collate": lambda row: np.copyto(out[row], out[row - 1]),
        WHOLE: lambda row: transform.one(source.read(int(numbers[row])).data, out[row], draws, row),
    }
    return {stage: _speed(work[stage], len(numbers)) for stage in (*STAGES, WHOLE)}


def _speed(work: Callable[[int], Any], rows: int) -> float:
    start = time.perf_counter()
    for done, row in enumerate(_round_and_round(rows), 1):
        work(row)
        if done % 16 == 0 and (taken := time.perf_counter() - start) > _SECONDS_PER_STAGE:
            return done / taken
    raise AssertionError("the iterator is endless")


def _round_and_round(rows: int) -> Iterator[int]:
    """Return an endless iterator over the rows."""
    return itertools.cycle(range(rows))
