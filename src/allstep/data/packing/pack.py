"""Pack any source into a few large shards: TFRecord or tar, in parallel, resumable after a kill.

```
source --read, convert (threads, in chunks)--> records in order --> .x-00000-of-00012.tfrecord.part
                                                                      | fsync, rename
                                                                      v
                    line in pack.jsonl <-- index of the shard <-- x-00000-of-00012.tfrecord
```

Threads produce the bytes, and one writer writes them in the order of the plan: the result does not
depend on the number of threads. The finished folder:

    x-00000-of-00012.tfrecord ...    the shards, each with a hidden index file next to it
    classes.txt                      names of the classes, one per line, if they are known
    quarantine.jsonl                 bad samples, which were not packed, one per line, if any
    pack.jsonl                       the journal: options, source, shards

The modules: `plan` assigns samples to shards, `journal` records complete shards, `image` converts
images, `record` serializes samples, `ordered` runs the threads.
"""

import json
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing
from dataclasses import asdict, dataclass, field
from itertools import groupby
from pathlib import Path

from allstep.data.loading.quarantine import default_budget
from allstep.data.packing.full_disk import clear_error
from allstep.data.packing.image import recode
from allstep.data.packing.journal import CLASSES, QUARANTINE, Bad, Done, Journal, opened
from allstep.data.packing.ordered import chunks, default_jobs, ordered
from allstep.data.packing.record import FORMS, Item
from allstep.data.packing.shard_plan import Options, Origin, Plan, num_shards, origin_of, spread
from allstep.data.packing.source import with_all_features
from allstep.data.sources.labels import check_class_names
from allstep.data.sources.source import BadSample, Source
from allstep.errors import DataError
from allstep.files.atomic import write_atomic

_CHUNK_NBYTES = 1 << 20
_MAX_IN_CHUNK = 64
# Number of bad samples that an error message quotes.
_SHOWN = 3

Progress = Callable[[int, int], None]
"""Callback for progress: number of samples processed so far, and in total."""


@dataclass(frozen=True)
class Outcome:
    """The result of a packing."""

    folder: Path
    num_samples: int
    """Number of samples in all shards."""
    num_shards: int
    num_before: int
    """Number of shards that an earlier call had packed."""
    nbytes: int
    """Bytes of all shards."""
    bad: tuple[Bad, ...]
    """Bad samples, which were not packed."""


def pack(
    source: Source,
    where: str,
    target: Path,
    options: Options,
    *,
    jobs: int | None = None,
    overwrite: bool = False,
    strict: bool = False,
    budget: int | None = None,
    progress: Progress | None = None,
) -> Outcome:
    """Pack `source`, which was opened at `where`, into the folder `target`.

    Resumes where an earlier call with the same options stopped; with `overwrite` it removes the
    earlier result first. `jobs` is the number of threads (default: one per core). `budget` is the
    maximum number of bad samples (default: the larger of 100 and 0.1% of the dataset); with
    `strict` it is 0. `progress` is called after each chunk.
    """
    source = with_all_features(source)
    # A class name that cannot be stored must be an error now, not after all shards are written.
    check_class_names(source.classes)
    origin = origin_of(source, where)
    max_bad = 0 if strict else default_budget(len(source)) if budget is None else budget
    with clear_error(target), opened(target) as journal:
        if overwrite:
            journal.clear()
        journal.remove_parts()
        jobs = jobs or default_jobs()
        plan = _agreed(journal, origin, options)
        plan = plan or _new_plan(journal, source, origin, options, jobs)
        before = len(journal.done)
        tally = _Tally(plan, max_bad, journal.done.values(), progress)
        _write_shards(journal, _Packer(source, plan, jobs), tally)
        return _finish(journal, source, before)


def _agreed(journal: Journal, origin: Origin, options: Options) -> Plan | None:
    """Return the plan in the journal, or None; raise DataError if options or source differ."""
    plan = journal.plan
    if plan is None:
        return None
    again = "give --overwrite to pack again, or another folder"
    if plan.options != options:
        changes = _changes(plan.options, options)
        raise DataError(f"{journal.folder}: was packed with other options ({changes}); {again}")
    if plan.origin != origin:
        raise DataError(
            f"{journal.folder}: was packed from {_difference(plan.origin, origin)}; {again}"
        )
    return plan


def _changes(before: Options, now: Options) -> str:
    old, new = asdict(before), asdict(now)
    return ", ".join(f"{key} {old[key]}, now {new[key]}" for key in new if old[key] != new[key])


def _difference(before: Origin, now: Origin) -> str:
    if before.where != now.where:
        return f"{before.where}, not from {now.where}"
    if before.num_samples != now.num_samples:
        return f"{before.num_samples} samples, and {now.where} now has {now.num_samples}"
    return f"{now.where}, which has changed since"


