"""The state of a process is one object: closed and opened again, as often as a script likes."""

import gc
import os
import threading

import torch
import torch.distributed as dist

import allstep
from allstep.comm.group.init import Session, at_shutdown, group_for, is_running, session
from support.ranks import Ranks

TIMES = 20


class Closable:
    def __init__(self) -> None:
        self.closed = 0
        at_shutdown(self.close)

    def close(self) -> None:
        self.closed += 1


def again_and_again() -> tuple[list[float], list[int], list[str]]:
    """Sums of each round, open files after each, and threads after the last."""
    sums, files = [], []
    for number in range(TIMES):
        world = allstep.init()
        assert is_running() and allstep.init() == world and os.environ["GLOO_SOCKET_IFNAME"] == "lo"
        closable, forgotten = Closable(), Closable()
        del forgotten
        total, other = torch.tensor([world.rank + 1.0]), torch.tensor([float(number)])
        dist.all_reduce(total)
        group_for("test").allreduce([other]).wait()
        assert group_for("test") is group_for("test")
        sums += [total.item(), other.item()]
        allstep.shutdown()
        allstep.shutdown()
        assert not is_running() and closable.closed == 1
        assert "GLOO_SOCKET_IFNAME" not in os.environ
        gc.collect()
        files.append(len(os.listdir("/proc/self/fd")))
    return (
        sums,
        files,
        [thread.name for thread in threading.enumerate() if "allstep" in thread.name],
    )


def test_comm_is_closed_and_opened_again(ranks: Ranks) -> None:
    for sums, files, threads in ranks(2, again_and_again):
        assert sums == [value for number in range(TIMES) for value in (3.0, 2.0 * number)]
        assert len(set(files[2:])) == 1, files
        assert threads == []


def test_there_is_one_session() -> None:
    assert isinstance(session(), Session) and session() is session()
    assert session().default is None
