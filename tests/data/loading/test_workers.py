"""The choice of threads or processes for a loader."""

import threading
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from allstep.data import ArraySource
from allstep.data.augment import Flip, PadAndCrop, RandomResizedCrop
from allstep.data.augment.transform import Transform
from allstep.data.loading import fill, workers
from allstep.data.loading.fill import Recipe
from allstep.data.sources.source import Block
from allstep.errors import ConfigError
from support.array_sources import Singly, noise_transform, sample_images
from support.loader_workers import loader

Pixels = NDArray[np.uint8]
pytestmark = pytest.mark.usefixtures("nothing_left")


class Unequal(Singly):
    """A source that returns blocks of one sample only, as if all shapes differed."""

    def block(self, numbers: Any) -> Block | None:
        return (
            Block(np.zeros((1, 4, 4, 3), np.uint8), np.zeros(1, np.int64))
            if len(numbers) == 1
            else None
        )


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
