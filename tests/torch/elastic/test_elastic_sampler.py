"""`ElasticSampler` over any sequence of steps, commits, losses and changes of the world: a committed
sample is neither lost nor repeated.

Each rank has a sampler and its handler; the position of a rank is set by the test, and what a
broadcast does is done by hand.
"""

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

from hypothesis import given
from hypothesis import strategies as st

from allstep.torch.elastic import sampler as module
from allstep.torch.elastic.sampler import ElasticSampler
from allstep.torch.elastic.state import SamplerStateHandler


@contextmanager
def at(rank: int, size: int) -> Iterator[None]:
    with patch.object(module, "rank", lambda: rank), patch.object(module, "size", lambda: size):
        yield


class World:
    """The ranks that train one dataset, and the samples that they have processed and committed."""

    def __init__(self, num_samples: int, size: int, batch_size: int, shuffle: bool) -> None:
        self.dataset, self.shuffle, self.batch_size = range(num_samples), shuffle, batch_size
        self.committed: Counter[int] = Counter()
        self.since: Counter[int] = Counter()
        self.handlers = [self.new_worker(rank, size) for rank in range(size)]
        # Ranks at the last step, which repeats samples to give each of them the same number.
        self.num_trained = size
        self.enter()

    def new_worker(self, rank: int, size: int) -> SamplerStateHandler:
        with at(rank, size):
            return SamplerStateHandler(ElasticSampler(self.dataset, self.shuffle, seed=3))

    def enter(self) -> None:
        """Begin to iterate, as a training function does that is called again."""
        self.left = [list(handler.value) for handler in self.handlers]
        assert len({len(each) for each in self.left}) == 1, "ranks have different numbers of steps"

    @property
    def is_over(self) -> bool:
        return not self.left[0]

    def step(self) -> None:
        self.num_trained = len(self.handlers)
        for rank, handler in enumerate(self.handlers):
            batch, self.left[rank] = (
                self.left[rank][: self.batch_size],
                self.left[rank][self.batch_size :],
            )
            self.since.update(batch)
            handler.value.record_batch(0, self.batch_size)

    def commit(self) -> None:
        for handler in self.handlers:
            handler.save()
        self.committed += self.since
        self.since.clear()

    def lose(self, victim: int, size: int) -> None:
        """Return to the last commit on the others; new workers take rank 0's progress."""
        survivors = [each for rank, each in enumerate(self.handlers) if rank != victim]
        for rank, handler in enumerate(survivors):
            # Still in the old world.
            with at(rank, len(self.handlers)):
                handler.restore()
        self.since.clear()
        self.form(survivors, size, syncs=True)

    def change(self, size: int) -> None:
        """Commit, and leave in order; without a new worker the state is not sent."""
        self.commit()
        self.form(self.handlers[:size], size, syncs=size > len(self.handlers))

    def form(self, members: list[SamplerStateHandler], size: int, syncs: bool) -> None:
        joining = [self.new_worker(rank, size) for rank in range(len(members), size)]
        self.handlers = [*members[:size], *joining]
        progress = self.handlers[0].value.state_dict()
        for rank, handler in enumerate(self.handlers):
            with at(rank, size):
                if handler not in joining:
                    handler.reset()
                if syncs:
                    handler.value.load_state_dict(progress)
                    handler.save()
        self.enter()

    def next_epoch(self) -> None:
        for rank, handler in enumerate(self.handlers):
            with at(rank, len(self.handlers)):
                handler.value.set_epoch(handler.value.epoch + 1)
        self.commit()
        self.committed.clear()
        self.enter()


EVENTS = st.lists(
    st.one_of(
        st.just(("step", 0, 0)),
        st.just(("commit", 0, 0)),
        st.tuples(st.just("lose"), st.integers(0, 5), st.integers(1, 6)),
        st.tuples(st.just("change"), st.just(0), st.integers(1, 6)),
    ),
    max_size=40,
)


@given(
    st.integers(0, 60),
    st.integers(2, 5),
    st.integers(1, 7),
    st.booleans(),
    st.lists(EVENTS, max_size=3),
)
def test_a_committed_sample_is_neither_lost_nor_repeated(
    num_samples: int, size: int, batch_size: int, shuffle: bool, epochs: list[list[tuple]]
) -> None:
    world = World(num_samples, size, batch_size, shuffle)
    for events in [*epochs, []]:
        for kind, victim, new_size in events:
            if kind == "step" and not world.is_over:
                world.step()
            elif kind == "commit":
                world.commit()
            elif kind == "lose" and len(world.handlers) > 1:
                world.lose(victim % len(world.handlers), new_size)
            elif kind == "change":
                world.change(new_size)
        while not world.is_over:
            world.step()
        world.commit()
        assert set(world.committed) == set(range(num_samples)), "a sample is lost"
        # The last steps repeat some, so that all ranks have the same number of samples.
        repeated = sum(world.committed.values()) - num_samples
        assert 0 <= repeated < world.num_trained
        world.next_epoch()
