"""Ranks that leave, fail, hang or die: all others hear of it in seconds, and whoever is left can
start again."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from allstep import engine, wire
from allstep.engine import Engine, Kind, Op, Request
from allstep.errors import CommError
from allstep.world import places
from support.hosts import SshHosts
from support.ranks import Ranks, clean_environment, held_port, wait_until


def allreduce(name: str = "allreduce.x", numel: int = 2) -> Request:
    return Request(Kind.ALLREDUCE, name, torch.ones(numel), op=Op.SUM)


def caught(act: Callable[[], Any]) -> tuple[str, str, float]:
    began = time.monotonic()
    with pytest.raises(CommError) as error:
        act()
    return type(error.value).__name__, str(error.value), time.monotonic() - began


def forever(e: Engine, numel: int) -> None:
    while True:
        e.perform(allreduce(numel=numel))


# Leaving


def one_shuts_down(who: int) -> list[Any]:
    e = engine.start()
    assert e.perform(allreduce()).tolist() == [e.world.size] * 2
    if e.world.rank == who:
        e.shutdown()
        assert e.is_stopped and engine.current() is None
        found = []
    else:
        found = [
            caught(lambda: e.perform(allreduce("allreduce.late"))),
            caught(lambda: e.enqueue(allreduce())),
        ]
        assert e.is_stopped and engine.current() is e and e.world.size == 3
        e.shutdown()
    with_new = engine.start()
    assert with_new.perform(allreduce()).tolist() == [3.0, 3.0]
    with_new.perform(Request(Kind.BARRIER))
    with_new.shutdown()
    return found


@pytest.mark.parametrize(("who", "hosts"), [(0, ["a", "b", "b"]), (2, ["a", "a", "a"])])
def test_one_shutdown_stops_all_and_all_can_start_again(
    ranks: Ranks, who: int, hosts: list[str]
) -> None:
    for rank, found in enumerate(ranks(3, one_shuts_down, who, hosts=hosts)):
        assert len(found) == (0 if rank == who else 2)
        for kind, words, seconds in found:
            assert (
                kind == "EngineStopped"
                and f"Horovod has been shut down by rank {who}" in words
                and seconds < 20
            )


def what_was_ready_is_done() -> list[float]:
    """Whoever shuts down has not run away from operations that all had asked for."""
    e = engine.start()
    tensors = [torch.full((50_000,), float(number)) for number in range(20)]
    for number, tensor in enumerate(tensors):
        e.enqueue(Request(Kind.ALLREDUCE, f"allreduce.{number}", tensor, tensor, op=Op.SUM))
    e.perform(Request(Kind.BARRIER))  # by now everything has been asked for
    e.shutdown()
    return [tensor[-1].item() for tensor in tensors]


def test_what_was_ready_is_done(ranks: Ranks) -> None:
    assert ranks(2, what_was_ready_is_done) == [[2.0 * number for number in range(20)]] * 2


SCRIPT = """
import os, sys, torch
from allstep import engine
from allstep.engine import Request, Kind
e = engine.start()
e.perform(Request(Kind.ALLREDUCE, "x", torch.ones(100_000)))
if os.fork() == 0:
    sys.exit(0)
assert os.wait()[1] == 0
e.perform(Request(Kind.ALLREDUCE, "x", torch.ones(100_000)))
if e.world.rank == 1:
    raise ValueError("of my own")
try:
    while True:
        e.perform(Request(Kind.ALLREDUCE, "x", torch.ones(100_000)))
except RuntimeError as error:
    print(type(error).__name__, error)
