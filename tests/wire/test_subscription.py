"""The owner of the store learns of keys that clients set, and deletes those of old worlds."""

import select
from collections.abc import Iterator

import pytest

from allstep.wire import Client, Server, new_token

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


def is_readable(thing: object, seconds: float) -> bool:
    return bool(select.select([thing], [], [], seconds)[0])


def test_new_keys_make_it_readable(server: Server, client: Client) -> None:
    client.set("elastic/before", b"")
    client.set("other", b"")
    asks = server.subscribe("elastic/ask/")
    assert not is_readable(asks, 0)
    client.set("elastic/ask/a", b"1")
    client.set("elastic/place/a", b"")
    client.set("elastic/ask/b", b"2")
    client.set("elastic/ask/a", b"3")  # it has appeared already
    assert is_readable(asks, 30)
    client.check(["x"])  # the thread has served all requests before
    assert asks.take() == ["elastic/ask/a", "elastic/ask/b"]
    assert not is_readable(asks, 0) and asks.take() == []
    client.delete("elastic/ask/a")
    client.set("elastic/ask/a", b"4")
    assert is_readable(asks, 30) and asks.take() == ["elastic/ask/a"]


def test_a_prefix_is_deleted(server: Server, client: Client) -> None:
    for key in ("w/1/a", "w/1/b", "w/11", "x"):
        client.set(key, b"1")
    assert server.delete_prefix("w/1/") == 2
    assert client.keys() == ["w/11", "x"]
    assert server.delete_prefix("w/1/") == 0
