"""Waits that another key ends: the notice that a world has ended reaches a rank that waits."""

import threading
import time
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from allstep.wire import Client, KeysLate, Server, WaitEnded, new_token
from allstep.wire.waiting import Request, WaitingRequests

TOKEN = new_token()


@pytest.fixture
def server() -> Iterator[Server]:
    with Server(TOKEN) as running:
        yield running


@pytest.fixture
def client(server: Server) -> Iterator[Client]:
    connected = Client([("127.0.0.1", server.port)], TOKEN, timeout=30)
    yield connected
    connected.close()


@pytest.mark.usefixtures("processes")
def test_the_key_ends_a_wait_at_once(server: Server, client: Client) -> None:
    ended: list[object] = []

    def wait() -> None:
        try:
            client.wait(["never", "neither"], 60, unless="end")
        except WaitEnded as error:
            ended.append(error.value)
        client.close()

    waiter = threading.Thread(target=wait)
    waiter.start()
    client.set("never", b"")
    began = time.monotonic()
    server.set("end", b"lost rank 1")
    waiter.join(30)
    assert ended == [b"lost rank 1"]
    assert time.monotonic() - began < 10


def test_keys_that_are_there_count_more_than_the_end(server: Server, client: Client) -> None:
    server.set("end", b"over")
    server.set("a", b"1")
    assert client.get_all(["a"], 5, unless="end") == [b"1"]
    with pytest.raises(WaitEnded, match="key end is set"):
        client.get_all(["a", "b"], 5, unless="end")
    assert client.get_all(["a"], 5) == [b"1"]  # the connection still works


def test_a_wait_that_nothing_ends_is_late(client: Client) -> None:
    with pytest.raises(KeysLate) as caught:
        client.wait(["b"], 0.1, unless="end")
    assert caught.value.keys == ["b"]


def test_a_request_without_a_timeout_is_refused(client: Client) -> None:
    with pytest.raises(ValueError, match="refused"):
        client._request("get_unless", "end")


@given(
    st.lists(
        st.tuples(st.sampled_from("abc"), st.sampled_from("abce"), st.sampled_from(["e", None]))
    )
)
def test_a_peer_waits_under_its_keys_until_it_is_taken(
    adds: list[tuple[str, str, str | None]],
) -> None:
    waiting: WaitingRequests[str] = WaitingRequests()
    under: dict[str, set[str]] = {}
    for peer, missing, unless in adds:
        waiting.take(peer)
        request = Request((missing.encode(),), False, 1.0, unless.encode() if unless else None)
        waiting.add(peer, request, missing.encode())
        under[peer] = {missing} | ({unless} if unless else set())
    for key in "abce":
        expected = {peer for peer, keys in under.items() if key in keys}
        assert set(waiting.waiting_for(key.encode())) == expected
    for peer in under:
        assert waiting.take(peer) is not None
    assert not any(waiting.waiting_for(key.encode()) for key in "abce")
    assert not waiting._by_key
