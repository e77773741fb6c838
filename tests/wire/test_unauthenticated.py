"""Connections that never show the token: they cost the store neither time nor file descriptors, and
keep no rank out."""

import select
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

import pytest

from allstep.wire import Client, Server, client, new_token
from allstep.wire.unauthenticated import GRACE_SECONDS, Unauthenticated
from support.ranks import wait_until

TOKEN = new_token()


@contextmanager
def silent_connections(port: int, number: int) -> Iterator[list[socket.socket]]:
    """Connections that never answer the challenge."""
    with ExitStack() as stack:
        yield [
            stack.enter_context(socket.create_connection(("127.0.0.1", port), timeout=60))
            for _ in range(number)
        ]


def is_closed(sock: socket.socket) -> bool:
    """Whether the server has ended the connection; skips what it sent before."""
    while select.select([sock], [], [], 0)[0]:
        try:
            if not sock.recv(4096):
                return True
        except ConnectionResetError:
            return True
    return False


def num_open(strangers: list[socket.socket]) -> int:
    return sum(not is_closed(stranger) for stranger in strangers)


@pytest.mark.usefixtures("processes")
def test_of_80_silent_connections_the_last_64_stay_and_ranks_come_and_work() -> None:
    with Server(TOKEN, auth_seconds=600) as server:
        joined = Client([("127.0.0.1", server.port)], TOKEN, timeout=30)
        with silent_connections(server.port, 80) as strangers:
            wait_until(lambda: num_open(strangers) == 64, 60, "the end of the 16 oldest")
            assert all(is_closed(stranger) for stranger in strangers[:16])
            started = time.monotonic()
            for number in range(50):
                joined.set("k", b"%d" % number)
            assert time.monotonic() - started < 5, "a request takes 0.1 ms"
            new = Client([("127.0.0.1", server.port)], TOKEN, timeout=30)
            assert new.get("k", 30) == b"49"
            new.close()
            wait_until(
                lambda: num_open(strangers) == 63,
                60,
                "the end of the one that made room for the new rank",
            )
        joined.close()


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize(
    "sent",
    [b"", b"\0\0", b"\0\0\0\x20" + b"x" * 31],
    ids=["silent", "half a length", "half a frame"],
)
def test_a_stranger_is_closed_when_its_time_is_up(sent: bytes) -> None:
    with Server(TOKEN, auth_seconds=0.3) as server:
        joined = Client([("127.0.0.1", server.port)], TOKEN, timeout=30)
        with silent_connections(server.port, 1) as [stranger]:
            started = time.monotonic()
            stranger.sendall(sent)
            wait_until(lambda: is_closed(stranger), 30, "the end of the stranger")
            assert time.monotonic() - started > 0.2
        time.sleep(0.5)
        joined.set("k", b"v")
        assert joined.get("k", 30) == b"v", (
            "a rank that has shown the token may be silent for as long as it likes"
        )
        joined.close()


CROWDED = """
import ctypes, resource, sys, time
ctypes.CDLL("libgcc_s.so.1")  # a thread that ends loads it, for which no descriptor would be left
from allstep.wire import Client, Server

server = Server(sys.argv[1], auth_seconds=600)
joined = Client([("127.0.0.1", server.port)], sys.argv[1])
# Room for 20 more descriptors: 80 strangers do not fit, and the limit of 64 does not help.
last = joined._socket().fileno()
resource.setrlimit(resource.RLIMIT_NOFILE, (last + 21, last + 21))
print(server.port, flush=True)
for line in sys.stdin:
    started = time.monotonic()
    for number in range(50):
        joined.set("k", b"%d" % number)
    print(time.monotonic() - started, flush=True)
"""


@pytest.mark.usefixtures("processes")
def test_without_file_descriptors_ranks_work_and_new_ones_come() -> None:
    command = [sys.executable, "-c", CROWDED, TOKEN]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdin and process.stdout
        port = int(process.stdout.readline())
        with silent_connections(port, 80) as strangers:
            wait_until(lambda: num_open(strangers) < 80, 30, "the first stranger that makes room")
            process.stdin.write("go\n")
            process.stdin.flush()
            # A loop that sleeps 50 ms whenever it cannot accept needs 2.5 s or more.
            assert float(process.stdout.readline()) < 2.0
            new = Client([("127.0.0.1", port)], TOKEN, timeout=60)
            assert new.get("k", 30) == b"49"
            new.close()
        process.stdin.close()
        assert process.wait(timeout=60) == 0


@pytest.mark.usefixtures("processes")
def test_a_slow_client_that_had_to_make_room_connects_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It must not take the end of its connection for a wrong token."""
    introduce, strangers = client.introduce, []

    def slow(*arguments: object, **options: object) -> None:
        if not strangers:
            time.sleep(2 * GRACE_SECONDS)
            strangers.append(socket.create_connection(("127.0.0.1", server.port), timeout=30))
            assert strangers[0].recv(32), "the stranger is in, so the client is out"
        return introduce(*arguments, **options)

    monkeypatch.setattr(client, "introduce", slow)
    with Server(TOKEN, auth_seconds=600, max_unauthenticated=1) as server:
        slow = Client([("127.0.0.1", server.port)], TOKEN, timeout=30)
        slow.set("k", b"v")
        slow.close()
        strangers[0].close()


def test_who_makes_room() -> None:
    strangers: Unauthenticated[str] = Unauthenticated(seconds=5.0, max_open=2)
    assert strangers.next_deadline == float("inf")
    assert strangers.replaceable(100.0) is None
    strangers.add("a", 100.0)
    assert not strangers.full
    strangers.add("b", 101.0)
    assert strangers.full
    assert strangers.replaceable(100.0 + GRACE_SECONDS / 2) is None, "its answer may be under way"
    assert strangers.replaceable(100.0 + GRACE_SECONDS * 2) == "a"
    assert strangers.next_deadline == 105.0
    assert strangers.overdue(104.9) == []
    assert strangers.overdue(105.0) == ["a"]
    assert strangers.overdue(106.0) == ["a", "b"]
    strangers.discard("a")
    strangers.discard("a")
    assert strangers.next_deadline == 106.0
