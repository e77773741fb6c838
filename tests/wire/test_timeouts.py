"""Limits of any length, and what ends when something goes wrong in the store's thread."""

import threading
import time
from collections.abc import Iterator

import pytest

from allstep.wire import Client, KeysLate, Server, new_token
from allstep.wire import client as client_module
from allstep.wire.frames import pack, receive_frame, unpack
from allstep.wire.timeouts import HOUR, bounded
from support.ranks import wait_until

TOKEN = new_token()
DAYS_115 = 1e7


@pytest.fixture
def server() -> Iterator[Server]:
    with Server(TOKEN) as running:
        yield running


def connect(server: Server, timeout: float = 30) -> Client:
    return Client([("127.0.0.1", server.port)], TOKEN, timeout=timeout)


def ask(client: Client, *fields: bytes) -> list[bytes]:
    """A request as it is on the wire, and its reply."""
    sock = client._socket()
    sock.settimeout(30)
    sock.sendall(pack(fields))
    return unpack(receive_frame(sock))


@pytest.mark.parametrize("seconds", [b"10000000", b"1e18", b"1e300"])
def test_a_request_that_waits_for_more_than_24_days(server: Server, seconds: bytes) -> None:
    waiting, other = connect(server), connect(server)
    waiting._socket().sendall(pack([b"get", seconds, b"late"]))
    # Two turns: in the first one the request is waiting, in the second one the thread has waited.
    other.set("k", b"v")
    other.set("k", b"w")
    assert other.get("k", 30) == b"w"
    other.set("late", b"here")
    waiting._socket().settimeout(30)
    assert unpack(receive_frame(waiting._socket())) == [b"ok", b"here"]
    for client in (waiting, other):
        client.close()


@pytest.mark.parametrize("timeout", [DAYS_115, 1e18])
def test_a_client_with_a_timeout_of_more_than_24_days(server: Server, timeout: float) -> None:
    client = connect(server, timeout)
    threading.Timer(0.2, server.set, ("late", b"here")).start()
    assert client.get("late", timeout) == b"here"
    client.wait(["late"], timeout)
    client.close()


@pytest.mark.parametrize("text", [b"inf", b"-inf", b"nan", b"1e999", b"soon", b"", b"1" * 5000])
def test_a_timeout_that_is_no_number_of_seconds_is_refused(server: Server, text: bytes) -> None:
    client = connect(server)
    status, reason = ask(client, b"get", text, b"never")
    assert status == b"bad"
    assert b"timeout" in reason or b"float" in reason
    client.set("k", b"v")
    assert client.get("k", 30) == b"v"
    client.close()


@pytest.mark.parametrize("seconds", [float("inf"), float("nan")])
def test_a_client_refuses_them_too(server: Server, seconds: float) -> None:
    with pytest.raises(ValueError, match="finite"):
        connect(server, seconds)
    client = connect(server)
    with pytest.raises(ValueError, match="finite"):
        client.get("k", seconds)
    client.close()


def test_a_long_wait_is_made_of_short_ones(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client_module, "HOUR", 0.1)
    client = connect(server)
    threading.Timer(0.5, server.set, ("late", b"here")).start()
    assert client.get("late", 60) == b"here"
    began = time.monotonic()
    with pytest.raises(KeysLate):
        client.wait(["never"], 0.35)
    assert time.monotonic() - began > 0.3
    client.close()


def test_bounded() -> None:
    assert [bounded(seconds) for seconds in (-1.0, 0.5, 1e9, float("inf"))] == [
        0.0,
        0.5,
        HOUR,
        HOUR,
    ]


def test_what_goes_wrong_for_one_client_ends_no_other(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    unlucky, lucky = connect(server), connect(server)

    def broken(*_: bytes) -> list[bytes]:
        raise RuntimeError("broken on purpose")

    monkeypatch.setattr(server._table, "append", broken)
    with pytest.raises(ConnectionError, match="gone"):
        unlucky.append("k", b"v")
    lucky.set("k", b"v")
    assert lucky.get("k", 30) == b"v"
    unlucky.set("k", b"again")
    assert server.failure is None
    for client in (unlucky, lucky):
        client.close()


@pytest.mark.usefixtures("processes")
def test_what_goes_wrong_in_a_parked_request_ends_no_other(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    unlucky, lucky = connect(server), connect(server)
    unlucky._socket().sendall(pack([b"get", b"60", b"late"]))
    wait_until(lambda: len(server._waiting) == 1, 30, "the waiting request")
    get = server._table.get

    def broken(keys: list[bytes]) -> list[bytes]:
        if b"late" in keys:
            raise RuntimeError("broken on purpose")
        return get(keys)

    monkeypatch.setattr(server._table, "get", broken)
    lucky.set("late", b"here")
    with pytest.raises(ConnectionError):
        receive_frame(unlucky._socket())
    lucky.set("k", b"v")
    assert lucky.get("k", 30) == b"v"
    assert server.failure is None
    for client in (unlucky, lucky):
        client.close()


@pytest.mark.usefixtures("processes")
def test_a_thread_that_ends_ends_the_connections_and_is_reported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with Server(TOKEN) as server:
        client = connect(server)
        assert server.failure is None

        def broken() -> None:
            raise RuntimeError("broken on purpose")

        monkeypatch.setattr(server, "_run_once", broken)
        with pytest.raises(ConnectionError):
            client.get("never", 60)
        wait_until(lambda: server.failure is not None, 30, "the report")
        assert server.failure == "RuntimeError: broken on purpose"
        # The owner may still use it, to no effect.
        server.set("k", b"v")
    assert server.failure == "RuntimeError: broken on purpose"


def test_a_store_that_was_closed_has_not_failed() -> None:
    server = Server(TOKEN)
    server.close()
    assert server.failure is None
