"""Threads and processes that fill batches: they do what one loop does, end when they should, and
leave nothing behind."""

import gc
import os
import select
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from allstep.data import ArraySource, Cutmix, Loader, Mixup
from allstep.data.augment import Flip, PadAndCrop, RandomResizedCrop
from allstep.data.augment.transform import Transform
from allstep.data.loading import fill, pipeline, prefetch, processes, workers
from allstep.data.loading.fill import Recipe, Stopped
from allstep.data.loading.memory import Memory, SharedBuffer
from allstep.data.loading.processes import Processes
from allstep.data.loading.share import Share, ShareLayout
from allstep.data.order import Span
from allstep.data.sources.source import Block, Sample
from allstep.errors import AllstepError, ConfigError
from allstep.world import places
from support.array_sources import Arrays, Singly, Unwilling, noise_transform, sample_images

Pixels = NDArray[np.uint8]
BOTH: Any = pytest.mark.parametrize("kind", ["threads", "processes"])


def fds() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def our_threads() -> list[str]:
    return [
        thread.name for thread in threading.enumerate() if thread.name.startswith("allstep-loader")
    ]


@pytest.fixture(autouse=True)
def nothing_left() -> Iterator[None]:
    """Check that a test leaves no thread, descriptor or process behind."""
    gc.collect()
    before = fds()
    yield
    gc.collect()
    assert our_threads() == []
    assert fds() == before
    assert children() == []


