"""Random bytes at the store and at its client: no traceback, no hang, bounded memory, and the
store still serves.

A case is made from a number alone, so a failure is repeated by that number. `make test` runs the
same few thousand cases each time; `make soak` draws new ones for a minute per test.
"""

import os
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from allstep.wire import Client, Server, new_token
from allstep.wire.frames import LENGTH, pack, receive, receive_frame, unpack
from allstep.wire.handshake import NUM_NONCE_BYTES, introduce
from support.ranks import wait_until

TOKEN = new_token()
SOAK = bool(os.environ.get("ALLSTEP_SOAK"))
MB = 1 << 20


def seeds(number: int) -> Iterator[int]:
    """So many fixed seeds; in the soak new ones for a minute."""
    if not SOAK:
        yield from range(number)
        return
    end = time.monotonic() + 60
    while time.monotonic() < end:
        yield random.SystemRandom().getrandbits(64)


def resident_nbytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


Case = Callable[[random.Random, socket.socket], None]


def attack(case: Case, number: int, connect: Callable[[Server], socket.socket]) -> None:
    """Run the cases against one store while a rank uses it; afterwards they must leave nothing."""
    with Server(TOKEN, auth_seconds=600, max_nbytes=8 * MB, max_held=8 * MB) as server:
        rank = Client([("127.0.0.1", server.port)], TOKEN, timeout=60)
        before = resident_nbytes()
        kept: list[socket.socket] = []
        for count, seed in enumerate(seeds(number)):
            rng = random.Random(seed)
            kept.append(sock := connect(server))
            # The server may end the connection at any moment, or not read for a while.
            with suppress(OSError):
                case(rng, sock)
            # Some stay open, so that cases meet each other.
            while len(kept) > 20:
                kept.pop(rng.randrange(len(kept))).close()
            if count % 20 == 0:
                server.set("rank", b"%d" % seed)
                assert rank.get("rank", 60) == b"%d" % seed, f"seed {seed}"
                assert server.failure is None, f"seed {seed}: {server.failure}"
        assert resident_nbytes() - before < 200 * MB
        for sock in kept:
            sock.close()
        wait_until(
            lambda: len(server._connections) == 1 and server._held == 0, 60, "the end of all cases"
        )
        assert len(server._waiting) == 0
        assert server._table._nbytes <= 8 * MB + 1000
        rank.set("last", b"")
        rank.close()
        assert server.failure is None


def as_stranger(server: Server) -> socket.socket:
    return socket.create_connection(("127.0.0.1", server.port), timeout=30)


def as_rank(server: Server) -> socket.socket:
    sock = Client([("127.0.0.1", server.port)], TOKEN, timeout=30)._socket()
    sock.settimeout(0.2)
    return sock


def noise(rng: random.Random) -> bytes:
    """Bytes, or what begins like a frame."""
    size = rng.choice([0, 1, 3, 4, 5, 64, 128, 132, 200, 5000])
    kind = rng.randrange(4)
    if kind == 0:
        return rng.randbytes(size)
    if kind == 1:
        return LENGTH.pack(size) + rng.randbytes(rng.randrange(size + 1))
    if kind == 2:
        return LENGTH.pack(
            rng.choice([0, 4, 128, 129, 64 * MB, 64 * MB + 1, (1 << 32) - 1])
        ) + rng.randbytes(size)
    return b"GET / HTTP/1.1\r\n\r\n" * rng.randrange(1, 20)


def mutated(rng: random.Random, data: bytes) -> bytes:
    """One to three changes: a bit, a cut, something doubled, something put in."""
    for _ in range(rng.randrange(1, 4)):
        at = rng.randrange(len(data) + 1)
        kind = rng.randrange(4)
        if kind == 0 and at < len(data):
            data = data[:at] + bytes([data[at] ^ (1 << rng.randrange(8))]) + data[at + 1 :]
        elif kind == 1:
            data = data[:at] + data[at + rng.randrange(8) :]
        elif kind == 2:
            data = data[:at] + data[max(0, at - rng.randrange(40)) :]
        else:
            data = data[:at] + rng.randbytes(rng.randrange(1, 8)) + data[at:]
    return data


