"""Both boards, several ranks in one process: streams that wrap around, messages larger than memory,
slow readers, who is woken when."""

import mmap
import os
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from allstep.engine.board import shared_board
from allstep.engine.board.board import Board
from allstep.engine.board.byte_ring import Frames
from allstep.engine.board.shared_board import SharedBoard, board_sizes
from allstep.engine.board.socket_board import SocketBoard
from allstep.wire.frames import LENGTH
from support.ranks import wait_until

Boards = Callable[[int], list[Board]]


def frame(message: bytes) -> bytes:
    return LENGTH.pack(len(message)) + message


def shared(size: int) -> list[Board]:
    sizes = board_sizes(size)
    view = memoryview(mmap.mmap(-1, sizes.total(1, size)))
    memory = sizes.cut(view, 0, 1, range(size))
    return [SharedBoard(memory, rank, [os.getpid()] * size, 0) for rank in range(size)]


def sockets(size: int) -> list[Board]:
    pairs = {rank: connected_pair() for rank in range(1, size)}
    first = SocketBoard(0, size, {rank: pair[0] for rank, pair in pairs.items()}, 10)
    return [first, *(SocketBoard(rank, size, {0: pair[1]}, 10) for rank, pair in pairs.items())]


def connected_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        ours = socket.create_connection(server.getsockname())
        return ours, server.accept()[0]


@contextmanager
def opened(boards: list[Board]) -> Iterator[list[Board]]:
    yield boards
    for board in boards:
        board.close()


def wait_until_asleep(thread: threading.Thread) -> None:
    """Until it rests in the kernel: twice in a row asleep, without having run in between."""
    before: list[str] = []

    def rests() -> bool:
        nonlocal before
        lines = Path(f"/proc/self/task/{thread.native_id}/status").read_text().splitlines()
        now = [
            line
            for line in lines
            if line.startswith(("State:", "voluntary_ctxt", "nonvoluntary_ctxt"))
        ]
        rested, before = now == before and "(sleeping)" in now[0], now
        time.sleep(0.03)
        return rested

    wait_until(rests, 30, "the thread's sleep")


both = pytest.mark.parametrize("make", [shared, sockets])


@both
def test_messages_of_all_sizes_arrive_in_order(
    make: Boards, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Readers look at random times, so that the ring is empty, half full and full; nothing is lost
    or torn."""
    monkeypatch.setattr(shared_board, "MAILBOX", 64)
    monkeypatch.setattr(shared_board, "LOG", 96)
    rng = random.Random(1)
    messages = [rng.randbytes(rng.choice([0, 1, 7, 40, 63, 64, 65, 300])) for _ in range(300)]
    with opened(make(3)) as boards:
        posted: dict[int, list[bytes]] = {0: [], 1: [], 2: []}
        published: list[list[bytes]] = [[], [], []]

        def look(rank: int) -> None:
            boards[rank].look()
            if rank == 0:
                for sender, message in boards[0].posts():
                    posted[sender].append(message)
            published[rank] += boards[rank].published()

        for message in messages:
            for board in boards:
                board.post(frame(message))
            boards[0].publish([frame(message)])
            look(rng.randrange(3))
        end = time.monotonic() + 50
        while time.monotonic() < end and not all(
            len(got) == 300 for got in (*posted.values(), *published)
        ):
            for rank in range(3):
                look(rank)
        assert posted == {0: messages, 1: messages, 2: messages}
        assert published == [messages] * 3
        assert not any(board.has_work() for board in boards)


@both
def test_a_message_larger_than_all_memory_between_threads(make: Boards) -> None:
    message = random.Random(2).randbytes(3 << 20)
    with opened(make(2)) as (first, second):
        found: list[bytes] = []

        def read() -> None:
            while not found:
                second.look()
                found.extend(second.published())
                second.wait(0.05)

        reader = threading.Thread(target=read)
        reader.start()
        first.publish([frame(message)])
        end = time.monotonic() + 50
        while reader.is_alive() and time.monotonic() < end:
            first.look()
            first.wait(0.05)
        reader.join(10)
        assert found == [message]


@both
def test_a_wait_ends_when_something_comes_and_not_before(make: Boards) -> None:
    with opened(make(2)) as (first, second):
        second.look()
        began = time.monotonic()
        second.wait(0.1)
        assert time.monotonic() - began > 0.09
        second.look()
        timer = threading.Timer(0.05, lambda: first.publish([frame(b"now")]))
        began = time.monotonic()
        timer.start()
        second.wait(50)
        assert 0.04 < time.monotonic() - began < 25
        timer.join()
        second.look()
        assert second.published() == [b"now"]


@both
def test_what_came_between_look_and_wait_is_not_slept_through(make: Boards) -> None:
    with opened(make(2)) as (first, second):
        second.attend()
        second.look()
        first.publish([frame(b"quick")])
        began = time.monotonic()
        second.wait(50)
        assert time.monotonic() - began < 25
        assert second.has_work()


@pytest.mark.usefixtures("processes")
@both
def test_the_thread_sleeps_while_a_caller_drives_and_is_woken_for_what_he_leaves(
    make: Boards,
) -> None:
    with opened(make(2)) as (first, second):
        woken: list[float] = []
        ready, is_enough = threading.Event(), threading.Event()

        def thread() -> None:
            ready.set()
            while not is_enough.is_set():
                second.sleep(50)
                woken.append(time.monotonic())

        second.attend()
        sleeper = threading.Thread(target=thread)
        sleeper.start()
        ready.wait()
        wait_until_asleep(sleeper)
        for _ in range(20):
            first.publish([frame(b"for the caller")])
            time.sleep(0.002)
        assert woken == []
        is_enough.set()
        second.leave()
        sleeper.join(25)
        assert len(woken) == 1
        second.look()
        assert second.published() == [b"for the caller"] * 20


@pytest.mark.usefixtures("processes")
@both
def test_wake_reaches_the_thread_also_while_a_caller_drives(make: Boards) -> None:
    with opened(make(1)) as (alone,):
        alone.attend()
        sleeper = threading.Thread(target=alone.sleep, args=(50,))
        sleeper.start()
        wait_until_asleep(sleeper)
        alone.wake()
        sleeper.join(25)
        assert not sleeper.is_alive()


@pytest.mark.usefixtures("processes")
@both
def test_a_post_of_rank_0_wakes_its_own_thread_unless_he_drives_next(make: Boards) -> None:
    with opened(make(1)) as (alone,):
        sleeper = threading.Thread(target=alone.sleep, args=(50,))
        sleeper.start()
        wait_until_asleep(sleeper)
        alone.post(frame(b"x"), driving=True)
        sleeper.join(0.1)
        assert sleeper.is_alive()
        alone.post(frame(b"y"))
        sleeper.join(25)
        assert not sleeper.is_alive()
        assert alone.posts() == [(0, b"x"), (0, b"y")]


@both
def test_a_board_that_was_closed_is_lost(make: Boards) -> None:
    first, second, third = make(3)
    assert first.lost() is None and second.lost() is None
    third.close()
    first.look()
    assert first.lost() == 2
    first.close()
    second.look()
    assert second.lost() == 0
    second.close()


def test_frames_in_any_pieces() -> None:
    messages = [b"", b"a", b"bc" * 40]
    stream = b"".join(map(frame, messages))
    for size in (1, 2, 3, 5, 50, 500):
        frames = Frames()
        pieces = [stream[at : at + size] for at in range(0, len(stream), size)]
        assert [message for piece in pieces for message in frames.feed(piece)] == messages