def children() -> list[int]:
    """Return the pids of the loader's worker processes that are children of this process."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((folder / "stat").read_text().rpartition(")")[2].split()[1])
            if parent == os.getpid() and b"worker_process" in (folder / "cmdline").read_bytes():
                found.append(int(folder.name))
        except OSError:
            continue
    return found


def loader(
    n: int = 60, kind: str = "threads", source: type[Arrays] = Singly, **options: Any
) -> Loader:
    options = {"batch": 10, "workers": 2, "seed": 3, "transform": noise_transform(), **options}
    return Loader(source(sample_images(n), bad=options.pop("bad", ())), kind=kind, **options)


def seen(batches: Any) -> tuple[list[list[int]], torch.Tensor]:
    kept = list(batches)
    return [batch.samples.tolist() for batch in kept], torch.cat([batch.data for batch in kept])


class TestProcesses:
    @pytest.mark.parametrize("source", [Arrays, Singly])
    def test_they_make_the_same_images(self, source: type[Arrays]) -> None:
        """Two ranks, some samples bad. Reference: one rank, no workers."""
        options: dict[str, Any] = {"source": source, "bad": (5, 17, 18)}
        numbers, expected = seen(loader(workers=0, **options).batches(13, 100))
        ranks = [
            loader(kind="processes", workers=1, world=world, **options)
            for world in places(["here"] * 2)
        ]
        shares = [list(each.batches(13, 100)) for each in ranks]
        together = [share for both in zip(*shares, strict=True) for share in both]
        assert torch.equal(torch.cat([share.data for share in together]), expected)
        assert [n for share in together for n in share.samples.tolist()] == [
            n for batch in numbers for n in batch
        ]
        assert all(1 <= each.num_bad <= 3 for each in ranks)

    def test_the_batch_operations_of_a_transform_are_applied(self) -> None:
        """Its random numbers are drawn in this process, not in the workers.

        Some samples are bad. Reference: no workers.
        """
        made = noise_transform(batch=[Cutmix(1.0, num_classes=60), Mixup(0.3, num_classes=60)])
        here, there = (
            list(loader(transform=made, bad=(5, 17), **options).batches(13, 80))
            for options in ({"workers": 0}, {"workers": 1, "kind": "processes"})
        )
        for expected, found in zip(here, there, strict=True):
            assert torch.equal(found.data, expected.data)
            assert torch.equal(found.target, expected.target)
            assert found.target.shape == (found.weight, 60)

    def test_they_stay_over_epochs_and_batch_sizes_and_end_with_the_loader(self) -> None:
        ours = loader(kind="processes")
        list(ours)
        there = children()
        assert len(there) == 2
        for size in (3, 60, 7, 25):
            ours.batch = size
            list(ours)
        assert children() == there
        del ours
        assert children() == []

    def test_one_that_is_killed_is_an_error_and_the_next_epoch_has_a_new_one(self) -> None:
        ours = loader(n=2000, kind="processes")
        batches = iter(ours)
        next(batches)
        os.kill(children()[0], signal.SIGKILL)
        with pytest.raises(
            AllstepError, match=r"was killed by SIGKILL while it worked on the samples \["
        ):
            list(batches)
        del batches
        position = ours.position
        assert next(iter(ours)).position == position
        ours.close()

    def test_a_break_leaves_them_for_the_next_loop(self) -> None:
        ours = loader(n=200, kind="processes")
        for _ in range(5):
            next(iter(ours))
        assert ours.position == 50
        assert len(children()) == 2
        ours.close()

    def test_a_loop_inside_a_loop_has_its_own(self) -> None:
        ours = loader(n=40, kind="processes")
        for outer, inner in zip(ours.batches(), ours.batches(), strict=True):
            assert torch.equal(outer.data, inner.data)
        assert len(children()) == 4
        for number, (_, inner) in enumerate(zip(ours.batches(), ours.batches(), strict=False)):
            assert inner.position == 10 * number
            if number == 2:
                break
        assert len(children()) == 4
        ours.close()

    def test_closing_within_a_loop_is_not_taken_for_a_crash(self) -> None:
        ours = loader(n=2000, kind="processes")
        batches = iter(ours)
        next(batches)
        ours.close()
        with pytest.raises(AllstepError, match="the loader was closed within a loop over it"):
            list(batches)
        assert next(iter(ours)).weight == 10
        ours.close()

    def test_serial_numbers_are_unique_and_cancel_covers_all_of_them(self) -> None:
        crew = Processes(Recipe(Singly(sample_images(4)), noise_transform()), 0)
        with ThreadPoolExecutor(4) as pool:
            numbers = list(pool.map(lambda _: crew.serial(), range(2000)))
        assert sorted(numbers) == list(range(1, 2001))
        crew.cancel()
        assert crew._cell.read() == 2000
        crew.close()

    def test_a_stop_between_two_chunks_is_seen(self) -> None:
        """The loop may end just before a chunk gets its serial number."""
        crew = Processes(Recipe(Singly(sample_images(4)), noise_transform()), 1)
        (link,), stop = crew.links, prefetch.Stop()

        def late() -> int:
            stop.now = True
            return 7

        link._serial = late
        with pytest.raises(Stopped):
            link.begin(None, slice(0, 0), stop)  # type: ignore[arg-type]
        assert not link.busy
        crew.close()

    @pytest.mark.parametrize(("room", "unanswered"), [(1 << 15, 2), (0, 1)])
    def test_it_has_the_next_chunk_before_it_replies_to_the_last(
        self, room: int, unanswered: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A request too long for the socket's buffer waits: otherwise both sides could wait for the
        other to read."""
        monkeypatch.setattr(processes, "_ROOM", room)
        recipe = Recipe(Singly(sample_images(8)), noise_transform())
        layout = ShareLayout(
            Memory(1, SharedBuffer), (4, 4, 3), np.dtype(np.uint8), 4, Sample(None)
        )
        share = Share(recipe, layout, Span(0, 0, 8, 8), np.arange(8))
        crew, stop = Processes(recipe, 1), prefetch.Stop()
        (link,) = crew.links
        ends = [link.begin(share, chunk, stop) for chunk in share.chunks]
        assert len(link._unanswered) == unanswered
        for chunk, finish in zip(share.chunks, ends, strict=True):
            share.put(chunk, finish())
        assert not link.busy
        expected = np.empty((8, 4, 4, 3), np.uint8)
        fill.fill(recipe, np.arange(8), expected, recipe.draw(0, np.arange(8)))
        assert np.array_equal(share.wait().data, expected)
        crew.close()

    @pytest.mark.parametrize(
        ("share", "count", "ahead", "chunk"),
        [
            (64, 2, 3, 32),
            (64, 8, 3, 10),
            (8, 8, 3, 1),
            (8, 2, 3, 4),
            (1024, 2, 3, 64),
            (100, 2, 3, 50),
            (0, 2, 3, 1),
        ],
    )
    def test_chunks_are_large_but_enough_for_all(
        self, share: int, count: int, ahead: int, chunk: int
    ) -> None:
        crew = workers.Crew(count, "processes", "as asked")
        recipe = Recipe(Singly(sample_images(8)), noise_transform())
        made = pipeline.Machinery(recipe, crew, None, ahead, pin=False).layout(share).piece
        assert made == chunk
        assert made == 1 or (ahead + 1) * -(-share // made) >= (processes.DEPTH + 1) * count

    def test_they_need_neither_torch_nor_what_downloads_datasets(self) -> None:
        """Each would cost megabytes and tenths of a second in every process."""
        code = (
            "import sys, allstep.data.loading.worker_process; print(*{'torch', 'http.client'} &"
            " set(sys.modules))"
        )
        found = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        )
        assert found.stdout.strip() == ""

    def test_one_that_is_stuck_is_ended(
        self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
    ) -> None:
        def stuck(image: Pixels) -> Pixels:
            while image[0, 0, 0] >= 20:
                (tmp_path / str(os.getpid())).touch()
                time.sleep(0.1)
            return image

        monkeypatch.setattr(pipeline, "STOP_TIMEOUT", 0.2)
        # The timeout for threads does not apply to processes.
        monkeypatch.setattr(prefetch, "STOP_TIMEOUT", 1e9)
        images = sample_images(60)
        images[:, 0, 0, 0] = np.arange(60)
        ours = Loader(
            Singly(images),
            Transform(stuck, shape=(4, 4, 3)),
            batch=10,
            workers=2,
            kind="processes",
            seed=None,
        )
        for batch in ours:
            # Now everything under way is stuck permanently.
            if batch.position == 10:
                until(lambda: len(list(tmp_path.iterdir())) == 2)
                break
        until(lambda: not our_threads())
        assert children() == []

    @pytest.mark.soak
    def test_kill_9_of_the_parent_leaves_no_process_and_no_memory(self, tmp_path: Path) -> None:
        script = tmp_path / "script.py"
        script.write_text(
            textwrap.dedent("""
            import os, signal, sys, time
            import numpy as np
            from allstep.data import Loader
            from allstep.data.augment.transform import Transform
            from support.array_sources import Singly, sample_images
            def slow(image):  # of __main__, without a guard
                time.sleep(0.02)
                return image
            ours = Loader(
                Singly(sample_images(1000)),
                Transform(slow, shape=(4, 4, 3)),
                batch=10,
                workers=2,
                kind="processes",
            )
            batches = iter(ours)
            next(batches)
            print(*[link.process.pid for link in ours._ready._processes[0].links], flush=True)
            next(batches)
            os.kill(os.getpid(), signal.SIGKILL)
            """)
        )
        shm = set(os.listdir("/dev/shm"))
        path = os.pathsep.join([str(Path(__file__).parents[2]), *sys.path])
        process = subprocess.Popen(
            [sys.executable, script], stdout=subprocess.PIPE, env={**os.environ, "PYTHONPATH": path}
        )
        assert process.stdout is not None
        lives = [_life(int(pid)) for pid in process.stdout.readline().split()]
        process.stdout.close()
        assert process.wait() == -signal.SIGKILL
        assert len(lives) == 2
        for life in filter(None, lives):
            assert select.select([life], [], [], 30)[0], "a worker process outlived its parent"
            os.close(life)
        assert not [name for name in set(os.listdir("/dev/shm")) - shm if "allstep-batch" in name]