TEXTS = [
    b"",
    b"a",
    b"b",
    b"key",
    b"\xff\xfe",
    b"0",
    b"-1",
    b"9" * 19,
    b"9" * 5000,
    b"1_0",
    b" 1",
    b"x" * 100_000,
]
TIMES = [
    b"0",
    b"0.01",
    b"-5",
    b"1e7",
    b"1e300",
    b"inf",
    b"-inf",
    b"nan",
    b"",
    b"x",
    b"1" * 400,
    b"0x10",
]
OPERATIONS = [
    b"set",
    b"add",
    b"append",
    b"compare_set",
    b"check",
    b"delete",
    b"count",
    b"keys",
    b"get",
    b"wait",
]


def request(rng: random.Random) -> bytes:
    """A frame that is right, or nearly."""
    operation = rng.choice(
        [*OPERATIONS, b"", b"__init__", b"values", b"take_appeared", b"set_by_owner", b"\xff"]
    )
    number = rng.choice([0, 1, 1, 2, 2, 3, 4, 1000])
    fields = [rng.choice(TEXTS[: 4 if number > 4 else None]) for _ in range(number)]
    if operation in (b"get", b"wait"):
        fields[:1] = [rng.choice(TIMES)]
    frame = pack([operation, *fields])
    return mutated(rng, frame) if rng.random() < 0.2 else frame


def send_noise(rng: random.Random, sock: socket.socket) -> None:
    sock.sendall(noise(rng))
    end(rng, sock)


def send_a_mutated_greeting(rng: random.Random, sock: socket.socket) -> None:
    nonce = receive(sock, NUM_NONCE_BYTES)
    near, far = socket.socketpair()
    with near, far:

        class Through(socket.socket):
            """Sends what the client would send into the pair, and names the server's port."""

            def getpeername(self) -> object:
                return sock.getpeername()

        through = Through(fileno=os.dup(near.fileno()))
        with through, suppress(OSError):
            far.sendall(nonce)
            far.shutdown(socket.SHUT_WR)
            introduce(through, TOKEN, 30)
        right = far.recv(1000)
    if rng.random() < 0.1:
        # What is mutated otherwise is right.
        sock.sendall(right)
        assert unpack(receive_frame(sock))[0] == b"ok"
        return
    sock.sendall(mutated(rng, right))
    end(rng, sock)


def send_requests(rng: random.Random, sock: socket.socket) -> None:
    sock.sendall(b"".join(request(rng) for _ in range(rng.choice([1, 1, 5, 50]))))
    if rng.random() < 0.5:
        with suppress(TimeoutError):
            sock.recv(MB)
    end(rng, sock)


def end(rng: random.Random, sock: socket.socket) -> None:
    """Close it, reset it, close one direction, or leave it open."""
    kind = rng.randrange(4)
    if kind == 0:
        sock.close()
    elif kind == 1:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        sock.close()
    elif kind == 2:
        sock.shutdown(socket.SHUT_WR)


@pytest.mark.usefixtures("processes")
@pytest.mark.soak(1)
def test_bytes_of_strangers() -> None:
    attack(send_noise, 2000, as_stranger)


@pytest.mark.usefixtures("processes")
@pytest.mark.soak(1)
def test_mutated_greetings() -> None:
    attack(send_a_mutated_greeting, 2000, as_stranger)


@pytest.mark.usefixtures("processes")
@pytest.mark.soak(1)
def test_requests_of_a_rank_that_went_wrong() -> None:
    attack(send_requests, 500, as_rank)


@pytest.mark.usefixtures("processes")
@pytest.mark.soak(1)
def test_a_client_of_a_store_that_sends_noise() -> None:
    """Each attempt ends with an error that callers expect, in time, and takes no memory that was
    only announced."""
    rng = random.Random()
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def serve() -> None:
            with suppress(OSError):
                while True:
                    sock, _ = listener.accept()
                    with sock, suppress(OSError):
                        sock.sendall(rng.randbytes(rng.choice([0, 5, 32, 32, 32])))
                        sock.sendall(noise(rng))
                        sock.shutdown(socket.SHUT_WR)
                        sock.settimeout(0.05)
                        sock.recv(1000)

        thread = threading.Thread(target=serve)
        thread.start()
        before = resident_nbytes()
        for seed in seeds(40):
            rng.seed(seed)
            with pytest.raises(OSError):
                Client([listener.getsockname()], TOKEN, timeout=0.2)
        assert resident_nbytes() - before < 100 * MB
        listener.shutdown(socket.SHUT_RDWR)
        thread.join(30)