def _new_plan(
    journal: Journal, source: Source, origin: Origin, options: Options, jobs: int
) -> Plan:
    """Write a new plan to the journal and return it.

    The number of shards follows from the mean size of a few samples, which are packed as a trial.
    """
    trial = _Packer(source, Plan(options, origin, 1, 0), jobs)
    numbers = spread(len(source), min(256, max(8, len(source) // 16)))
    sizes: list[int] = []
    problems: list[BadSample] = []
    for made in ordered(trial.one, numbers, jobs):
        sizes += [len(made)] if isinstance(made, bytes) else []
        problems += [made] if isinstance(made, BadSample) else []
    if not sizes:
        raise DataError(
            f"{origin.where}: none of {len(numbers)} samples tried can be packed; {problems[0]}"
        )
    mean = sum(sizes) / len(sizes)
    plan = Plan(options, origin, num_shards(options, len(source), mean), round(mean))
    journal.begin(plan)
    return plan


@dataclass(frozen=True)
class _Chunk:
    """Records of consecutive samples of one shard, and the bad samples among them."""

    shard: int
    records: list[bytes]
    bad: list[Bad]


class _Packer:
    """The work of the threads: reads samples by number and returns their bytes."""

    def __init__(self, source: Source, plan: Plan, jobs: int) -> None:
        self.source, self.plan, self.jobs = source, plan, jobs
        self._record = FORMS[plan.options.to].record

    def chunks(self, shards: Iterable[int]) -> Generator[_Chunk]:
        """Yield all samples of `shards` in order, as chunks."""
        return ordered(self._chunk, self._chunk_ranges(shards), self.jobs)

    def one(self, number: int) -> bytes | BadSample:
        """Return the bytes of one sample, or the reason why it is bad."""
        try:
            sample = self.source.read(number)
            image = recode(sample.data, self.plan.options)
            return self._record(Item(number, self.source.place(number), sample, image))
        except BadSample as error:
            return error
        # Not an image, or a feature that a record cannot store.
        except ValueError as error:
            return BadSample(number, self.source.place(number), str(error))

    def _chunk_ranges(self, shards: Iterable[int]) -> Iterator[tuple[int, int, int]]:
        size = max(1, min(_MAX_IN_CHUNK, _CHUNK_NBYTES // max(1, self.plan.mean_nbytes)))
        for shard in shards:
            first, end = self.plan.span(shard)
            for start, stop in chunks(end - first, size):
                yield shard, first + start, first + stop

    def _chunk(self, chunk_range: tuple[int, int, int]) -> _Chunk:
        shard, start, stop = chunk_range
        made = [self.one(int(number)) for number in self.plan.numbers(start, stop)]
        records = [each for each in made if isinstance(each, bytes)]
        return _Chunk(
            shard, records, [Bad.of(each) for each in made if isinstance(each, BadSample)]
        )


@dataclass
class _Tally:
    """Counts of good and bad samples of a packing; too many bad ones raise DataError."""

    plan: Plan
    max_bad: int
    """Number of bad samples that are allowed."""
    before: Iterable[Done]
    """Shards of an earlier call."""
    progress: Progress | None
    count: int = 0
    """Number of samples so far, good and bad."""
    bad: list[Bad] = field(default_factory=list)

    def __post_init__(self) -> None:
        for done in self.before:
            self.note(done.samples, done.bad)

    def note(self, num_good: int, bad: Iterable[Bad]) -> None:
        """Count packed and bad samples, and report the progress."""
        self.bad += bad
        self.count = self.count + num_good + len(tuple(bad))
        if self.progress:
            self.progress(self.count, self.plan.origin.num_samples)
        if len(self.bad) > self.max_bad:
            first = "; ".join(
                f"sample {each.number} ({each.file} at byte {each.offset}): {each.reason}"
                for each in self.bad[:_SHOWN]
            )
            raise DataError(
                f"{len(self.bad)} of {self.count} samples are bad, more than the {self.max_bad}"
                f" allowed; the first: {first}"
            )


def _write_shards(journal: Journal, packer: _Packer, tally: _Tally) -> None:
    with closing(packer.chunks(journal.missing())) as made:
        for shard, of_shard in groupby(made, key=lambda chunk: chunk.shard):
            journal.add(_write_shard(journal.folder, packer.plan, shard, of_shard, tally))


def _write_shard(
    folder: Path, plan: Plan, shard: int, of_shard: Iterable[_Chunk], tally: _Tally
) -> Done:
    form, path = FORMS[plan.options.to], folder / plan.file(shard)
    num_samples, bad = 0, []
    with write_atomic(path, sync=True) as file:
        for chunk in of_shard:
            file.writelines(chunk.records)
            num_samples += len(chunk.records)
            bad += chunk.bad
            tally.note(len(chunk.records), chunk.bad)
        file.write(form.end(file.tell()))
        nbytes = file.tell()
    form.index(path)
    return Done(shard, path.name, nbytes, num_samples, tuple(bad))


def _finish(journal: Journal, source: Source, before: int) -> Outcome:
    """Write the files for classes and bad samples; return the result."""
    shards = [done for _, done in sorted(journal.done.items())]
    bad = tuple(each for done in shards for each in done.bad)
    if source.classes:
        _write_lines(journal.folder / CLASSES, (f"{name}\n" for name in source.classes))
    if bad:
        _write_lines(journal.folder / QUARANTINE, (f"{json.dumps(asdict(each))}\n" for each in bad))
    num_samples, nbytes = sum(done.samples for done in shards), sum(done.nbytes for done in shards)
    return Outcome(journal.folder, num_samples, len(shards), before, nbytes, bad)


def _write_lines(path: Path, lines: Iterable[str]) -> None:
    with write_atomic(path, sync=True) as file:
        file.write("".join(lines).encode())