def _life(pid: int) -> int | None:
    try:
        return os.pidfd_open(pid)
    except ProcessLookupError:
        return None


class TestErrors:
    @BOTH
    def test_an_error_comes_in_its_turn_with_the_sample_and_the_traceback(self, kind: str) -> None:
        def fail(image: Pixels) -> Pixels:
            if image[0, 0, 0] == marked:
                raise KeyError("no such thing")
            return image

        images = sample_images(60)
        images[:, 0, 0, 0] = np.arange(60)
        marked = 37
        ours = Loader(
            Singly(images),
            Transform(fail, shape=(4, 4, 3)),
            batch=10,
            workers=2,
            kind=kind,
            seed=None,
        )  # type: ignore[arg-type]
        delivered = []
        with pytest.raises(KeyError, match="no such thing") as caught:
            delivered += [batch.position for batch in ours]
        notes = "\n".join(caught.value.__notes__)
        assert "sample 37 (memory at byte 37)" in notes
        assert kind == "threads" or "in fail" in notes
        assert ours.position == 30
        del caught
        ours.close()

    def test_an_error_that_cannot_be_pickled_is_reported(self) -> None:
        def fail(image: Pixels) -> Pixels:
            class OnlyHereError(Exception):
                def __reduce__(self):  # type: ignore[no-untyped-def]
                    raise TypeError("not me")

            raise OnlyHereError("lost otherwise")

        ours = loader(transform=Transform(fail, shape=(4, 4, 3)), kind="processes", workers=1)
        with pytest.raises(AllstepError, match="OnlyHereError: lost otherwise"):
            next(iter(ours))
        ours.close()

    def test_a_source_that_cannot_be_opened_over_there(self) -> None:
        ours = Loader(
            Unwilling(sample_images(20)), noise_transform(), batch=10, workers=1, kind="processes"
        )
        with pytest.raises(OSError, match="not on this host"):
            next(iter(ours))
        ours.close()


