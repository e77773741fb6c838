"""One order of lost servers for all workers, also if they find different ones lost at once."""

from concurrent.futures import ThreadPoolExecutor

import pytest
from torch._C._distributed_c10d import HashStore

from allstep.errors import PeerLost
from allstep.kvstore.links.loss_log import LossLog


def test_workers_that_cannot_reach_each_other_agree_on_who_continues() -> None:
    """Each finds the other host's server lost: one of them learns that its own counts as lost."""
    for _ in range(20):
        store = HashStore()
        logs = [LossLog(store, rank, 2, 10) for rank in (0, 1)]
        with ThreadPoolExecutor(2) as pool:
            mine, theirs = pool.map(LossLog.enter, logs, (1, 0))
        # The one that was second reads that its own server is lost, and enters nothing.
        assert mine == theirs and mine in ([0], [1])
        assert store.add("claim/2", 0) == 0


def test_entries_are_read_once_and_written_once() -> None:
    store = HashStore()
    first, second = LossLog(store, 0, 4, 10), LossLog(store, 1, 4, 10)
    assert first.enter(2) == [2] and second.enter(2) == [2]
    assert second.enter(0) == [0] and first.enter(1) == [0, 1]


def test_a_worker_without_the_store_of_the_ranks_does_not_continue() -> None:
    class Away:
        def add(self, key: str, number: int) -> int:
            raise ConnectionError("no route")

    with pytest.raises(PeerLost, match="this host may be the one that is cut off"):
        LossLog(Away(), 0, 2, 1.0).enter(1)  # type: ignore[arg-type]
