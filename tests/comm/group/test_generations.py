"""Workers that lose and gain members while they run: the same processes, other ranks (D14)."""

import os
import signal
import threading
import time

import pytest
import torch
import torch.distributed as dist

from allstep import comm
from allstep.comm.group.init import group_for, requested_changes, session
from allstep.comm.join.membership import Dismissed
from allstep.errors import PeerLost, WorldError
from allstep.wire.keys import change_of
from support.generations import Generations, note, run_generations
from support.ranks import Ranks, describe, wait_until


def sum_of_ones() -> float:
    """Sum a 1 of each rank, on the default group and on another one."""
    ones = torch.ones(1000)
    dist.all_reduce(ones)
    other = torch.ones(3)
    group_for("test").allreduce([other]).wait()
    assert other.tolist() == [ones[0].item()] * 3
    return ones[0].item()


def seen(world: object) -> list[object]:
    """What a worker knows of its world."""
    names = ("ALLSTEP_RANK", "ALLSTEP_SIZE", "RANK", "HOROVOD_RANK", "HOROVOD_SIZE")
    return [
        world.rank,
        world.size,
        world.generation,
        sum_of_ones(),
        *(int(os.environ[n]) for n in names),
    ]


def until_lost() -> None:
    """Sum until a rank is lost."""
    try:
        while True:
            sum_of_ones()
    except PeerLost:
        return


def two_worlds() -> list[object]:
    """Train in a world until it loses a rank, then in the next one."""
    first = seen(comm.init())
    note("formed")
    until_lost()
    return [first, seen(comm.rejoin(updates=7))]


@pytest.mark.parametrize("victim", ["a", "b", "c"])
def test_survivors_continue_in_the_same_processes(ranks: Ranks, victim: str) -> None:
    tickets = ["a", "b", "c"]
    left = [ticket for ticket in tickets if ticket != victim]

    def change(launcher: Generations) -> None:
        launcher.form(tickets)
        launcher.wait_for_notes("formed", tickets)
        launcher.kill(victim)
        launcher.end(f"lost rank {tickets.index(victim)}")
        assert [launcher.wait_for(each)["updates"] for each in left] == [7, 7]
        assert [launcher.asks[each]["generation"] for each in left] == [0, 0]
        launcher.form(left, source=0)

    outcomes = run_generations(ranks, tickets, two_worlds, change)
    assert outcomes.pop(victim).exit_code < 0
    for ticket, outcome in outcomes.items():
        assert outcome.exit_code == 0, describe(outcome)
        old, new = tickets.index(ticket), left.index(ticket)
        assert outcome.result == [
            [old, 3, 0, 3.0, old, 3, old, old, 3],
            [new, 2, 1, 2.0, new, 2, new, new, 2],
        ]


def request_before_the_state() -> list[object]:
    """Return the requests to leave that are known in the first world, and then in the next one."""
    comm.init()
    note("formed")
    # A rank takes long for its state, and nothing listens for requests yet.
    wait_until(requested_changes, 30)
    before = requested_changes()
    comm.rejoin(updates=1)
    return [before, requested_changes()]


def test_a_request_to_leave_stays_until_the_world_is_left(ranks: Ranks) -> None:
    def change(launcher: Generations) -> None:
        launcher.form(["a"])
        launcher.wait_for_notes("formed", ["a"])
        launcher.store.set(change_of(0, 0), b"grow")
        launcher.form(["a"])

    (outcome,) = run_generations(ranks, ["a"], request_before_the_state, change).values()
    assert outcome.exit_code == 0, describe(outcome)
    assert outcome.result == [("grow",), ()]


def one_world() -> list[object]:
    """Return what is seen of the first world that is formed."""
    return seen(comm.init())


def test_a_world_that_ends_while_it_is_formed(ranks: Ranks) -> None:
    """The others get the next one from the same call."""

    def change(launcher: Generations) -> None:
        launcher.wait_for("b")
        launcher.kill("b")
        # The plan names a worker that is dead by now.
        launcher.form(["a", "b", "c"])
        launcher.end("lost rank 1")
        launcher.form(["c", "a"], source=1)

    outcomes = run_generations(ranks, ["a", "b", "c"], one_world, change)
    assert outcomes["b"].exit_code < 0
    for rank, ticket in enumerate(["c", "a"]):
        assert outcomes[ticket].exit_code == 0, describe(outcomes[ticket])
        assert outcomes[ticket].result == [rank, 2, 1, 2.0, rank, 2, rank, rank, 2]


def test_a_rank_that_hangs_while_its_world_is_formed(ranks: Ranks) -> None:
    """The others time out and ask for the next world, all at once, before the launcher ends it."""

    def change(launcher: Generations) -> None:
        pid = launcher.wait_for("b")["card"]["pid"]
        os.kill(pid, signal.SIGSTOP)
        launcher.form(["a", "b", "c"])
        launcher.wait_for("a")
        launcher.wait_for("c")
        launcher.kill("b")
        launcher.form(["c", "a"], source=1)

    outcomes = run_generations(
        ranks, ["a", "b", "c"], one_world, change, env={"ALLSTEP_START_TIMEOUT": "8"}
    )
    assert outcomes["b"].exit_code < 0
    for rank, ticket in enumerate(["c", "a"]):
        assert outcomes[ticket].exit_code == 0, describe(outcomes[ticket])
        assert outcomes[ticket].result == [rank, 2, 1, 2.0, rank, 2, rank, rank, 2]