class TestEnds:
    @BOTH
    def test_a_break_an_exception_and_a_forgotten_iterator_end_all_threads(self, kind: str) -> None:
        ours = loader(n=400, kind=kind)
        for _ in ours:
            break
        assert our_threads() == []
        with pytest.raises(ZeroDivisionError):
            stumble(ours)
        # The exception held the frame that held the iterator.
        gc.collect()
        assert our_threads() == []
        batches = iter(ours)
        next(batches)
        assert len(our_threads()) == 2
        del batches
        assert our_threads() == []
        ours.close()

    def test_ctrl_c(self) -> None:
        def interrupt(image: Pixels) -> Pixels:
            calls.append(1)
            if len(calls) == 25:
                os.kill(os.getpid(), signal.SIGINT)
            return image

        calls: list[int] = []
        with pytest.raises(KeyboardInterrupt):
            for _ in loader(n=10_000, transform=Transform(interrupt, shape=(4, 4, 3))):
                pass
        gc.collect()
        assert our_threads() == []

    def test_an_iterator_that_is_open_at_the_end_of_the_program(self, tmp_path: Path) -> None:
        script = tmp_path / "script.py"
        script.write_text(
            textwrap.dedent("""
            from allstep.data import Loader
            from support.array_sources import Singly, noise_transform, sample_images
            kept = []
            source = Singly(sample_images(5000))
            for kind in ("threads", "processes"):
                ours = Loader(source, noise_transform(), batch=10, workers=2, kind=kind)
                kept.append(iter(ours))
                next(kept[-1])
            print("done", flush=True)
            """)
        )
        path = os.pathsep.join([str(Path(__file__).parents[2]), *sys.path])
        done = subprocess.run(
            [sys.executable, script],
            capture_output=True,
            text=True,
            env={**os.environ, "PYTHONPATH": path},
        )
        assert (done.returncode, done.stdout, done.stderr) == (0, "done\n", "")

    def test_a_fork_gets_an_error_and_may_start_a_new_loop(self) -> None:
        ours = loader(n=400)
        batches = iter(ours)
        next(batches)
        pid = os.fork()
        if not pid:
            signal.alarm(60)
            os._exit(in_the_fork(ours, batches))
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert next(batches).position == 10
        del batches

    @BOTH
    def test_it_does_not_grow(self, kind: str) -> None:
        ours = loader(n=30, kind=kind)

        def after(epochs: int) -> tuple[int, int, int]:
            for _ in range(epochs):
                for batch in ours:
                    batch.data.sum()
            del batch
            gc.collect()
            return len(gc.get_objects()), fds(), threading.active_count()

        objects, *rest = after(10)
        later, *rest_later = after(100)
        assert rest_later == rest
        # One object per batch would be 300.
        assert later - objects < 100
        ours.close()


def stumble(ours: Loader) -> None:
    for _ in ours:
        raise ZeroDivisionError


def in_the_fork(ours: Loader, batches: Any) -> int:
    try:
        next(batches)
    except AllstepError as error:
        if "is a fork" not in str(error):
            return 1
    return 0 if next(iter(ours)).position == 10 else 2


