"""Ranks that die, stop, hang or are cut off: the others raise, name who it was, and go on.

The ranks are real processes, killed and stopped with real signals; hosts are network namespaces
with cables that can be cut.
"""

import gc
import itertools
import json
import os
import random
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import allstep.comm.group.backend
from allstep import wire
from allstep.comm.health.failure import Failure, from_json
from allstep.comm.health.stall_inquiry import Answer, report
from allstep.comm.join.rendezvous import find_store
from allstep.errors import CollectiveMismatch, CollectiveTimeout, CommError, PeerLost
from allstep.limits import read_limits
from allstep.world import World, places
from support.hosts import Hosts, SshHosts, why_not
from support.ranks import Ranks, wait_until

GLOO = {"ONLY_GLOO": "1"}
PATIENT = {
    "ALLSTEP_LOST_SECONDS": "60"
}  # with it a loss that is heard of within 15 s was not heard of by silence


def form(name: str = "test", ranks: list[int] | None = None, **options: Any) -> int:
    """A default group, of some ranks when told; our rank in it."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if os.environ.get("ONLY_GLOO"):
        allstep.comm.group.backend.join_hosts = lambda *_: None
    world = World.detect()
    form.meeting = find_store(world, read_limits())  # the store must live as long as torch uses it
    ranks = ranks or list(range(world.size))
    rank = ranks.index(world.rank)
    store = dist.PrefixStore(name, form.meeting.store)
    dist.init_process_group("allstep", store=store, rank=rank, world_size=len(ranks), **options)
    return rank


def error_of(act: Callable[[], Any]) -> CommError:
    """What it raises: it must."""
    try:
        act()
    except CommError as error:
        return error
    raise AssertionError("no error")


def died_at(seconds: float | None = None) -> float:
    """Note or read the time of a death, in a file of this test."""
    file = Path("died")
    if seconds is not None:
        file.write_text(str(seconds))
    return float(file.read_text())


def random_operation(dice: random.Random, size: int) -> None:
    """The same on all ranks when their dice are."""
    numel = dice.choice([1, 1000, 300_000])
    root = dice.randrange(size)
    tensor = torch.ones(numel * size)
    parts = list(tensor.chunk(size))
    dice.choice(
        [
            lambda: dist.all_reduce(tensor),
            lambda: dist.all_reduce(tensor, async_op=True).wait(),
            lambda: dist.broadcast(tensor, root),
            lambda: dist.all_gather(parts, torch.ones(numel)),
            lambda: dist.reduce_scatter_tensor(torch.empty(numel), tensor),
            lambda: dist.all_to_all_single(torch.empty_like(tensor), tensor),
            lambda: dist.reduce(tensor, root),
            dist.barrier,
        ]
    )()


# Death


@pytest.mark.parametrize(
    ("hosts", "env"),
    [("ab", {}), ("abcd", {}), ("aabb", {}), ("aaaa", GLOO)],
    ids=["two hosts", "four hosts", "two by two", "gloo"],
)
@pytest.mark.soak(20)
def test_a_killed_rank_is_lost_for_all_others(
    ranks: Ranks, hosts: str, env: dict[str, str]
) -> None:
    seed, moment = random.randrange(1000), random.random() * 0.3
    victim = random.Random(seed).randrange(len(hosts))

    def work() -> tuple:
        rank, dice = form(), random.Random(seed)
        end = time.monotonic() + moment

        def go_on() -> None:
            while True:
                random_operation(dice, dist.get_world_size())
                if rank == victim and time.monotonic() > end:
                    died_at(time.time())
                    os.kill(os.getpid(), signal.SIGKILL)

        error = error_of(go_on)
        heard = time.time() - died_at()
        again = error_of(lambda: dist.all_reduce(torch.ones(1)))
        began = time.monotonic()
        dist.destroy_process_group()
        left = time.monotonic() - began
        return type(error), error.peer, error.rank, type(again), error.op is not None, heard, left

    outcomes = ranks.outcomes(len(hosts), work, hosts=list(hosts), env={**env, **PATIENT})
    for outcome in outcomes:
        if outcome.rank != victim:
            assert outcome.exit_code == 0, outcomes
            *what, heard, left = outcome.result
            assert what == [PeerLost, victim, outcome.rank, PeerLost, True], outcome.result
            assert heard < 15 and left < 10
    assert outcomes[victim].exit_code == -signal.SIGKILL


WAITS = {
    "broadcast": lambda tensor: dist.broadcast(tensor, 1),
    "future": lambda tensor: dist.broadcast(tensor, 1, async_op=True).get_future().wait(),
    "recv": lambda tensor: dist.recv(tensor, 1),
    "all_reduce": lambda tensor: dist.all_reduce(tensor),
}


@pytest.mark.parametrize("wait", WAITS)
@pytest.mark.soak(10)
def test_a_rank_killed_in_the_middle_of_a_message(ranks: Ranks, wait: str) -> None:
    """Gloo does not wake whoever waits for a message of which a part has come."""
    act = WAITS[wait]

    def work() -> tuple:
        rank = form()
        pids = [None, None]
        dist.all_gather_object(pids, os.getpid())
        tensor = torch.ones(50_000_000)
        connections = [sockets for sockets, _ in dist.group.WORLD.guard._connections]
        before = sum(sockets.nbytes() for sockets in connections)

        def kill() -> None:
            wait_until(
                lambda: sum(sockets.nbytes() for sockets in connections) > before + 1_000_000
            )
            died_at(time.time())
            os.kill(pids[1], signal.SIGKILL)

        if rank == 1:
            dist.send(tensor, 0) if wait == "recv" else act(tensor)
            time.sleep(600)
        threading.Thread(target=kill).start()
        try:
            act(tensor)
        except RuntimeError as error:  # a future loses the type, and keeps the words
            heard, began = time.time() - died_at(), time.monotonic()
            dist.destroy_process_group()
            return str(error), heard, time.monotonic() - began
        return ()

    env = {"ALLSTEP_LOST_SECONDS": "2"}
    text, heard, left = ranks.outcomes(2, work, hosts=["a", "b"], env=env)[0].result
    assert "lost rank 1 (process exited)" in text
    assert heard < 15 and left < 10


def test_the_error_reaches_a_rank_that_has_nothing_to_do_with_the_dead_one(ranks: Ranks) -> None:
    def work() -> tuple:
        rank = form()
        dist.barrier()
        if rank == 0:
            os._exit(3)
        error = error_of(
            lambda: dist.recv(torch.ones(3), src=rank - 1)
        )  # 2 waits for 1, and 1 for 0
        return type(error), error.peer, str(error)

    outcomes = ranks.outcomes(3, work, hosts=list("abc"))
    for outcome in outcomes[1:]:
        kind, peer, text = outcome.result
        assert (kind, peer) == (PeerLost, 0)
        assert text.startswith(
            f"recv(float32 [3], from {outcome.rank - 1}): lost rank 0 (process exited)"
        ), text


def test_a_rank_that_has_done_its_part_may_leave(ranks: Ranks) -> None:
    """The others are in an operation that takes longer than a connection may be closed without a
    word."""

    def work() -> float:
        rank = form()
        dist.barrier()
        tensor = torch.full((3,), float(rank))
        if rank == 1:
            time.sleep(2.5)
            dist.send(tensor, 2)
        if rank == 2:
            dist.recv(tensor, 1)
        dist.destroy_process_group()
        return tensor[0].item()

    assert ranks(3, work, hosts=list("abc"), env={"ALLSTEP_LOST_SECONDS": "2"}) == [0, 1, 1]


SCRIPT = """
    import sys, time
    import torch, torch.distributed as dist
    import allstep, allstep.comm.group.backend
    from allstep.errors import PeerLost

    allstep.comm.group.backend.join_hosts = lambda *_: None
    world = allstep.init()
    dist.barrier()
    if world.rank == 1:
        {deed}
    try:
        dist.all_reduce(torch.ones(1000))
    except PeerLost as error:
        print("lost", error.peer, error)
        raise
