"""Worker processes of the loader: the same images, errors, and their end."""

import os
import select
import signal
import subprocess
import sys
import textwrap
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from allstep.data import Cutmix, Loader, Mixup
from allstep.data.augment.transform import Transform
from allstep.data.loading import fill, pipeline, prefetch, process_workers, workers
from allstep.data.loading.batch_memory import Memory, SharedBuffer
from allstep.data.loading.fill import Recipe, Stopped
from allstep.data.loading.process_workers import Processes
from allstep.data.loading.share import Share, ShareLayout
from allstep.data.order import Span
from allstep.data.sources.source import Sample
from allstep.errors import AllstepError
from allstep.world import places
from support.array_sources import Arrays, Singly, Unwilling, noise_transform, sample_images
from support.loader_workers import children, loader, our_threads, seen, until

Pixels = NDArray[np.uint8]
BOTH: Any = pytest.mark.parametrize("kind", ["threads", "processes"])
pytestmark = pytest.mark.usefixtures("nothing_left")


def ignores(pid: int, number: int) -> bool:
    """Return whether a process ignores a signal."""
    status = Path(f"/proc/{pid}/status").read_text()
    (mask,) = [line.split()[1] for line in status.splitlines() if line.startswith("SigIgn")]
    return bool(int(mask, 16) >> (number - 1) & 1)


class TestProcesses:
    @pytest.mark.usefixtures("processes")
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

    @pytest.mark.usefixtures("processes")
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

    @pytest.mark.usefixtures("processes")
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

    @pytest.mark.usefixtures("processes")
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

    @pytest.mark.usefixtures("processes")
    def test_signals_of_a_queue_system_do_not_end_them(self) -> None:
        """Slurm sends a signal to all processes of a run; the run saves, for which it may need them."""
        ours = loader(n=200, kind="processes")
        batches = iter(ours)
        next(batches)
        # Another process may have read the first batch while this one was starting.
        until(lambda: ignores(children()[0], signal.SIGUSR1))
        for number in (signal.SIGTERM, signal.SIGUSR1):
            os.kill(children()[0], number)
        assert len(list(batches)) == 19
        ours.close()

    @pytest.mark.usefixtures("processes")
    def test_a_break_leaves_them_for_the_next_loop(self) -> None:
        ours = loader(n=200, kind="processes")
        for _ in range(5):
            next(iter(ours))
        assert ours.position == 50
        assert len(children()) == 2
        ours.close()

    @pytest.mark.usefixtures("processes")
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

    @pytest.mark.usefixtures("processes")
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

    @pytest.mark.usefixtures("processes")
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

    @pytest.mark.usefixtures("processes")
    @pytest.mark.parametrize(("room", "unanswered"), [(1 << 15, 2), (0, 1)])
    def test_it_has_the_next_chunk_before_it_replies_to_the_last(
        self, room: int, unanswered: int, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A request too long for the socket's buffer waits: otherwise both sides could wait for the
        other to read."""
        monkeypatch.setattr(process_workers, "_ROOM", room)
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
        made = pipeline.Machinery(recipe, crew, None, ahead, pin=False).layout(share).chunk_size
        assert made == chunk
        assert made == 1 or (ahead + 1) * -(-share // made) >= (process_workers.DEPTH + 1) * count

    @pytest.mark.usefixtures("processes")
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

    @pytest.mark.usefixtures("processes")
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

    @pytest.mark.usefixtures("processes")
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
            # A function of __main__, in a script without a guard.
            def slow(image):
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
    @pytest.mark.usefixtures("processes")
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

    @pytest.mark.usefixtures("processes")
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

    @pytest.mark.usefixtures("processes")
    def test_a_source_that_cannot_be_opened_over_there(self) -> None:
        ours = Loader(
            Unwilling(sample_images(20)), noise_transform(), batch=10, workers=1, kind="processes"
        )
        with pytest.raises(OSError, match="not on this host"):
            next(iter(ours))
        ours.close()
