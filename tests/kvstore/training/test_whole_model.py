"""Around the steps: weights and state as a whole, averages, claims taken ahead, misuse."""

import contextlib
import copy
import os
import queue
import re
import threading
import time
from typing import Any

import pytest
import torch

from allstep.errors import CollectiveTimeout, ConfigError, UserError
from allstep.kvstore.training import Options
from allstep.parallel.sync_mode import sync_mode
from support.parties import BATCH, Party, missed, named, same
from support.ranks import Ranks, shared_memory_files


@pytest.mark.parametrize("optimizer", ["sgd", "adamw", "lars"])
def test_state_and_weights_are_saved_and_loaded(ranks: Ranks, optimizer: str) -> None:
    """A run that is interrupted, and resumed by rank 0's files, is that of its order logs."""

    def work() -> object:
        party = Party("async", optimizer, width=300)
        party.share()
        first = party.round(0, 48).pushes
        model = copy.deepcopy(party.model.state_dict())
        state = copy.deepcopy(party.made.state_dict())
        party.made.close()
        resumed = Party("async", optimizer, width=300, seed=5)
        shared = resumed.share()
        if shared.rank == 0:
            resumed.model.load_state_dict(model)
        resumed.made.load_state_dict(state)
        shared.publish()
        second = resumed.round(48, 80).pushes
        return first, second, resumed.weights()

    results = ranks(2, work)
    first, second, weights = results[0]
    assert same(results[1][2], weights)
    assert [push.made for push in second] == list(range(1, len(second) + 1))
    alone = Party("async", optimizer, width=300)
    alone.replay(first)
    alone.replay(second)
    assert same(alone.weights(), weights)
    assert shared_memory_files() == []


def test_several_hosts_are_refused(ranks: Ranks) -> None:
    def work() -> None:
        with pytest.raises(
            UserError, match=r"sync=async: the workers are on 2 hosts \(a, b\); exp"
        ):
            Party("async", "sgd").share()

    ranks(2, work, hosts=["a", "b"])


def test_a_closed_party_keeps_weights_and_state(ranks: Ranks) -> None:
    def work() -> bool:
        party = Party("async", "adamw")
        shared = party.share()
        party.round(0, 24)
        before = party.weights()
        party.made.close()
        after = party.weights()
        with pytest.raises(UserError, match="the shared model is closed"):
            party.made.step()
        assert shared.nbytes > 0
        return same(before, after)

    assert ranks(2, work) == [True, True]


def test_tensors_are_averaged_and_numbers_gathered(ranks: Ranks) -> None:
    def work() -> object:
        party = Party("async", "plain")
        shared = party.share()
        found = shared.gather([shared.rank, 0.5])
        assert {rank: each.tolist() for rank, each in found.items()} == {
            rank: [rank, 0.5] for rank in range(3)
        }
        assert [len(each) for each in shared.gather(None).values()] == [0, 0, 0]
        with pytest.raises(UserError, match=r"gather of 65 numbers.*room for 64"):
            shared.gather(torch.zeros(65))
        shared.begin_round(0, 0, BATCH)
        party.model.norm.running_mean.fill_(float(shared.rank))
        point = shared.synchronize([shared.rank])
        assert point is not None
        assert (point.parties, point.lost, point.pushes) == ((0, 1, 2), {}, [])
        return party.model.norm.running_mean.tolist()

    assert ranks(3, work) == [[1.0] * 8] * 3


def test_claims_of_a_loader_thread(ranks: Ranks) -> None:
    """A thread takes claims ahead; one party asks for the end of the round."""

    def work() -> object:
        party = Party("stale:2", "sgd")
        shared = party.share()
        shared.begin_round(0, 600, BATCH)
        ready: queue.Queue[Any] = queue.Queue(4)

        def load() -> None:
            while (claim := shared.claims.next()) is not None:
                ready.put(claim)
            ready.put(None)

        threading.Thread(target=load, daemon=True).start()
        steps = 0
        while (claim := ready.get()) is not None:
            party.step(claim, lambda claim: None)
            steps += 1
            if steps == 10 and shared.rank == 1:
                assert shared.claims.request_stop() < 600
        point = shared.synchronize()
        assert point is not None
        return point.position, missed(point.pushes, point.position), party.weights()

    results = ranks(2, work)
    position, wrong, weights = results[0]
    assert (wrong, 0 < position < 600) == (set(), True)
    assert all(other[0] == position and same(other[2], weights) for other in results)