class TestBackPressure:
    def test_a_thread_starts_depth_chunks_and_finishes_them_in_order(self) -> None:
        events: list[str] = []

        all_given = threading.Event()

        def given() -> Iterator[Share]:
            yield share
            all_given.set()

        def begin(share: Any, chunk: slice, stop: prefetch.Stop) -> prefetch.Finish:
            all_given.wait()
            events.append(f"begin {chunk.start}")
            return lambda: (
                events.append(f"end {chunk.start}")
                or fill.Rows(target=[0] * (chunk.stop - chunk.start))
            )

        layout = ShareLayout(Memory(1), (4, 4, 3), np.dtype(np.uint8), 1, Sample(None))
        share = Share(
            Recipe(Singly(sample_images(4)), noise_transform()),
            layout,
            Span(0, 0, 4, 4),
            np.arange(4),
        )
        assert len(list(prefetch.fill_ahead(given(), [begin], ahead=1, depth=2))) == 1
        assert [event for event in events if event.startswith("end")] == [
            f"end {n}" for n in range(4)
        ]
        assert all(events.index(f"begin {n + 1}") < events.index(f"end {n}") for n in range(3))

    @pytest.mark.parametrize("ahead", [1, 3])
    def test_no_more_than_ahead_batches_are_read(self, ahead: int) -> None:
        source = Counting(sample_images(1000))
        ours = Loader(source, noise_transform(), batch=10, workers=2, kind="threads", ahead=ahead)
        for number, _ in enumerate(ours):
            # The first sample was read once more, as an example of all.
            assert source.reads <= 10 * (number + 1 + ahead) + 1
            if number == 20:
                break

    def test_work_continues_while_the_caller_does_something_else(self) -> None:
        source = Counting(sample_images(1000))
        batches = iter(
            Loader(source, noise_transform(), batch=10, workers=2, kind="threads", ahead=3)
        )
        next(batches)
        until(lambda: source.reads == 41)
        del batches


class Counting(Singly):
    reads = 0

    def read(self, number: int) -> Sample:
        self.reads += 1
        return super().read(number)


class Unequal(Singly):
    """A source that returns blocks of one sample only, as if all shapes differed."""

    def block(self, numbers: Any) -> Block | None:
        return (
            Block(np.zeros((1, 4, 4, 3), np.uint8), np.zeros(1, np.int64))
            if len(numbers) == 1
            else None
        )


def until(true: Callable[[], bool]) -> None:
    """Wait until `true()`; the timeout of the test ends a wait that never does."""
    while not true():
        time.sleep(0.005)