def blocked_everywhere() -> list[str]:
    """Wait in three threads for a rank that is lost; return how each wait ended."""
    world = comm.init()
    group, ended = group_for("test"), []
    store = session().default.joined.fresh_store("never")  # type: ignore[union-attr]

    def wait(act) -> None:  # type: ignore[no-untyped-def]
        with pytest.raises(PeerLost) as caught:
            act()
        ended.append(str(caught.value))

    waits = [lambda: store.get("x"), lambda: group.allreduce([torch.ones(3)]).wait()]
    threads = [threading.Thread(target=wait, args=(act,)) for act in waits]
    if world.rank == 0:
        for thread in threads:
            thread.start()
        time.sleep(0.1)
        note("blocked")
        began = time.monotonic()
        wait(lambda: dist.all_reduce(torch.ones(3)))
        for thread in threads:
            thread.join(20)
        assert time.monotonic() - began < 5
    else:
        note("blocked")
        time.sleep(60)
    return ended


def group_after_the_end() -> list[str]:
    """Use kept memory for a group that is made after the notice of the end has arrived."""
    comm.init()
    sum_of_ones()
    world = comm.rejoin()
    note("formed")
    if world.rank:
        time.sleep(60)
    guard = dist.group.WORLD.guard  # type: ignore[union-attr]
    while guard.failure is None:
        time.sleep(0.01)
    with pytest.raises(PeerLost) as caught:
        group_for("test").allreduce([torch.ones(3)]).wait()
    return [str(caught.value)]


def test_a_group_that_is_made_after_the_end_fails(ranks: Ranks) -> None:
    """The other rank is alive and does not come: only the notice, which was before, ends it."""

    def change(launcher: Generations) -> None:
        launcher.form(["a", "b"])
        for each in ("a", "b"):
            launcher.wait_for(each)
        launcher.form(["a", "b"])
        launcher.wait_for_notes("formed", ["a", "b"])
        launcher.end("rank 1 has left it")
        launcher.wait_for_exit("a")
        launcher.kill("b")

    outcomes = run_generations(ranks, ["a", "b"], group_after_the_end, change)
    assert outcomes["a"].exit_code == 0, describe(outcomes["a"])
    (reason,) = outcomes["a"].result
    assert "rank 1 has left it" in reason


def test_the_end_of_a_generation_frees_all_threads(ranks: Ranks) -> None:
    """The other rank is alive and stopped: only the launcher's notice ends the waits."""

    def change(launcher: Generations) -> None:
        launcher.form(["a", "b"])
        launcher.wait_for_notes("blocked", ["a", "b"])
        launcher.end("host two left the run")
        launcher.wait_for_exit("a")
        launcher.kill("b")

    outcomes = run_generations(ranks, ["a", "b"], blocked_everywhere, change)
    assert outcomes["a"].exit_code == 0, describe(outcomes["a"])
    assert len(outcomes["a"].result) == 3
    assert all("host two left the run" in text for text in outcomes["a"].result)


def stay_or_leave() -> object:
    """Rejoin until dismissed; return the sizes of all worlds."""
    sizes = [(comm.init().rank, sum_of_ones())]
    try:
        while sizes[-1][1] != 4:
            sizes.append((comm.rejoin(len(sizes)).rank, sum_of_ones()))
    except Dismissed as dismissed:
        return [*sizes, dismissed.reason]
    return sizes


def test_a_world_shrinks_and_grows(ranks: Ranks) -> None:
    """Workers join and leave in order; counters of old members and of new ones agree."""

    def change(launcher: Generations) -> None:
        launcher.form(["a", "b"])
        launcher.form(["a", "b", "c"], source=0)
        launcher.dismiss("b", "host two was removed")
        launcher.form(["c", "a"], source=0)
        launcher.form(["a", "c", "d", "e"], source=0)

    outcomes = run_generations(ranks, list("abcde"), stay_or_leave, change)
    results = {ticket: outcome.result for ticket, outcome in outcomes.items()}
    assert results == {
        "a": [(0, 2.0), (0, 3.0), (1, 2.0), (0, 4.0)],
        "b": [(1, 2.0), (1, 3.0), "host two was removed"],
        "c": [(2, 3.0), (0, 2.0), (1, 4.0)],
        "d": [(2, 4.0)],
        "e": [(3, 4.0)],
    }


def test_a_fixed_world_has_no_next_one() -> None:
    with pytest.raises(WorldError, match="--min-np"):
        comm.rejoin()


def use_old_groups() -> list[str]:
    """A model that was wrapped in generation 0, and a group of it, in generation 1."""
    comm.init()
    pair = dist.new_group([0, 1])
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(2, 1))
    model(torch.ones(1, 2)).sum().backward()
    note("ran")
    try:
        while True:
            dist.all_reduce(torch.ones(1))
    except PeerLost:
        comm.rejoin()
    found = []
    for use in (
        lambda: dist.all_reduce(torch.ones(1), group=pair),
        lambda: dist.barrier(group=pair),
        lambda: model(torch.ones(1, 2)).sum().backward(),
    ):
        try:
            use()
        except Exception as error:
            found.append(f"{type(error).__name__}: {error}")
    again = torch.nn.parallel.DistributedDataParallel(model.module)
    again(torch.ones(1, 2)).sum().backward()
    comm.shutdown()
    return found


def test_groups_of_an_old_generation_name_both_generations(ranks: Ranks) -> None:
    def change(launcher: Generations) -> None:
        launcher.form(["a", "b"])
        launcher.wait_for_notes("ran", ["a", "b"])
        launcher.end("a test")
        launcher.form(["a", "b"])

    outcomes = run_generations(ranks, ["a", "b"], use_old_groups, change)
    for outcome in outcomes.values():
        assert outcome.exit_code == 0, describe(outcome)
        assert len(outcome.result) == 3
        for text in outcome.result:
            assert "generation 0, which has ended; this process is in generation 1" in text
            assert "wrap a model in DistributedDataParallel again" in text