def test_steps_that_are_skipped(ranks: Ranks) -> None:
    """An overflow drops a step: its samples count as done, and nothing was pushed."""

    def work() -> object:
        party = Party("lazy:2", "plain")
        shared = party.share()
        shared.begin_round(0, 48, BATCH)
        while (claim := shared.claims.next()) is not None:
            if claim.start in (0, 18, 24, 30):
                shared.begin(claim)
                shared.skip()
            else:
                party.step(claim, lambda claim: None)
        point = shared.synchronize()
        assert point is not None
        return {push.start: push.lrs[0] for push in point.pushes}, point.position

    # Blocks of two steps: the first or the last step, both or none is skipped.
    lrs, position = ranks(2, work)[0]
    assert (position, lrs.keys()) == (48, {0, 12, 36})
    assert lrs[0] == pytest.approx(0.1 / 1.06 / 2)
    assert lrs[36] == pytest.approx(0.1 / 1.42)


def test_a_party_that_hangs_blocks_stale_and_is_reported(ranks: Ranks) -> None:
    def work() -> str:
        party = Party("stale:1", "plain")
        shared = party.share()
        shared.begin_round(0, 240, BATCH)
        claim = shared.claims.next()
        assert claim is not None
        shared.begin(claim)
        shared.gather(None)
        if shared.rank == 1:
            # Until rank 0 is done: no gradient.
            while not shared.lost:
                time.sleep(0.05)
                shared.newly_lost()
            return "hung"
        with contextlib.suppress(CollectiveTimeout):
            party.step(claim, lambda claim: None)
            while (claim := shared.claims.next()) is not None:
                party.step(claim, lambda claim: None)
        party.made.close()
        return "ended"

    env = {"ALLSTEP_STALL_SECONDS": "0.3", "ALLSTEP_TIMEOUT": "1.5"}
    outcomes = ranks.outcomes(2, work, env=env)
    assert [each.result for each in outcomes] == ["ended", "hung"], outcomes
    pattern = r"sync=stale:1, push: rank 0 has waited \d s for rank 1"
    assert re.search(pattern, outcomes[0].output)


def test_parties_that_differ(ranks: Ranks) -> None:
    def work() -> str:
        correct = ["none", "lr"][int(os.environ["ALLSTEP_RANK"])]
        with pytest.raises(UserError) as caught:
            Party("async", "plain", more={"correct": correct}).share()
        return str(caught.value)

    for text in ranks(2, work):
        assert "rank 0 has correct=none, rank 1 has correct=lr; all parties train" in text


def test_misuse(ranks: Ranks) -> None:
    def work() -> list[str]:
        party = Party("async", "plain")
        shared = party.share()
        shared.begin_round(0, 60, BATCH)
        found = []

        def note(call: Any) -> None:
            with pytest.raises(UserError) as caught:
                call()
            found.append(str(caught.value))

        note(shared.step)
        claim = shared.claims.next()
        note(shared.synchronize)
        party.step(claim, lambda claim: None)
        note(lambda: shared.begin(claim))
        party.model.first.weight.data = party.model.first.weight.data.clone()
        claim = shared.claims.next()
        note(lambda: party.step(claim, lambda claim: None))
        return found

    no_step, open_claims, used, moved = ranks(1, work)[0]
    assert "no step has begun; call shared.begin(claim)" in no_step
    assert "has taken 1 claims, from position 0" in open_claims
    assert "no open claim from position 0" in used
    assert "parameter 'first.weight' was moved" in moved


@pytest.mark.unit
def test_options() -> None:
    assert Options(sync_mode("lazy:3"), 10).steps == 3
    with pytest.raises(ConfigError, match="sync=local:2: expected one of async, stale"):
        Options(sync_mode("local:2"), 10)
    with pytest.raises(ConfigError, match=r"sync.correct=dealy: unknown.*delay"):
        Options(sync_mode("async"), 10, correct="dealy")
    with pytest.raises(ConfigError, match="epoch_size=0"):
        Options(sync_mode("async"), 0)
    assert named(torch.nn.Linear(1, 1))[0].name == "weight"
