"""Packs any source into a few large shards: TFRecord or tar, in parallel, resumable after a kill.

```
source --read--> recode (threads, in chunks) --> records in order --> .x-00000-of-00012.tfrecord.part
                                                                        | fsync, rename
                                                                      x-00000-of-00012.tfrecord -->
                                                                      its index --> a line in
                                                                      pack.jsonl
```

Threads make the bytes, one writer puts them down in the plan's order: the same bytes whatever the
number of threads. The folder in the end:

    x-00000-of-00012.tfrecord ...    the shards, each with a hidden index beside it
    classes.txt                      names of the classes, one a line, where they are known
    quarantine.jsonl                 samples that were left out, one a line, where there were any
    pack.jsonl                       the journal: options, source, shards

The parts: `plan` decides which sample goes where, `journal` remembers what is done, `image` makes
images smaller, `record` makes bytes of samples, `ordered` has the threads.
"""

import json
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import closing
from dataclasses import asdict, dataclass, field
from itertools import groupby
from pathlib import Path

from allstep.data.loading.quarantine import default_budget
from allstep.data.packing.full_disk import clear_error
from allstep.data.packing.journal import CLASSES, QUARANTINE, Bad, Done, Journal, opened
from allstep.data.packing.ordered import chunks, default_jobs, ordered
from allstep.data.packing.plan import Options, Origin, Plan, num_shards, origin_of, spread
from allstep.data.packing.record import FORMS, Item
from allstep.data.packing.source import with_all_features
from allstep.data.sources.labels import check_class_names
from allstep.data.sources.source import BadSample, Source
from allstep.errors import DataError
from allstep.files.whole import write_whole

_CHUNK_NBYTES = 1 << 20
_MAX_IN_CHUNK = 64
_SHOWN = 3  # bad samples that an error quotes

Progress = Callable[[int, int], None]
"""Told, as packing goes on: samples so far, and of how many."""


@dataclass(frozen=True)
class Outcome:
    """A packed set."""

    folder: Path
    num_samples: int
    num_shards: int
    num_before: int
    """Shards that an earlier call had packed."""
    nbytes: int
    bad: tuple[Bad, ...]


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
    """Packs `source`, which was opened at `where`, into the folder `target`; goes on where an
    earlier call with the same options stopped.

    `budget` is how many samples may be bad (the larger of 100 and 0.1% of the set, unless given),
    none with `strict`.
    """
    source = with_all_features(source)
    # That a name cannot be stored is better known now than when all shards are written.
    check_class_names(source.classes)
    origin = origin_of(source, where)
    most = 0 if strict else default_budget(len(source)) if budget is None else budget
    with clear_error(target), opened(target) as journal:
        if overwrite:
            journal.clear()
        journal.remove_parts()
        jobs = jobs or default_jobs()
        plan = _agreed(journal, origin, options) or _new_plan(
            journal, source, origin, options, jobs
        )
        before = len(journal.done)
        _write_shards(
            journal,
            _Packer(source, plan, jobs),
            _Tally(plan, most, journal.done.values(), progress),
        )
        return _finish(journal, source, before)


def _agreed(journal: Journal, origin: Origin, options: Options) -> Plan | None:
    """The plan in the journal, which must be the one we would make; None when there is none yet."""
    plan = journal.plan
    if plan is None:
        return None
    again = "give --overwrite to pack anew, or another folder"
    if plan.options != options:
        before, now = asdict(plan.options), asdict(options)
        differ = ", ".join(
            f"{key} {before[key]}, now {now[key]}" for key in now if before[key] != now[key]
        )
        raise DataError(f"{journal.folder}: was packed with other options ({differ}); {again}")
    if plan.origin != origin:
        raise DataError(
            f"{journal.folder}: was packed from {_difference(plan.origin, origin)}; {again}"
        )
    return plan