class TestChoice:
    """The default choice of threads or processes."""

    def choose(
        self, transform: Transform | None, cores: int = 2, samples: int = 20, blocks: bool = False
    ) -> workers.Crew:
        recipe = Recipe(Singly(sample_images(samples)), transform, blocks=blocks)
        return workers.choose("auto", "auto", cores, recipe, np.arange(samples))

    def test_a_large_dataset_is_measured_whatever_its_transform(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """With decoded images so little work is in C that threads do not help."""
        monkeypatch.setattr(workers, "time_of_two_threads", lambda *_: 0.9)
        assert self.choose(Transform(), samples=workers.ENOUGH - 1).kind == "threads"
        assert self.choose(Transform(), samples=workers.ENOUGH).kind == "processes"
        assert self.choose(Transform(), samples=workers.ENOUGH, cores=1).kind == "threads"

    def test_blocks_go_to_one_thread_or_to_processes_that_can_open_the_source(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        assert str(self.choose(Transform(), blocks=True)) == "1 thread (a small dataset)"
        crew = self.choose(Transform(), samples=workers.ENOUGH, blocks=True)
        assert (crew.kind, crew.count) == ("processes", 2)
        # Less than the arrays alone.
        monkeypatch.setattr(workers, "_LIGHT", 1000.0)
        crew = self.choose(Transform(), samples=workers.ENOUGH, blocks=True)
        assert (crew.kind, crew.count) == ("threads", 1)

    def test_threads_for_a_transform_that_releases_the_gil(self) -> None:
        assert (self.choose(Transform()).kind, self.choose(Transform()).count) == ("threads", 2)

    def test_processes_when_two_threads_are_not_faster(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for part, kind in ((0.55, "threads"), (1.02, "processes")):
            monkeypatch.setattr(workers, "time_of_two_threads", lambda *_, part=part: part)
            crew = self.choose(noise_transform())
            assert crew.kind == kind
            assert f"two threads need {part} of the time of one" in str(crew)
        assert self.choose(noise_transform(), cores=1).kind == "threads"

    @pytest.mark.parametrize(
        ("part", "cores", "kind"),
        [
            (0.54, 2, "threads"),
            (0.61, 2, "processes"),
            (0.54, 8, "processes"),
            (0.5, 8, "threads"),
            (0.4, 8, "threads"),
        ],
    )
    def test_threads_that_often_wait_for_each_other_are_not_enough(
        self, part: float, cores: int, kind: str, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Two threads that take 0.61 of the time of one lose a fifth of their throughput; a small
        loss with two threads is a large one with eight."""
        monkeypatch.setattr(workers, "time_of_two_threads", lambda *_: part)
        assert self.choose(noise_transform(), cores=cores).kind == kind

    def test_blocks_only_where_all_of_it_can_be_done_at_once(self) -> None:
        """Images of several shapes do not stack, and a crop that resizes does not work on a block:
        requesting blocks would only read each sample twice."""
        numbers = np.arange(20)
        equal = ArraySource(np.zeros((20, 8, 8, 3), np.uint8), np.zeros(20, np.int64))
        assert fill.gives_blocks(equal, None, numbers)
        assert fill.gives_blocks(equal, Transform(PadAndCrop(8, 1), Flip()), numbers)
        assert not fill.gives_blocks(equal, Transform(RandomResizedCrop(8)), numbers)
        assert not fill.gives_blocks(Unequal(sample_images(20)), None, numbers)

    def test_threads_for_a_transform_that_cannot_be_pickled(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        lock = threading.Lock()

        def hold(image: Pixels) -> Pixels:
            with lock:
                return image

        monkeypatch.setattr(workers, "time_of_two_threads", lambda *_: 1.02)
        transform = Transform(hold, shape=(4, 4, 3))
        crew = self.choose(transform)
        assert (crew.kind, crew.count) == ("threads", 2)
        assert "cannot be sent to processes: TypeError" in crew.why
        with pytest.raises(
            ConfigError, match=r"^hold cannot be sent to worker processes: .*; kind='threads'"
        ):
            next(iter(loader(kind="processes", transform=transform)))

    def test_the_measurement_survives_whatever_a_transform_does(self) -> None:
        def fail(image: Pixels) -> Pixels:
            raise KeyError

        transform = Transform(fail, shape=(4, 4, 3))
        assert (
            workers.time_of_two_threads(Recipe(Singly(sample_images(20)), transform), np.arange(20))
            > 0
        )
        assert (
            workers.time_of_two_threads(
                Recipe(Singly(sample_images(20)), noise_transform()), np.arange(20)
            )
            > 0
        )

    def test_the_measurement_uses_memory_that_was_touched(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Page faults run in parallel, Python code does not.

        Two threads that fill new memory would look faster than they are.
        """
        filled: list[tuple[int, Any]] = []

        def watched(recipe: Recipe, samples: Any, out: Any, draws: Any) -> fill.Rows:
            filled.append((len(samples), out))
            return fill.fill(recipe, samples, out, draws)

        monkeypatch.setattr(workers, "fill", watched)
        monkeypatch.setattr(workers, "_SECONDS", 0.0)
        workers.time_of_two_threads(
            Recipe(Singly(sample_images(20)), noise_transform()), np.arange(20)
        )
        (first, warm), *timed = filled[1:]
        assert first == 4 and [size for size, _ in timed] == [4, 2, 2] * 3
        assert all(np.shares_memory(out, warm) for _, out in timed)

    def test_other_programs_do_not_make_two_threads_look_good(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Time without a core is subtracted for one thread, not for two.

        Here it is more than the whole duration, so the result for one thread is negative.
        """
        recipe, numbers = Recipe(Singly(sample_images(20)), noise_transform()), np.arange(20)
        monkeypatch.setattr(workers, "seconds_in_run_queue", lambda: 1000.0)
        assert workers._seconds(recipe, numbers, None, [slice(0, 4)]) < -900
        assert workers._seconds(recipe, numbers, None, [slice(0, 2), slice(2, 4)]) > 0
        monkeypatch.undo()
        assert 0 <= workers.seconds_in_run_queue() < 1000

    def test_the_measurement_lasts_long_enough(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The time of the first sample does not count: it may open files."""
        sizes: list[int] = []
        monkeypatch.setattr(
            workers, "_seconds", lambda *args: sizes.append(args[3][0].stop) or 0.001
        )
        assert (
            workers._enough(
                Recipe(Singly(sample_images(20)), noise_transform()), np.arange(1000), None
            )
            == workers.ENOUGH
        )
        assert sizes == [1, 4, 8, 16, 32, 64, 128]

    def test_cores_are_shared_between_the_ranks_of_a_host(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(workers.machine, "cpu_quota", lambda: 8.0)
        for allowed, ranks, cores in (
            (8, 1, 8),
            (8, 2, 4),
            (4, 2, 4),
            (8, 3, 2),
            (1, 4, 1),
            (8, 20, 1),
        ):
            monkeypatch.setattr(workers.machine, "allowed_cores", lambda allowed=allowed: allowed)
            assert workers.cores_per_rank(ranks) == cores
