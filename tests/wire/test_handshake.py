"""Both sides prove the token: forged stores, and reflected, replayed or relayed proofs."""

import os
import pickle
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from allstep.wire import Client, Server, new_token
from allstep.wire.frames import LENGTH, pack, receive, receive_frame, unpack
from allstep.wire.handshake import NUM_NONCE_BYTES, Challenge, introduce

TOKEN = new_token()
OK = pack([b"ok"])

Answer = Callable[[bytes], bytes]


class Forged:
    """A process that pretends to be the store: what it got behind the greeting is in `got`."""

    def __init__(self, answer: Answer, requests: Answer = lambda _: OK) -> None:
        self.answer, self.requests = answer, requests
        self.got: list[bytes] = []
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.port = self.listener.getsockname()[1]
        self.thread = threading.Thread(target=self.serve, daemon=True)
        self.thread.start()

    def serve(self) -> None:
        with suppress(OSError):
            while True:
                sock, _ = self.listener.accept()
                with sock, suppress(OSError):
                    sock.settimeout(30)
                    sock.sendall(b"n" * NUM_NONCE_BYTES)
                    sock.sendall(self.answer(receive_frame(sock)))
                    while True:
                        self.got.append(receive_frame(sock))
                        sock.sendall(self.requests(self.got[-1]))

    def close(self) -> None:
        self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()
        self.thread.join(30)


@contextmanager
def forged(answer: Answer, requests: Answer = lambda _: OK) -> Iterator[Forged]:
    store = Forged(answer, requests)
    try:
        yield store
    finally:
        store.close()


def reflected(hello: bytes) -> bytes:
    """The client's own proof, in place of the server's."""
    return pack([b"ok", unpack(hello)[-1]])


def with_another_token(hello: bytes) -> bytes:
    return pack([b"ok", os.urandom(32)])


def recorded(_: bytes) -> bytes:
    """A server's proof that was right on another connection."""
    with Server(TOKEN) as server, socket.create_connection(("127.0.0.1", server.port)) as sock:
        challenge = Challenge(TOKEN, server.port)
        challenge.nonce = receive(sock, NUM_NONCE_BYTES)
        sock.sendall(greeting(challenge.nonce, server.port))
        return pack(unpack(receive_frame(sock)))


def greeting(nonce: bytes, port: int, token: str = TOKEN) -> bytes:
    """What the client sends to a server on `port` that has sent `nonce`."""
    near, far = socket.socketpair()

    class Connected:
        """The client's end, which takes the other one for a server on `port`."""

        def __getattr__(self, name: str) -> object:
            return getattr(near, name)

        def getpeername(self) -> tuple[str, int]:
            return "127.0.0.1", port

    with near, far:
        far.sendall(nonce)
        with suppress(OSError):
            introduce(Connected(), token, 0.05)
        return far.recv(1000)


@pytest.mark.parametrize(
    "answer",
    [
        lambda _: OK,
        lambda _: pack([b"ok", b""]),
        reflected,
        with_another_token,
        recorded,
        lambda _: b"",
    ],
)
def test_a_forged_store_gets_no_request(answer: Answer) -> None:
    with forged(answer) as store:
        with pytest.raises(OSError, match=r"token|no store"):
            Client([("127.0.0.1", store.port)], TOKEN, timeout=1).set("secret", b"value")
        assert store.got == []


def test_a_forged_store_that_sends_too_much_is_left() -> None:
    with forged(lambda _: LENGTH.pack(1 << 31)) as store, pytest.raises(OSError):
        Client([("127.0.0.1", store.port)], TOKEN, timeout=1)


def test_a_forged_store_among_the_addresses_is_passed_over() -> None:
    with forged(lambda _: OK) as store, Server(TOKEN) as server:
        client = Client([("127.0.0.1", store.port), ("127.0.0.1", server.port)], TOKEN, timeout=30)
        client.set("k", b"v")
        assert server.peek("k") == b"v"
        assert store.got == []
        client.close()