"""


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize(
    ("deed", "code", "words"),
    [
        ("raise ValueError('spilled')", 1, "lost rank 1 (exited with ValueError: spilled)"),
        ("sys.exit(7)", 7, "lost rank 1 (left the group while other ranks need it)"),
    ],
    ids=["exception", "exit"],
)
def test_a_script_that_ends_too_early(tmp_path: Path, deed: str, code: int, words: str) -> None:
    """Real interpreters, with all that happens at their exit; nobody calls `destroy_process_group`."""
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SCRIPT.format(deed=deed)))
    with wire.Server(token := wire.new_token()) as store:
        env = {
            **os.environ,
            "ALLSTEP_STORE": f"127.0.0.1:{store.port}",
            "ALLSTEP_TOKEN": token,
            "OMP_NUM_THREADS": "1",
        }
        processes = [
            subprocess.Popen(
                [sys.executable, script],
                env={**env, **world.to_env()},
                stdout=-1,
                stderr=-2,
                text=True,
            )
            for world in places(["a", "b"])
        ]
        outputs = [process.communicate(timeout=120)[0] for process in processes]
    assert [process.returncode for process in processes] == [1, code], outputs
    assert "lost 1 all_reduce(float32 [1000], SUM): " + words in outputs[0], outputs


# Cut cables


CUT = """
    import json, sys, time
    import torch, torch.distributed as dist
    import allstep
    from allstep.errors import PeerLost

    world = allstep.init()
    tensor = torch.ones(10_000_000)
    try:
        for step in range(1000000):
            dist.all_reduce(tensor)
            if step == 3:
                print("running", flush=True)
                if {idle} and world.rank == 1:
                    time.sleep({idle})
    except PeerLost as error:
        print(json.dumps([time.time(), error.peer, str(error)]), flush=True)
