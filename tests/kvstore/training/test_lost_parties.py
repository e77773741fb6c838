"""kill -9 of parties: the others continue, each sample counts once, torn pushes are known."""

import os
import random
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from allstep.comm.group.init import session
from allstep.kvstore.memory import slice_locks
from allstep.kvstore.training import Claim, Push, shared_model
from support.parties import EPOCH, Party, missed, same
from support.ranks import Ranks, shared_memory_files

KILLED = -signal.SIGKILL


def pids() -> dict[int, int]:
    """The processes of the other ranks."""
    joined = session().join()
    session().part()
    return joined.neighbours


def replay_ends_at(options: dict[str, Any], pushes: list[Push], weights: Any) -> bool:
    """Whether replay equals the run, or stops at the first torn push; elastic has no replay."""
    if options.get("sync", "").startswith("elastic"):
        return True
    torn = [push for push in pushes if push.is_torn]
    alone = Party(**options)
    found = alone.replay(pushes)
    return found == torn[0] if torn else found is None and same(alone.weights(), weights)


def check(first: Any, killed: list[Any], options: dict[str, Any]) -> list[Push]:
    """Check a run in which all parties but the first were killed; return its order log."""
    output = first.output + "".join(each.output for each in killed)
    assert first.exit_code == 0, output
    assert [each.exit_code for each in killed] == [KILLED] * len(killed), output
    pushes, position, lost, weights = first.result
    assert set(lost) == set(range(1, len(killed) + 1))
    assert missed(pushes, position) == set()
    assert sum(push.is_torn for push in pushes) <= len(killed)
    assert all(each.isfinite().all() for each in weights.values())
    assert replay_ends_at(options, pushes, weights)
    assert shared_memory_files() == []
    return pushes


def train_until_alone(party: Party, before: Callable[[Claim], None]) -> object:
    """Train rounds until one party is left; return order log, position, lost parties, weights."""
    lost, pushes, position = dict[int, str](), list[Push](), 0
    while len(party.shared.living) > 1 or position < 3 * EPOCH:
        point = party.round(position, position + 44, before)
        position = point.position
        lost, pushes = lost | point.lost, pushes + point.pushes
    return pushes, position, lost, party.weights()


@pytest.mark.soak(10)
@pytest.mark.parametrize("sync", ["async", "stale:2", "lazy:2", "clock:3", "elastic:2"])
def test_parties_killed_at_random_times(ranks: Ranks, sync: str, soak_round: int) -> None:
    """Rank 0 kills five others, one after the other, while all of them push."""
    options = {"sync": sync, "optimizer": "sgd", "width": 1200, "ahead": 2}

    def work() -> object:
        draws = random.Random(f"{soak_round} {sync}")
        party = Party(**options)
        others = pids() if party.share().rank == 0 else {}
        times = sorted(draws.uniform(0.02, 0.6) for _ in others)
        began = time.monotonic()

        def kill(claim: Claim) -> None:
            while times and time.monotonic() - began > times[0]:
                times.pop(0)
                os.kill(others.popitem()[1], signal.SIGKILL)

        return train_until_alone(party, kill)

    check(*_split(ranks.outcomes(6, work, timeout=120)), options)


def _split(outcomes: list[Any]) -> tuple[Any, list[Any]]:
    return outcomes[0], outcomes[1:]


def die_at_line(number: int) -> None:
    """Kill this process before the `number`th line that it executes in the store's code."""
    left = number

    def trace(frame: Any, event: str, arg: object) -> Any:
        nonlocal left
        if "allstep/kvstore" not in frame.f_code.co_filename:
            return None
        left -= event == "line"
        if left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        return trace

    sys.settrace(trace)


@pytest.mark.soak(40)
def test_parties_killed_at_random_lines(ranks: Ranks, soak_round: int) -> None:
    """Five parties, each killed before some line of a push or of taking a claim."""
    sync = ["async", "stale:1", "lazy:2"][soak_round % 3]
    options = {"sync": sync, "optimizer": "sgd", "width": 1200}

    def work() -> object:
        party = Party(**options)
        rank = party.share().rank
        draws = random.Random(f"{soak_round} {rank}")
        left = 1 + rank

        def trace_later(claim: Claim) -> None:
            nonlocal left
            left -= 1
            if rank and left == 0:
                # A step of such a model executes about 600 lines.
                die_at_line(draws.randrange(1, 1200))

        return train_until_alone(party, trace_later)

    check(*_split(ranks.outcomes(6, work, timeout=120)), options)


@pytest.mark.parametrize("kind", ["mutex", "bytes"])
def test_a_torn_push(ranks: Ranks, kind: str) -> None:
    """Rank 1 is killed in the middle of unit 1 of 3, and its forked child lives on."""
    options = {"optimizer": "sgd", "width": 1200}

    def work() -> object:
        if kind == "bytes":
            slice_locks.library = lambda: ""
        party = Party(**options)
        shared = party.share()
        apply, steps = shared._copy.apply, []

        def apply_half(index: int, delay: float) -> None:
            if shared.rank == 1 and len(steps) == 3 and index == 1:
                unit = shared._copy.layout.units[1]
                shared._copy.present[0][unit.start : (unit.start + unit.end) // 2] += 1
                if os.fork() == 0:
                    time.sleep(60)
                    os._exit(0)
                os.kill(os.getpid(), signal.SIGKILL)
            apply(index, delay)

        shared._copy.apply = apply_half

        def pace(claim: Claim) -> None:
            steps.append(claim)
            # Rank 0 leaves claims to rank 1.
            time.sleep(0.03 if shared.rank == 0 else 0)

        return train_until_alone(party, pace)

    pushes = check(*_split(ranks.outcomes(2, work, timeout=120)), options)
    (torn,) = [push for push in pushes if push.is_torn]
    assert torn.party == 1
    again = [push for push in pushes if push.start == torn.start and not push.is_torn]
    assert [(push.party, push.count) for push in again] == [(0, torn.count)]
    assert again[0].made > torn.made


@pytest.mark.parametrize("what", ["weights", "state"])
def test_a_leader_that_dies_while_it_publishes(ranks: Ranks, what: str) -> None:
    """Rank 0 is killed with half of its values written; the others take those of rank 1."""

    def work() -> object:
        party = Party(optimizer="sgd", width=1200)
        shared = party.share()
        party.round(0, 24)
        rank, given = shared.rank, {}
        with torch.no_grad():
            for each in party.model.parameters():
                each.fill_(10.0 + rank)
                given[each] = {"momentum_buffer": torch.full_like(each, 20.0 + rank)}

        def write_half() -> None:
            updates = shared._copy.updates
            flats = shared._copy.present
            values = flats if what == "weights" else [updates.states[0][0].views[0]]
            for each in values:
                each[: len(each) // 2] = 99.0
            os.kill(os.getpid(), signal.SIGKILL)

        if rank == 0:
            shared._copy.put = write_half
            shared_model.put_state = lambda *_: write_half()
        shared.publish() if what == "weights" else shared.take_state(given)
        values = {
            name: each.unique().tolist()
            for name, each in party.weights().items()
            if ("momentum" in name) == (what == "state")
        }
        return shared.living, values

    killed, *others = ranks.outcomes(3, work, timeout=60)
    assert killed.exit_code == KILLED, killed.output
    for each in others:
        assert each.exit_code == 0, each.output
        living, values = each.result
        assert living == (1, 2)
        assert set(map(tuple, values.values())) == {(11.0,) if what == "weights" else (21.0,)}
