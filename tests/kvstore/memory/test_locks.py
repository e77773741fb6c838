"""Locks that the kernel frees: robust mutexes, and bytes of a file where these do not exist."""

import errno
import mmap
import os
import re
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

import allstep.kvstore
from allstep.errors import CollectiveTimeout
from allstep.kvstore.memory.byte_locks import ByteLock, new_lock_file
from allstep.kvstore.memory.robust_mutex import MUTEX_BYTES, RobustMutex, library
from allstep.kvstore.memory.slice_locks import Lock, ThreadLock
from allstep.process.futex import address_of
from support.ranks import Ranks

_memory = memoryview(mmap.mmap(-1, 4096))


def new_mutex() -> RobustMutex:
    mutex = RobustMutex(address_of(_memory))
    mutex.make()
    return mutex


def new_byte_lock() -> ByteLock:
    fd, _ = new_lock_file()
    return ByteLock(fd, 3)


LOCKS = pytest.mark.parametrize("make", [new_mutex, new_byte_lock])


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize("make", [new_mutex, new_byte_lock, ThreadLock])
def test_threads_exclude_each_other(make: Callable[[], Lock]) -> None:
    lock, found, was_refused = make(), [], threading.Event()
    assert lock.acquire()

    def second() -> None:
        found.append(lock.acquire())
        found.append(lock.acquire(0.05))
        was_refused.set()
        found.append(lock.acquire(60))
        lock.release()

    thread = threading.Thread(target=second)
    thread.start()
    was_refused.wait()
    lock.release()
    thread.join()
    assert found == [False, False, True]
    assert lock.acquire()
    lock.release()


def child_that_holds(lock: Lock, then: Callable[[], None]) -> int:
    """Fork a process that takes the lock and calls `then`; return its pid once it has the lock."""
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(reading)
        assert lock.acquire()
        os.write(writing, b"x")
        then()
        os._exit(0)
    os.close(writing)
    assert os.read(reading, 1) == b"x"
    os.close(reading)
    return pid


@pytest.mark.usefixtures("processes")
@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
@LOCKS
def test_the_lock_of_a_killed_process_is_free(make: Callable[[], Lock]) -> None:
    lock = make()
    for _ in range(3):
        pid = child_that_holds(lock, lambda: time.sleep(60))
        assert not lock.acquire(0.05)
        os.kill(pid, signal.SIGKILL)
        assert lock.acquire(20)
        lock.release()
        os.waitpid(pid, 0)


@pytest.mark.usefixtures("processes")
@pytest.mark.filterwarnings("ignore:.*multi-threaded, use of fork:DeprecationWarning")
@LOCKS
def test_a_forked_child_that_outlives_its_parent_holds_no_lock(make: Callable[[], Lock]) -> None:
    """As a worker process of a DataLoader does; locks of an open file description would stay."""
    lock = make()
    reading, writing = os.pipe()

    def fork_and_die() -> None:
        if (child := os.fork()) == 0:
            time.sleep(60)
            os._exit(0)
        os.write(writing, str(child).encode())
        os.kill(os.getpid(), signal.SIGKILL)

    pid = child_that_holds(lock, fork_and_die)
    os.waitpid(pid, 0)
    grandchild = int(os.read(reading, 20))
    try:
        began = time.monotonic()
        assert lock.acquire(20)
        lock.release()
        assert time.monotonic() - began < 10
        # It still lives.
        os.kill(grandchild, 0)
    finally:
        os.kill(grandchild, signal.SIGKILL)
        os.close(reading)
        os.close(writing)


def test_wrong_use_of_a_mutex_is_an_error() -> None:
    mutex = new_mutex()
    with pytest.raises(OSError) as caught:
        mutex.release()
    assert caught.value.errno == errno.EPERM
    assert mutex.acquire()
    with pytest.raises(OSError) as caught:
        mutex.acquire(1.0)
    assert caught.value.errno == errno.EDEADLK
    mutex.release()


def test_the_library_is_that_of_this_process() -> None:
    assert library() == library() != ""
    assert MUTEX_BYTES % 8 == 0


def use_byte_locks() -> None:
    """Let this process find no robust mutexes."""
    from allstep.kvstore.memory import slice_locks

    slice_locks.library = lambda: ""


def test_one_worker_without_mutexes_lets_all_use_byte_locks(ranks: Ranks) -> None:
    def work() -> tuple[str, float]:
        if os.environ["ALLSTEP_RANK"] == "1":
            use_byte_locks()
        with allstep.kvstore.create("dist_async") as kv:
            kv.init("w", torch.zeros(600_000))
            kv.set_optimizer(torch.optim.SGD, lr=1.0)
            out, gradient = torch.empty(600_000), torch.full((600_000,), -1.0)
            for _ in range(20):
                kv.pushpull("w", gradient, out=out)
                assert (out == out[0]).all()
            kv.barrier()
            kv.pull("w", out=out)
            (lock,) = {type(each._lock).__name__ for each in kv._values.keys["w"].slices}
            return lock, out[0].item()

    assert ranks(3, work) == [("ByteLock", 60.0)] * 3


@pytest.mark.parametrize("kind", ["mutex", "bytes"])
def test_a_worker_that_hangs_with_a_lock_is_reported(ranks: Ranks, kind: str) -> None:
    def work() -> str:
        if kind == "bytes":
            use_byte_locks()
        kv: Any = allstep.kvstore.create("dist_async")
        kv.init("w", torch.zeros(3))
        stored, parties = kv._values.keys["w"], kv._values.parties
        if kv.rank == 1:
            with kv._values.locked(stored):
                kv.barrier()
                kv.barrier()
            return ""
        kv.barrier()
        usual = parties.limits
        parties.limits = usual._replace(stall=0.3, timeout=1.0)
        with pytest.raises(CollectiveTimeout) as caught:
            kv.pull("w", out=torch.empty(3))
        parties.limits = usual
        assert caught.value.peer == 1
        kv.barrier()
        return str(caught.value)

    first, second = ranks.outcomes(2, work)
    assert (first.exit_code, second.exit_code) == (0, 0), first.output + second.output
    expected = r"pull of key 'w': rank 0 waited \d+\.\d s for rank 1, which holds slice 0"
    assert re.match(expected, first.result), first.result
    assert first.output.count("allstep: pull of key 'w': rank 0 has waited ") == 1