def test_a_relay_on_another_port_is_refused_by_the_server() -> None:
    """It passes on each byte between the client and the real store."""
    with Server(TOKEN) as server, socket.create_server(("127.0.0.1", 0)) as listener:

        def pass_on(source: socket.socket, target: socket.socket) -> None:
            with suppress(OSError):
                while data := source.recv(4096):
                    target.sendall(data)
                target.shutdown(socket.SHUT_RDWR)

        def relay() -> None:
            near, _ = listener.accept()
            with near, socket.create_connection(("127.0.0.1", server.port)) as far:
                back = threading.Thread(target=pass_on, args=(far, near))
                back.start()
                pass_on(near, far)
                back.join(30)

        thread = threading.Thread(target=relay)
        thread.start()
        with pytest.raises(PermissionError, match="does not accept our token"):
            Client([listener.getsockname()], TOKEN, timeout=30).set("k", b"v")
        thread.join(30)
        assert server.peek("k") is None


def challenged(port: int) -> tuple[socket.socket, bytes]:
    sock = socket.create_connection(("127.0.0.1", port), timeout=30)
    return sock, receive(sock, NUM_NONCE_BYTES)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda right, nonce, port: right + b"x",
        lambda right, nonce, port: right + pack([b"count"]),
        lambda right, nonce, port: right[:-1] + bytes([right[-1] ^ 1]),
        lambda right, nonce, port: greeting(nonce, port + 1),
        lambda right, nonce, port: greeting(os.urandom(32), port),
        lambda right, nonce, port: greeting(nonce, port, "another token"),
        lambda right, nonce, port: pack(unpack(right[4:])[::-1]),
        lambda right, nonce, port: pack([*unpack(right[4:]), b""]),
        lambda right, nonce, port: pack([b"", *unpack(right[4:])[1:]]),
        lambda right, nonce, port: pack([nonce, *unpack(right[4:])[1:]]),
        lambda right, nonce, port: pack([]),
        lambda right, nonce, port: LENGTH.pack(1 << 30) + right,
    ],
)
def test_a_wrong_greeting_gets_nothing(spoil: Callable[[bytes, bytes, int], bytes]) -> None:
    with Server(TOKEN) as server:
        sock, nonce = challenged(server.port)
        with sock:
            sock.sendall(spoil(greeting(nonce, server.port), nonce, server.port))
            with suppress(ConnectionResetError):
                assert sock.recv(100) == b""


def test_the_right_greeting_is_let_in() -> None:
    """What the test above changes is right otherwise."""
    with Server(TOKEN) as server:
        sock, nonce = challenged(server.port)
        with sock:
            sock.sendall(greeting(nonce, server.port))
            assert unpack(receive_frame(sock))[0] == b"ok"
            sock.sendall(pack([b"count"]))
            assert unpack(receive_frame(sock)) == [b"ok", b"0"]


class Deed:
    """Leaves a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Callable[..., object], tuple[str, int]]:
        return os.open, (str(self.path), os.O_CREAT)


@pytest.mark.usefixtures("processes")
def test_a_worker_of_allstep_run_calls_no_function_of_a_forged_caller(tmp_path: Path) -> None:
    """Its call is a pickle, which may do anything."""
    call = pickle.dumps(Deed(tmp_path / "done"))

    def serve(body: bytes) -> bytes:
        key = unpack(body)[-1]
        return pack([b"ok", b"1"]) if key == b"call" else pack([b"ok", call])

    with forged(lambda _: OK, serve) as caller:
        env = {
            **os.environ,
            "ALLSTEP_RANK": "0",
            "ALLSTEP_SIZE": "1",
            "ALLSTEP_STORE": f"127.0.0.1:{caller.port}",
            "ALLSTEP_CALL_PORT": str(caller.port),
            "ALLSTEP_CALL_TOKEN": TOKEN,
        }
        command = [sys.executable, "-m", "allstep.launch.function_worker"]
        done = subprocess.run(
            command, env=env, capture_output=True, text=True, timeout=100, start_new_session=True
        )
        assert done.returncode != 0
        assert not (tmp_path / "done").exists()
        assert "does not know our token" in done.stderr
