"""Loading ahead of time: threads end with their loop, and read no more than requested."""

import gc
import os
import signal
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from allstep.data import Loader
from allstep.data.augment.transform import Transform
from allstep.data.loading import fill, prefetch
from allstep.data.loading.batch_memory import Memory
from allstep.data.loading.fill import Recipe
from allstep.data.loading.share import Share, ShareLayout
from allstep.data.order import Span
from allstep.data.sources.source import Sample
from allstep.errors import AllstepError
from support.array_sources import Singly, noise_transform, sample_images
from support.loader_workers import fds, loader, our_threads, until

Pixels = NDArray[np.uint8]
BOTH: Any = pytest.mark.parametrize("kind", ["threads", "processes"])
pytestmark = pytest.mark.usefixtures("nothing_left")


class TestEnds:
    @pytest.mark.usefixtures("processes")
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

    @pytest.mark.usefixtures("processes")
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

    @pytest.mark.usefixtures("processes")
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

    @pytest.mark.usefixtures("processes")
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

    @pytest.mark.usefixtures("processes")
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