"""


def run_and_cut(
    hosts: Hosts, of_rank: list[int], cut: int, script: Path, lost: float, idle: float = 0
) -> list[tuple[float, int, str]]:
    """A rank on host `of_rank[rank]` each; when all are at work host `cut` is cut off.

    Seconds after that, peer and words, by rank.
    """
    script.write_text(textwrap.dedent(CUT.format(idle=idle)))
    with wire.Server(token := wire.new_token(), hosts.gateway) as store:
        env = {
            **os.environ,
            "ALLSTEP_STORE": f"{hosts.gateway}:{store.port}",
            "ALLSTEP_TOKEN": token,
        }
        env |= {"ALLSTEP_LOST_SECONDS": str(lost), "OMP_NUM_THREADS": "1"}
        processes = [
            subprocess.Popen(
                [*hosts.prefix(of_rank[world.rank]), sys.executable, script],
                env={**env, **world.to_env()},
                stdout=-1,
                text=True,
            )
            for world in places([hosts.names[host] for host in of_rank])
        ]
        try:
            for process in processes:
                assert process.stdout.readline() == "running\n"
            time.sleep(0.2)
            began = time.time()
            hosts.cut(cut)
            outputs = [process.communicate(timeout=lost + 60)[0] for process in processes]
        finally:
            hosts.mend(cut)
            for process in processes:
                process.kill()
    found = [json.loads(output) for output in outputs]
    return [(when - began, peer, text) for when, peer, text in found]


@pytest.mark.parametrize(
    ("lost", "idle", "limit"),
    [(10, 0, 30), (2, 3, 20)],
    ids=["in the middle of a transfer", "idle"],
)
def test_a_cut_cable(
    two_hosts: SshHosts, tmp_path: Path, lost: float, idle: float, limit: float
) -> None:
    found = run_and_cut(two_hosts, [0, 1], 1, tmp_path / "script.py", lost, idle)
    for rank, (seconds, peer, text) in enumerate(found):
        assert peer == 1 - rank and f"lost rank {1 - rank} (no sign of life for " in text, text
        assert seconds < limit


@pytest.mark.usefixtures("namespaces")
def test_one_of_three_hosts_is_cut_off(tmp_path: Path) -> None:
    """Two ranks on the first host.

    Those on the same side agree who is gone; the one that is cut off misses the others.
    """
    if reason := why_not():
        pytest.skip(reason)
    hosts = Hosts(["h1", "h2", "h3"])
    try:
        found = run_and_cut(hosts, [0, 0, 1, 2], 2, tmp_path / "script.py", lost=3)
    finally:
        hosts.close()
    for rank, (seconds, peer, text) in enumerate(found):
        assert peer in ([3] if rank < 3 else [0, 1, 2]), (rank, text)
        assert seconds < 20, (rank, text)


# Slow is not dead


@pytest.mark.parametrize(
    ("hosts", "env"),
    [("aa", {}), ("ab", {}), ("aa", GLOO)],
    ids=["shared memory", "two hosts", "gloo"],
)
def test_a_stopped_rank_is_not_lost(ranks: Ranks, hosts: str, env: dict[str, str]) -> None:
    def work() -> tuple:
        rank = form()
        began = time.monotonic()
        pids = [None, None]
        dist.all_gather_object(pids, os.getpid())

        def hold_up() -> None:
            time.sleep(0.05)
            os.kill(pids[1], signal.SIGSTOP)
            time.sleep(3.5)
            os.kill(pids[1], signal.SIGCONT)

        thread = threading.Thread(target=hold_up)
        if rank == 0:
            thread.start()
        while True:
            tensor = torch.arange(5_000_000.0)
            dist.all_reduce(tensor)
            going_on = torch.tensor([float(time.monotonic() - began < 3)])
            dist.broadcast(going_on, 0)
            if not going_on.item():
                break
        if rank == 0:
            thread.join()
        dist.barrier()
        dist.destroy_process_group()
        return bool((tensor == 2 * torch.arange(5_000_000.0)).all()), time.monotonic() - began

    for right, seconds in ranks(
        2, work, hosts=list(hosts), env={**env, "ALLSTEP_LOST_SECONDS": "1"}
    ):
        assert right and seconds > 3.5


# Stalls and time-outs


def validate(until: Callable[[], bool], seconds: float = 0.1) -> None:
    end = time.monotonic() + 60
    while not until() and time.monotonic() < end:
        time.sleep(seconds)  # what the report must show


def reported() -> bool:
    """Whether a rank has printed the report, a while ago: time enough for a second one, if there
    were any."""
    return any(
        STALLED in file.read_text() and file.stat().st_mtime < time.time() - 1.5 for file in OUTPUTS
    )


STALLED = "s in all_reduce(float32 [1000], SUM); rank 2 of 3 has not called it"
OUTPUTS = [Path(f"{rank}.out") for rank in range(3)]


@pytest.mark.parametrize(
    ("hosts", "env"),
    [("aaa", {}), ("aab", {}), ("aaa", GLOO)],
    ids=["shared memory", "two hosts", "gloo"],
)
def test_a_stall_is_reported_once_with_the_stack_of_who_is_missing(
    ranks: Ranks, hosts: str, env: dict[str, str]
) -> None:
    def work() -> list:
        rank = form()
        dist.all_reduce(torch.ones(1))
        tensor = torch.ones(1000)
        if rank == 2:
            validate(reported)
        dist.all_reduce(tensor)
        dist.destroy_process_group()
        return [tensor[0].item()]

    outcomes = ranks.outcomes(
        3, work, hosts=list(hosts), env={**env, "ALLSTEP_STALL_SECONDS": "0.5"}
    )
    assert [outcome.result for outcome in outcomes] == [[3.0]] * 3, "a stall is no error"
    # On a busy machine something else may have stalled for half a second, too.
    reports = [
        part
        for outcome in outcomes
        for part in outcome.output.split("allstep: rank ")[1:]
        if STALLED in part
    ]
    assert len(reports) == 1, outcomes
    _, second, *rest = reports[0].splitlines()
    lines = list(itertools.takewhile(lambda line: line.startswith("    "), rest))
    assert second.startswith(f"  rank 2 on {hosts[2]}: in no collective for ")
    assert "    " + __file__ in lines[-1] and lines[-1].endswith(
        "in validate: time.sleep(seconds)  # what the report must show"
    )
    assert not any("torch/distributed" in line for line in lines)


def let_go_on(pid: int) -> None:
    """When we have reported it."""
    end = time.monotonic() + 60
    while "does not answer (busy" not in OUTPUTS[0].read_text() and time.monotonic() < end:
        time.sleep(0.1)
    os.kill(pid, signal.SIGCONT)


def test_a_rank_that_cannot_answer_is_named_all_the_same(ranks: Ranks) -> None:
    def work() -> None:
        rank = form()
        pids = [None, None]
        dist.all_gather_object(pids, os.getpid())
        if rank == 0:
            os.kill(pids[1], signal.SIGSTOP)
            threading.Thread(target=let_go_on, args=(pids[1],)).start()
        dist.all_reduce(torch.ones(3))
        dist.destroy_process_group()

    outcomes = ranks.outcomes(2, work, hosts=["a", "b"], env={"ALLSTEP_STALL_SECONDS": "0.5"})
    assert [outcome.exit_code for outcome in outcomes] == [0, 0], outcomes
    assert "s in all_reduce(float32 [3], SUM); rank 1 does not answer" in outcomes[0].output
    assert (
        "  rank 1: does not answer (busy in native code, stopped or cut off)" in outcomes[0].output
    )


def test_words_of_a_report() -> None:
    answers = {
        0: Answer("h1", 7, "all_reduce(float32 [1], SUM)", 61.0, []),
        1: Answer("h1", 7, "all_reduce(float32 [1], SUM)", 60.0, ["train.py:3 in step: reduce()"]),
        3: Answer("h2", 6, "", 62.0, ["train.py:88 in validate: loss = model(batch)"]),
    }
    assert report("all_reduce(float32 [1], SUM)", 61.2, 7, 0, answers, [10, 11, 12, 13]) == [
        (
            "rank 10 has waited 61 s in all_reduce(float32 [1], SUM); rank 13 of 4 has not called"
            " it, rank 12 does not answer"
        ),
        "  rank 12: does not answer (busy in native code, stopped or cut off)",
        "  rank 13 on h2: in no collective for 62 s; its stack:",
        "    train.py:88 in validate: loss = model(batch)",
    ]
    assert report("all_reduce(float32 [1], SUM)", 61.2, 7, 0, answers, [0, 1])[:2] == [
        "rank 0 has waited 61 s in all_reduce(float32 [1], SUM); all ranks have called it",
        "  rank 1 on h1: in all_reduce(float32 [1], SUM) for 60 s; its stack:",
    ]


@pytest.mark.parametrize("env", [{}, GLOO], ids=["shared memory", "gloo"])
def test_a_time_out_fails_one_group_and_no_other(ranks: Ranks, env: dict[str, str]) -> None:
    def work() -> tuple:
        rank = form()
        part = dist.new_group([1, 2], timeout=timedelta(seconds=1))
        dist.barrier()
        answer: tuple = ()
        over = Path("over")
        if rank == 1:
            began = time.monotonic()
            error = error_of(lambda: dist.all_reduce(torch.ones(3), group=part))
            answer = (
                type(error),
                error.peer,
                error.rank,
                error.op,
                error.tensor,
                str(error),
                time.monotonic() - began,
            )
            over.touch()
        if rank == 2:
            validate(over.exists)
            # in shared memory rank 1 has done its part: a rank that has not heard of the failure
            # yet can finish
            if not env:
                wait_until(lambda: part.guard.failure)
            again = error_of(lambda: dist.all_reduce(torch.ones(3), group=part))
            answer = type(again), again.peer
        total = torch.ones(3)
        dist.all_reduce(total)
        if rank:
            dist.destroy_process_group(part)
        part = dist.new_group([1, 2], timeout=timedelta(seconds=20))
        if rank:
            dist.all_reduce(total, group=part)
        dist.destroy_process_group()
        return (*answer, total[0].item())

    none, late, missing = ranks(3, work, env=env)
    *attributes, text, seconds, total = late
    assert attributes == [
        CollectiveTimeout,
        2,
        1,
        "all_reduce",
        "float32 [3]",
    ], "ranks as the user counts them"
    assert (
        "rank 2 did not arrive within 1.0 s" in text and "in validate: time.sleep(seconds)" in text
    )
    assert 1 < seconds < 15
    assert missing == (CollectiveTimeout, 2, 6.0)
    assert (none[-1], total) == (3.0, 6.0)


def test_a_time_limit_of_wait_is_the_callers_own(ranks: Ranks) -> None:
    """The operation goes on, and can be waited for again."""

    def work() -> list:
        rank = form()
        tensor = torch.ones(3)
        seen = Path("seen")
        if rank == 1:
            wait_until(seen.exists)
        work = dist.all_reduce(tensor, async_op=True)
        if rank == 0:
            assert type(error_of(lambda: work.wait(timedelta(seconds=0.3)))) is CollectiveTimeout
            assert not work.is_completed()
            seen.touch()
        work.wait()
        dist.destroy_process_group()
        return tensor.tolist()

    assert ranks(2, work, env=GLOO) == [[2.0] * 3] * 2


def test_a_call_can_have_a_time_limit_of_its_own(ranks: Ranks) -> None:
    def work() -> tuple:
        seen = Path("seen")
        if form() == 1:
            wait_until(seen.exists)
            return ()
        error = error_of(
            lambda: dist.group.WORLD.allreduce(
                [torch.ones(3)], dist.ReduceOp.SUM, timedelta(seconds=0.5)
            ).wait()
        )
        seen.touch()
        return (
            type(error),
            error.seconds < 15,
            "not finished within its timeout of 0.5 s" in str(error),
        )

    assert ranks(2, work, env=GLOO)[0] == (CollectiveTimeout, True, True)


def test_a_transfer_may_take_longer_than_the_start(ranks: Ranks) -> None:
    def work() -> float:
        rank = allstep.comm.init().rank
        tensor = torch.full((1,), float(rank))
        if rank == 1:
            time.sleep(5)
            dist.send(tensor, 0)
        else:
            dist.recv(tensor, 1)
        return tensor.item()

    assert ranks(2, work, env={"ALLSTEP_START_TIMEOUT": "4"}) == [1.0, 1.0]


# How a failure travels


def test_a_failure_is_heard_on_the_whole_host_at_once(ranks: Ranks) -> None:
    """Through the board in shared memory: by the sockets it would take more than a second."""

    def work() -> tuple:
        rank = form()
        dist.barrier()
        if rank == 2:
            time.sleep(0.5)
            died_at(time.time())
            dist.group.WORLD.guard.fail(
                Failure("PeerLost", "lost rank 7 (reported by a test)", 7, 2)
            )
        error = error_of(lambda: dist.all_reduce(torch.ones(3)))
        return type(error), error.peer, time.time() - died_at(), str(error)

    slowest = []
    for _ in range(5):
        found = ranks(3, work)
        for rank, (kind, peer, _, text) in enumerate(found):
            assert (kind, peer) == (PeerLost, 7)
            assert ("reported by rank 2" in text) == (rank != 2), text
        slowest.append(max(seconds for _, _, seconds, _ in found))
        if slowest[-1] < 0.9:  # a machine may stand still for a second, but not each time
            return
    pytest.fail(f"heard after {slowest} s")


def test_a_failure_fits_into_any_room() -> None:
    failure = Failure("CollectiveTimeout", 'rank 2 "did" not come\n' + "ä line\n" * 1000, 2, 0)
    assert from_json(failure.to_json()) == failure
    short = failure.to_json(500)
    assert len(short) <= 500 and from_json(short).reason.startswith('rank 2 "did" not come')


@pytest.mark.parametrize(
    ("hosts", "env"), [("aaa", {}), ("aab", {}), ("aaa", GLOO)], ids=["one host", "two", "gloo"]
)
def test_survivors_form_a_new_group_in_the_same_process(
    ranks: Ranks, hosts: str, env: dict[str, str]
) -> None:
    def work() -> list:
        rank = form()
        dist.barrier()
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        assert error_of(lambda: dist.all_reduce(torch.ones(300_000))).peer == 1
        dist.destroy_process_group()
        form("again", [0, 2])
        tensor = torch.ones(300_000)
        for _ in range(3):
            dist.all_reduce(tensor)
        dist.barrier()
        dist.destroy_process_group()
        return [tensor[0].item(), tensor[-1].item()]

    outcomes = ranks.outcomes(3, work, hosts=list(hosts), env=env)
    assert [outcome.result for outcome in outcomes] == [[8.0, 8.0], None, [8.0, 8.0]], outcomes


# Other processes


class Deadly(torch.utils.data.Dataset):
    """The worker that reads it dies."""

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> int:
        os._exit(5)


@pytest.mark.parametrize("way", ["fork", "spawn"])
def test_a_data_loaders_worker_that_dies_is_nobodys_peer(ranks: Ranks, way: str) -> None:
    def work() -> list:
        form()
        dist.barrier()
        loader = torch.utils.data.DataLoader(Deadly(), num_workers=1, multiprocessing_context=way)
        with pytest.raises(RuntimeError, match="DataLoader worker"):
            list(loader)
        tensor = torch.ones(3)
        dist.all_reduce(tensor)
        dist.all_gather_object([None, None], "over Gloo")
        dist.barrier()
        dist.destroy_process_group()
        return tensor.tolist()

    assert ranks(2, work, hosts=["a", "b"]) == [[2.0] * 3] * 2


def test_a_forked_child_does_not_keep_a_dead_rank_alive(ranks: Ranks) -> None:
    """It has copies of all sockets; the connections must end with the rank all the same."""

    def work() -> tuple:
        rank = form()
        dist.barrier()
        if rank == 1:
            if os.fork() == 0:
                time.sleep(60)
                os._exit(0)
            dist.barrier()
            died_at(time.time())
            os.kill(os.getpid(), signal.SIGKILL)
        dist.barrier()
        error = error_of(lambda: dist.all_reduce(torch.ones(3)))
        return error.peer, time.time() - died_at()

    peer, seconds = ranks.outcomes(2, work, env={**GLOO, **PATIENT})[0].result
    assert peer == 1 and seconds < 15


def test_nothing_is_left_open(ranks: Ranks) -> None:
    def use(name: str) -> None:
        form(name)
        dist.all_reduce(torch.ones(3))
        dist.barrier()
        dist.destroy_process_group()
        form.meeting.close()

    def count() -> tuple[int, int]:
        gc.collect()  # takes as long as several groups
        return len(os.listdir("/proc/self/fd")), threading.active_count()

    def work() -> None:
        for number in range(2):
            use(f"first {number}")
        files, threads = count()
        for number in range(20):
            use(f"group {number}")

        def as_before() -> bool:  # a thread that was told to end may need a moment
            files_later, threads_later = count()
            return files_later <= files + 2 and threads_later <= threads + 1

        wait_until(as_before, what="the end of what the groups used")

    ranks(2, work, hosts=["a", "b"])


# Ranks that disagree


@pytest.mark.parametrize(
    ("async_op", "env", "shown"),
    [(False, {}, True), (True, {"ALLSTEP_DEBUG": "1"}, True), (True, {}, False)],
    ids=["waiting", "not waiting, ALLSTEP_DEBUG=1", "not waiting"],
)
def test_a_mismatch_shows_the_lines_of_the_callers(
    ranks: Ranks, async_op: bool, env: dict[str, str], shown: bool
) -> None:
    def work() -> str:
        def ours() -> None:
            work = dist.all_reduce(torch.ones(3), async_op=async_op)  # in ours
            if work is not None:
                work.wait()

        def theirs() -> None:
            work = dist.all_reduce(torch.ones(4), async_op=async_op)  # in theirs
            if work is not None:
                work.wait()

        error = error_of(ours if form() == 0 else theirs)
        assert type(error) is CollectiveMismatch
        dist.barrier()
        dist.destroy_process_group()
        return str(error)

    texts = ranks(2, work, env=env)
    assert texts[0] == texts[1]
    _, first, second = texts[0].splitlines()
    assert first.startswith("  rank 0: all_reduce(float32 [3], SUM)"), texts[0]
    assert second.startswith("  rank 1: all_reduce(float32 [4], SUM)"), texts[0]
    assert [first.endswith("# in ours"), second.endswith("# in theirs")] == [shown, shown], texts[0]
    assert ("test_failures.py" in texts[0]) == shown
