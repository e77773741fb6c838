"""Which copy a server continues from: threads call what links would."""

import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from allstep.errors import PeerLost
from allstep.kvstore.rules.offers import NONE, Offer
from allstep.kvstore.serving import takeovers as module
from allstep.kvstore.serving.party_calls import PartyCalls
from allstep.kvstore.serving.takeovers import Takeovers


class Offers:
    def __init__(self, num_parties: int) -> None:
        self.calls = PartyCalls(num_parties, lambda: None)
        self.takeovers = Takeovers(self.calls)
        self.lines: list[Any] = []

    def offer(self, party: int, **offers: tuple[int, int, int]) -> Any:
        given = {int(name[1:]): Offer(*each) for name, each in offers.items()}
        return self.takeovers.offer(party, given, lambda *line: self.lines.append(line))


def test_each_part_comes_from_its_freshest_copy() -> None:
    offers = Offers(3)
    with ThreadPoolExecutor(3) as pool:
        first = pool.submit(offers.offer, 0, p4=(0, 7, 3), p5=(0, 9, 3))
        second = pool.submit(offers.offer, 1, p4=(0, 8, 3), p5=(0, 8, 4))
        third = pool.submit(offers.offer, 2, p4=(0, NONE, 4), p5=(0, NONE, 4))
        found = [each.result(10) for each in (first, second, third)]
    assert found == [([5], []), ([4], []), ([], [])]
    ((numbers, ranks, most),) = offers.lines
    assert (sorted(numbers), ranks, most) == ([4, 5], {0, 1}, 2)
    # Later: the decision stays.
    assert offers.offer(2, p4=(0, 99, 0)) == ([], [])


def test_a_party_that_computes_for_long_holds_up_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "WINDOW_SECONDS", 0.05)
    offers = Offers(2)
    assert offers.offer(0, p1=(0, 7, 3)) == ([1], [])
    # Its copy would have been fresher.
    assert offers.offer(1, p1=(0, 8, 3)) == ([], [])
    assert len(offers.lines) == 1


def test_a_lost_party_is_not_waited_for() -> None:
    offers = Offers(2)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(offers.offer, 0, p1=(0, NONE, 3))
        offers.calls.leave(1, "its link has ended")
        assert waiting.result(10) == ([], [1]), "there is no copy"
    with pytest.raises(PeerLost, match="freshest copy"):
        offers.takeovers.wait_for(1)


def test_calls_wait_for_the_value_or_for_the_loss_of_its_party() -> None:
    offers = Offers(2)
    offers.takeovers.wait_for(1)  # no part of a lost server
    with ThreadPoolExecutor(2) as pool:
        for party in (0, 1):
            pool.submit(offers.offer, party, p1=(0, 7 + party, 3), p2=(0, 7 + party, 3))
        pool.shutdown(wait=True)
    done = threading.Event()

    def wait() -> None:
        offers.takeovers.wait_for(1)
        done.set()

    thread = threading.Thread(target=wait, daemon=True)
    thread.start()
    assert not done.wait(0.05)
    offers.takeovers.arrived(1)
    assert done.wait(10)
    thread.join()
    offers.calls.leave(1, "its link has ended")
    with pytest.raises(PeerLost, match="so is the worker with the freshest copy"):
        offers.takeovers.wait_for(2)
