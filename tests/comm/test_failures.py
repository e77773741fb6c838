"""Ranks that die, stop, hang or are cut off: the others raise, name who it was, and go on.

The ranks are real processes, killed and stopped with real signals; hosts are network namespaces with cables that can be cut.
"""

import json
import os
import random
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import allstep.comm.backend
from allstep import wire
from allstep.comm.failure import Failure, from_json
from allstep.comm.rendezvous import find_store
from allstep.comm.stall import Answer, report
from allstep.errors import CollectiveMismatch, CollectiveTimeout, CommError, PeerLost
from allstep.limits import read_limits
from allstep.world import World, places
from groups import joined
from hosts import SshHosts
from ranks import Ranks, wait_until

GLOO = {"ONLY_GLOO": "1"}
NO_MEMORY_SHARED = [list("abcd"), list("aabb")]


def form(name: str = "test", ranks: list[int] | None = None, **options: Any) -> int:
    """A default group, of some ranks when told; our rank in it."""
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    if os.environ.get("ONLY_GLOO"):
        allstep.comm.backend.join_hosts = lambda *_: None
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
def test_a_killed_rank_is_lost_for_all_others(ranks: Ranks, hosts: str, env: dict[str, str]) -> None:
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

    outcomes = ranks.outcomes(len(hosts), work, hosts=list(hosts), env=env)
    for outcome in outcomes:
        if outcome.rank != victim:
            assert outcome.exit_code == 0, outcomes
            *what, heard, left = outcome.result
            assert what == [PeerLost, victim, outcome.rank, PeerLost, True], outcome.result
            assert heard < 5 and left < 3
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
            wait_until(lambda: sum(sockets.nbytes() for sockets in connections) > before + 1_000_000)
            died_at(time.time())
            os.kill(pids[1], signal.SIGKILL)

        if rank == 1:
            dist.send(tensor, 0) if wait == "recv" else act(tensor)
            time.sleep(60)
        threading.Thread(target=kill).start()
        try:
            act(tensor)
        except RuntimeError as error:  # a future loses the type, and keeps the words
            heard, began = time.time() - died_at(), time.monotonic()
            dist.destroy_process_group()
            return str(error), heard, time.monotonic() - began
        return ()

    text, heard, left = ranks.outcomes(2, work, hosts=["a", "b"])[0].result
    assert "rank 1 is gone (its process ended)" in text
    assert heard < 5 and left < 3


def test_the_error_reaches_a_rank_that_has_nothing_to_do_with_the_dead_one(ranks: Ranks) -> None:
    def work() -> tuple:
        rank = form()
        dist.barrier()
        if rank == 0:
            os._exit(3)
        error = error_of(lambda: dist.recv(torch.ones(3), src=rank - 1))  # 2 waits for 1, and 1 for 0
        return type(error), error.peer, str(error)

    outcomes = ranks.outcomes(3, work, hosts=list("abc"))
    for outcome in outcomes[1:]:
        kind, peer, text = outcome.result
        assert (kind, peer) == (PeerLost, 0)
        assert text.startswith(f"recv(float32 [3], from {outcome.rank - 1}): rank 0 is gone (its process ended)"), text


def test_a_rank_that_has_done_its_part_may_leave(ranks: Ranks) -> None:
    """The others are in an operation that takes longer than a connection may be closed without a word."""

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
    import allstep, allstep.comm.backend
    from allstep.errors import PeerLost

    allstep.comm.backend.join_hosts = lambda *_: None
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


@pytest.mark.parametrize(
    ("deed", "code", "words"),
    [
        ("raise ValueError('spilled')", 1, "rank 1 is gone (it ended with ValueError: spilled)"),
        ("sys.exit(7)", 7, "rank 1 is gone (it has left the group while others need it)"),
    ],
    ids=["exception", "exit"],
)
def test_a_script_that_ends_too_early(tmp_path: Path, deed: str, code: int, words: str) -> None:
    """Real interpreters, with all that happens at their exit; nobody calls `destroy_process_group`."""
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(SCRIPT.format(deed=deed)))
    with wire.Server(token := wire.new_token()) as store:
        env = {**os.environ, "ALLSTEP_STORE": f"127.0.0.1:{store.port}", "ALLSTEP_TOKEN": token, "OMP_NUM_THREADS": "1"}
        processes = [
            subprocess.Popen([sys.executable, script], env={**env, **world.to_env()}, stdout=-1, stderr=-2, text=True)
            for world in places(["a", "b"])
        ]
        outputs = [process.communicate(timeout=40)[0] for process in processes]
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


@pytest.mark.parametrize(
    ("lost", "idle", "limit"), [(10, 0, 20), (3, 6, 12)], ids=["in the middle of a transfer", "idle"]
)
def test_a_cut_cable(two_hosts: SshHosts, tmp_path: Path, lost: float, idle: float, limit: float) -> None:
    script = tmp_path / "script.py"
    script.write_text(textwrap.dedent(CUT.format(idle=idle)))
    with wire.Server(token := wire.new_token(), two_hosts.gateway) as store:
        env = {**os.environ, "ALLSTEP_STORE": f"{two_hosts.gateway}:{store.port}", "ALLSTEP_TOKEN": token}
        env |= {"ALLSTEP_LOST_SECONDS": str(lost), "OMP_NUM_THREADS": "1"}
        processes = [
            subprocess.Popen(
                [*two_hosts.prefix(world.rank), sys.executable, script],
                env={**env, **world.to_env()},
                stdout=-1,
                text=True,
            )
            for world in places(two_hosts.names)
        ]
        try:
            for process in processes:
                assert process.stdout.readline() == "running\n"
            time.sleep(0.2)
            cut = time.time()
            two_hosts.cut(1)
            outputs = [process.communicate(timeout=limit + 10)[0] for process in processes]
        finally:
            two_hosts.mend(1)
            for process in processes:
                process.kill()
    for rank, output in enumerate(outputs):
        when, peer, text = json.loads(output)
        assert peer == 1 - rank and f"rank {1 - rank} is gone (no sign of life for " in text, text
        assert when - cut < limit


# Slow is not dead


@pytest.mark.parametrize(
    ("hosts", "env"), [("aa", {}), ("ab", {}), ("aa", GLOO)], ids=["shared memory", "two hosts", "gloo"]
)
def test_a_stopped_rank_is_not_lost(ranks: Ranks, hosts: str, env: dict[str, str]) -> None:
    def work() -> tuple:
        rank = form()
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
        began = time.monotonic()
        while time.monotonic() - began < 3:
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

    for right, seconds in ranks(2, work, hosts=list(hosts), env={**env, "ALLSTEP_LOST_SECONDS": "2"}):
        assert right and seconds > 3