def _difference(before: Origin, now: Origin) -> str:
    if before.where != now.where:
        return f"{before.where}, not from {now.where}"
    if before.num_samples != now.num_samples:
        return f"{before.num_samples} samples, and {now.where} has {now.num_samples} now"
    return f"{now.where} before that was changed"


def _new_plan(
    journal: Journal, source: Source, origin: Origin, options: Options, jobs: int
) -> Plan:
    """Packs a few samples on trial, to know how large the shards will be, and writes the plan down."""
    trial = _Packer(source, Plan(options, origin, 1, 0), jobs)
    numbers = spread(len(source), min(256, max(8, len(source) // 16)))
    sizes: list[int] = []
    problems: list[BadSample] = []
    for made in ordered(trial.one, numbers, jobs):
        sizes += [len(made)] if isinstance(made, bytes) else []
        problems += [made] if isinstance(made, BadSample) else []
    if not sizes:
        raise DataError(
            f"{origin.where}: of {len(numbers)} samples looked at none can be packed; {problems[0]}"
        )
    mean = sum(sizes) / len(sizes)
    plan = Plan(options, origin, num_shards(options, len(source), mean), round(mean))
    journal.begin(plan)
    return plan


@dataclass(frozen=True)
class _Chunk:
    """Some samples of one shard, packed, in order."""

    shard: int
    records: list[bytes]
    bad: list[Bad]


class _Packer:
    """The threads' work: numbers of samples in, bytes out."""

    def __init__(self, source: Source, plan: Plan, jobs: int) -> None:
        self.source, self.plan, self.jobs = source, plan, jobs
        self._recode = plan.options.recoding()
        self._record = FORMS[plan.options.to].record

    def chunks(self, shards: Iterable[int]) -> Generator[_Chunk]:
        """All samples of `shards`, in order."""
        return ordered(self._chunk, self._chunk_ranges(shards), self.jobs)

    def one(self, number: int) -> bytes | BadSample:
        """One sample's bytes, or what is wrong with it."""
        try:
            sample = self.source.read(number)
            item = Item(number, self.source.place(number), sample, self._recode(sample.data))
            return self._record(item)
        except BadSample as error:
            return error
        except ValueError as error:  # no image, or a feature that no record can hold
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
    """Counts samples as they are packed; raises DataError when too many are bad."""

    plan: Plan
    most: int
    before: Iterable[Done]
    progress: Progress | None
    count: int = 0
    bad: list[Bad] = field(default_factory=list)

    def __post_init__(self) -> None:
        for done in self.before:
            self.note(done.samples, done.bad)

    def note(self, num_good: int, bad: Iterable[Bad]) -> None:
        """Counts samples that were packed, and those that were not."""
        self.bad += bad
        self.count = self.count + num_good + len(tuple(bad))
        if self.progress:
            self.progress(self.count, self.plan.origin.num_samples)
        if len(self.bad) > self.most:
            first = "; ".join(
                f"sample {each.number} ({each.file} at byte {each.offset}): {each.reason}"
                for each in self.bad[:_SHOWN]
            )
            raise DataError(
                f"{len(self.bad)} bad samples of {self.count}, {self.most} are allowed; {first}"
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
    with write_whole(path, sync=True) as file:
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
    """Writes what goes beside the shards."""
    shards = [done for _, done in sorted(journal.done.items())]
    bad = tuple(each for done in shards for each in done.bad)
    if source.classes:
        _write_lines(journal.folder / CLASSES, (f"{name}\n" for name in source.classes))
    if bad:
        _write_lines(journal.folder / QUARANTINE, (f"{json.dumps(asdict(each))}\n" for each in bad))
    num_samples, nbytes = sum(done.samples for done in shards), sum(done.nbytes for done in shards)
    return Outcome(journal.folder, num_samples, len(shards), before, nbytes, bad)


def _write_lines(path: Path, lines: Iterable[str]) -> None:
    with write_whole(path, sync=True) as file:
        file.write("".join(lines).encode())
