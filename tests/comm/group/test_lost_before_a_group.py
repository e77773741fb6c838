"""A rank that dies before it makes a group that the others make: they notice it at once.

The others wait for it in the group's store, before there are connections that could end.
"""

import os
import signal
import time

import pytest
import torch.distributed as dist

import allstep.comm
from allstep.comm.group.init import group_for, session
from allstep.errors import PeerLost
from support.ranks import Ranks

MAKE = {
    "purpose": lambda: group_for("this test"),
    "torch": lambda: dist.new_group([0, 1, 2]),
    "barrier": lambda: session().join().wait_for_all("this test"),
}


@pytest.mark.parametrize("kind", MAKE)
def test_a_rank_that_dies_before_the_group_is_lost(ranks: Ranks, kind: str) -> None:
    def work() -> tuple[str, int | None, float]:
        world = allstep.comm.init()
        if world.rank == 1:
            time.sleep(0.7)
            os.kill(os.getpid(), signal.SIGKILL)
        began = time.monotonic()
        with pytest.raises(PeerLost) as caught:
            MAKE[kind]()
        return str(caught.value), caught.value.peer, time.monotonic() - began

    first, dead, last = ranks.outcomes(3, work)
    assert (first.exit_code, dead.exit_code, last.exit_code) == (0, -9, 0), first.output
    for text, peer, seconds in (first.result, last.result):
        assert "lost rank 1 (process exited)" in text and peer == 1
        assert seconds < 6


def test_the_ranks_of_a_part_are_found_by_their_place(ranks: Ranks) -> None:
    """Rank 1 is no member: its death does not end the group of the others."""

    def work() -> float:
        world = allstep.comm.init()
        if world.rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(0.5)
        dist.new_group([0, 2], use_local_synchronization=True)
        return 1.0

    first, dead, last = ranks.outcomes(3, work)
    assert (first.exit_code, dead.exit_code, last.exit_code) == (0, -9, 0), first.output


def test_a_rank_that_has_arrived_may_end(ranks: Ranks) -> None:
    """Rank 1 ends as soon as all ranks have arrived, while rank 0 may still read that."""

    def work() -> None:
        world = allstep.comm.init()
        joined = session().join()
        for number in range(20):
            joined.wait_for_all(f"this test {number}")
        if world.rank:
            os._exit(0)

    assert [each.exit_code for each in ranks.outcomes(3, work)] == [0, 0, 0]