"""


def run_script(num_ranks: int, script: str) -> list[tuple[int, str]]:
    """Under plain torchrun variables, as a script of its own: how Python itself ends matters here."""
    processes = []
    with held_port() as port:
        for rank in range(num_ranks):
            place = {
                "RANK": rank,
                "WORLD_SIZE": num_ranks,
                "LOCAL_RANK": rank,
                "LOCAL_WORLD_SIZE": num_ranks,
            }
            address = {
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": port,
                "GROUP_RANK": 0,
                "OMP_NUM_THREADS": 1,
            }
            env = {
                **clean_environment(),
                **{name: str(value) for name, value in {**place, **address}.items()},
            }
            command = [sys.executable, "-c", script]
            processes.append(
                subprocess.Popen(
                    command, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
                )
            )
        outputs = [process.communicate(timeout=150)[0] for process in processes]
    return [
        (process.returncode, output) for process, output in zip(processes, outputs, strict=True)
    ]


@pytest.mark.usefixtures("processes")
def test_scripts_that_end_without_a_word() -> None:
    """A forked child ends quietly, a rank with an exception of its own:

    Python tears down what is left, and nobody hangs or crashes.
    """
    (first_code, first), (second_code, second) = run_script(2, SCRIPT)
    assert (first_code, second_code) == (0, 1), (first, second)
    assert first.startswith("EngineStopped Horovod has been shut down by rank 1")
    assert second.endswith("ValueError: of my own\n")


# Dying


def one_is_killed(who: int, numel: int) -> tuple[str, str, float] | None:
    """numel: 0 for one that dies before others have anything to do with it; large for one in the
    middle of an operation."""
    e = engine.start()
    e.perform(allreduce(numel=max(numel, 1)))
    if e.world.rank == who:
        if not numel:
            time.sleep(0.3)
            os.kill(os.getpid(), signal.SIGKILL)
        import threading

        threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGKILL)).start()
        forever(e, numel)
    found = caught(lambda: forever(e, numel or 1))
    assert e.is_stopped
    assert caught(lambda: e.enqueue(allreduce()))[0] == found[0]
    began = time.monotonic()
    e.shutdown()
    assert time.monotonic() - began < 20
    return found


@pytest.mark.soak
@pytest.mark.parametrize(
    ("who", "numel", "hosts"),
    [
        (0, 0, ["a", "a", "a"]),
        (2, 0, ["a", "b", "b"]),
        (0, 4, ["a", "b", "b"]),
        (0, 1_000_000, ["a", "a", "a"]),
        (2, 1_000_000, ["a", "a", "a"]),
        (2, 1_000_000, ["a", "b", "b"]),
    ],
)
def test_one_is_killed(ranks: Ranks, who: int, numel: int, hosts: list[str]) -> None:
    outcomes = ranks.outcomes(3, one_is_killed, who, numel, hosts=hosts)
    assert [outcome.exit_code for outcome in outcomes] == [
        -9 if rank == who else 0 for rank in range(3)
    ], outcomes
    for outcome in outcomes:
        if outcome.rank != who:
            kind, words, seconds = outcome.result
            assert kind == "PeerLost" and f"rank {who}" in words
            assert seconds < 20


def idle_ones_hear_of_it() -> bool:
    """Nobody waits for anything: the engine stops all the same."""
    e = engine.start()
    e.perform(allreduce())
    if e.world.rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    return bool(wait_until(lambda: e.is_stopped))


@pytest.mark.parametrize("hosts", [["a", "a", "a"], ["a", "b", "b"]])
def test_idle_ones_hear_of_it(ranks: Ranks, hosts: list[str]) -> None:
    assert [outcome.result for outcome in ranks.outcomes(3, idle_ones_hear_of_it, hosts=hosts)] == [
        True,
        None,
        True,
    ]


def waiting_outside(how: str) -> tuple[str, str, float] | None:
    """A rank waits in a further group (the optimizer's, say) for one that will not come, because
    its engine has ended."""
    e = engine.start()
    group = e.group("test", 0)
    if e.world.rank == 1:
        if how == "shutdown":
            e.shutdown()
        else:
            e.on_notice("x", lambda number: 1 // 0)
            with pytest.raises(CommError, match="ZeroDivisionError"):
                e.perform(Request(Kind.JOIN))
        wait_until(Path("through").exists, 60)  # alive all the time
        return None
    if how == "error":
        e.notice("x", 1)
    found = caught(lambda: group.allreduce([torch.ones(3)]).wait())
    Path("through").touch()
    return found


@pytest.mark.parametrize(
    ("how", "kind", "words"),
    [("shutdown", "PeerLost", "by rank 1"), ("error", "CommError", "Zero")],
)
def test_nobody_waits_outside_for_one_whose_engine_has_ended(
    ranks: Ranks, how: str, kind: str, words: str
) -> None:
    found, _ = ranks(2, waiting_outside, how)
    assert found[0] == kind and words in found[1] and found[2] < 30


def interrupted_soon(act: Callable[[], None]) -> None:
    import threading

    threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
    act()


def one_is_interrupted() -> tuple[str, str, float] | None:
    """Ctrl-C on one rank, in the middle of an operation that it waits for: the others do not wait
    for it."""
    e = engine.start()
    e.perform(allreduce())
    if e.world.rank == 1:
        with pytest.raises((KeyboardInterrupt, CommError)):
            interrupted_soon(lambda: forever(e, 500_000))
        e.shutdown()
        return None
    found = caught(lambda: forever(e, 500_000))
    e.shutdown()
    return found


def test_one_is_interrupted(ranks: Ranks) -> None:
    signal_from = ranks(3, one_is_interrupted)
    assert signal_from[1] is None
    for kind, words, seconds in (signal_from[0], signal_from[2]):
        assert kind in ("CommError", "EngineStopped", "PeerLost") and seconds < 20, words


def one_hangs() -> float:
    """A rank that is stopped does not keep others from shutting down."""
    e = engine.start()
    e.perform(allreduce())
    if e.world.rank == 0:
        os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(0.2)
    began = time.monotonic()
    e.shutdown()
    seconds = time.monotonic() - began
    os.kill(e._joined.cards[0]["pid"], signal.SIGKILL)
    return seconds


def test_one_hangs(ranks: Ranks) -> None:
    stopped, free = ranks.outcomes(2, one_hangs)
    assert (stopped.exit_code, free.exit_code) == (-9, 0), free
    assert free.result < 30


WORKER = """
import sys, time, torch
from allstep import engine
from allstep.engine import Request, Kind
e = engine.start()
e.perform(Request(Kind.ALLREDUCE, "x", torch.ones(10)))
print("begun", flush=True)
began = time.monotonic()
try:
    while True:
        e.perform(Request(Kind.ALLREDUCE, "x", torch.ones(10)))
except RuntimeError as error:
    print(type(error).__name__, time.monotonic() - began, error, flush=True)
    e.shutdown()
"""


def test_a_cut_cable_between_two_hosts(two_hosts: SshHosts) -> None:
    """Real network namespaces: each side hears of it without a word from the other."""
    token = wire.new_token()
    with wire.Server(token, "") as store:
        common = {
            "ALLSTEP_STORE": f"{two_hosts.gateway}:{store.port}",
            "ALLSTEP_TOKEN": token,
            "OMP_NUM_THREADS": "1",
        }
        common["ALLSTEP_LOST_SECONDS"] = "4"
        processes = [
            subprocess.Popen(
                [*two_hosts.prefix(k), sys.executable, "-c", WORKER],
                env={**clean_environment(), **common, **world.to_env()},
                stdout=subprocess.PIPE,
                text=True,
            )
            for k, world in enumerate(places(["h1", "h2"]))
        ]
        try:
            for process in processes:
                assert process.stdout is not None
                assert process.stdout.readline() == "begun\n"
            time.sleep(0.3)
            two_hosts.cut(1)
            outputs = [process.communicate(timeout=90)[0] for process in processes]
        finally:
            two_hosts.mend(1)
            for process in processes:
                process.kill()
                process.wait()
    for output in outputs:
        kind, seconds = output.split()[:2]
        assert kind == "PeerLost" and float(seconds) < 30, output
