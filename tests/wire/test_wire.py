"""The launcher's store: against a dictionary, against strangers, and under several threads."""

import os
import socket
import struct
import threading
import time
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from allstep.wire import Client, KeysLate, Server, format_addresses, new_token, parse_addresses
from allstep.wire.frames import MAX_FRAME, pack, receive_reply, unpack

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


@given(st.lists(st.binary(max_size=100), max_size=10))
def test_frames_hold_any_fields(fields: list[bytes]) -> None:
    frame = pack(fields)
    assert struct.unpack("!I", frame[:4])[0] == len(frame) - 4
    assert unpack(frame[4:]) == fields


@given(st.lists(st.binary(min_size=1, max_size=20), min_size=1, max_size=5), st.data())
def test_a_cut_frame_is_refused(fields: list[bytes], data: st.DataObject) -> None:
    body = pack(fields)[4:]
    ends = {0}
    for field in fields:
        ends.add(max(ends) + 4 + len(field))
    cut = data.draw(st.integers(1, len(body) - 1).filter(lambda at: at not in ends))
    with pytest.raises(ValueError, match="byte"):
        unpack(body[:cut])


@given(st.binary(max_size=20_000), st.integers(1, 9_000))
def test_a_reply_may_come_in_chunks(field: bytes, length: int) -> None:
    frame = pack([field])
    ours, theirs = socket.socketpair()
    with ours, theirs:
        chunks = [frame[at : at + length] for at in range(0, len(frame), length)]
        sender = threading.Thread(target=lambda: [theirs.sendall(chunk) for chunk in chunks[:50]])
        sender.start()
        if len(chunks) > 50:  # the other side ends before the reply is whole
            sender.join()
            theirs.shutdown(socket.SHUT_WR)
            with pytest.raises(
                ConnectionError, match=f"ended after {50 * length} of {len(frame)} bytes"
            ):
                receive_reply(ours)
        else:
            assert unpack(receive_reply(ours)) == [field]
        sender.join()


@pytest.mark.parametrize(
    ("sent", "text"),
    [
        (pack([b"ok"]) + b"more", "received 4 bytes after a reply"),
        (struct.pack("!I", MAX_FRAME + 1), f"expected at most {MAX_FRAME}"),
        (b"\0", "ended after 1 of 4 bytes"),
        (b"", "ended after 0 of 4 bytes"),
    ],
)
def test_what_is_no_reply_is_refused(sent: bytes, text: str) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(sent)
        theirs.shutdown(socket.SHUT_WR)
        with pytest.raises(ConnectionError, match=text):
            receive_reply(ours)


KEYS = st.sampled_from(["a", "b", "c/d"])
STEPS = st.one_of(
    st.tuples(st.just("set"), KEYS, st.binary(max_size=5)),
    st.tuples(st.just("append"), KEYS, st.binary(max_size=5)),
    st.tuples(st.just("delete"), KEYS),
    st.tuples(st.just("compare_set"), KEYS, st.binary(max_size=1), st.binary(max_size=3)),
    st.tuples(st.just("count")),
)


@settings(deadline=None, max_examples=500 if os.environ.get("ALLSTEP_SOAK") else 50)
@given(st.lists(STEPS, max_size=20))
@pytest.mark.soak
def test_it_is_a_dictionary(steps: list[tuple]) -> None:
    model: dict[str, bytes] = {}
    with Server(TOKEN) as server:
        client = Client([("127.0.0.1", server.port)], TOKEN)
        for name, *arguments in steps:
            found = getattr(client, name)(*arguments)
            assert found == oracle(model, name, *arguments)
            assert client.keys() == sorted(model)
        for key, value in model.items():
            assert client.get(key, 1) == value
        client.close()


def oracle(model: dict[str, bytes], name: str, *arguments):
    """The same operation on a plain dictionary."""
    match name, *arguments:
        case "set", key, value:
            model[key] = value
        case "append", key, value:
            model[key] = model.get(key, b"") + value
        case "delete", key:
            return model.pop(key, None) is not None
        case "compare_set", key, expected, desired:
            if model.get(key, b"") == expected:
                model[key] = desired
            return model.get(key, expected)
        case ("count",):
            return len(model)
    return None


def test_it_agrees_with_torchs_own_store(client: Client) -> None:
    from torch.distributed import HashStore

    theirs = HashStore()
    for expected, desired in [("", "1"), ("2", "3"), ("1", "4"), ("", "5")]:
        assert client.compare_set("k", expected.encode(), desired.encode()) == theirs.compare_set(
            "k", expected, desired
        )
    assert client.compare_set("new", b"x", b"y") == theirs.compare_set("new", "x", "y")
    assert client.add("n", 5) == theirs.add("n", 5)
    assert client.add("n", -7) == theirs.add("n", -7)


def test_add_counts_every_thread(server: Server) -> None:
    client = Client([("127.0.0.1", server.port)], TOKEN)

    def count() -> None:
        for _ in range(200):
            client.add("n", 1)
        client.close()

    threads = [threading.Thread(target=count) for _ in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert client.add("n", 0) == 1000
    client.close()


@pytest.mark.usefixtures("processes")
def test_a_get_waits_for_the_key_and_delays_no_other_client(server: Server, client: Client) -> None:
    found: list[bytes] = []

    def wait() -> None:
        found.append(client.get("late", 60))
        client.close()

    waiter = threading.Thread(target=wait)
    waiter.start()
    time.sleep(0.05)
    client.set("other", b"1")
    assert not found
    server.set("late", b"here")
    waiter.join(30)
    assert found == [b"here"]


def test_keys_that_do_not_come_are_named(client: Client) -> None:
    client.set("a", b"")
    began = time.monotonic()
    with pytest.raises(KeysLate) as caught:
        client.wait(["a", "b", "c"], 0.2)
    assert caught.value.keys == ["b", "c"]
    assert 0.15 < time.monotonic() - began < 9  # after 10.2 s the client would give up by itself
    assert client.get("a", 1) == b""  # the connection still works


def test_a_stranger_gets_nothing(server: Server) -> None:
    with pytest.raises(PermissionError, match="token"):
        Client([("127.0.0.1", server.port)], "wrong", timeout=30)


@pytest.mark.parametrize(
    "noise",
    [
        b"GET / HTTP/1.1\r\n\r\n" * 5,
        b"\xff" * 64,
        b"\0\0\0\x20" + b"x" * 32,
        b"\0\0\0\x04abcd",
        b"",
    ],
)
def test_noise_does_not_disturb(server: Server, client: Client, noise: bytes) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=5) as stranger:
        stranger.sendall(noise)
        stranger.settimeout(0.5)
        reply = b""
        try:
            while chunk := stranger.recv(100):
                reply += chunk
        except (TimeoutError, ConnectionError):
            pass
        assert len(reply) <= 32  # the challenge, never an answer
    client.set("k", b"v")
    assert client.get("k", 1) == b"v"


def test_a_peer_that_hangs_up_before_its_handshake_does_not_disturb(
    server: Server, client: Client
) -> None:
    """The connection is reset before the server sends its challenge."""
    with server._lock:  # holds the server up
        server._wake_out.send(b"x")
        for _ in range(3):
            hasty = socket.create_connection(("127.0.0.1", server.port), timeout=30)
            hasty.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            hasty.close()
    client.set("k", b"v")
    assert client.get("k", 1) == b"v"


def test_an_unknown_operation_and_bad_numbers_are_refused(client: Client) -> None:
    client.set("text", b"abc")
    with pytest.raises(ValueError, match="invalid literal"):
        client.add("text", 1)
    with pytest.raises(ValueError, match="no operation 'fly'"):
        client._request("fly")
    with pytest.raises(ValueError, match="argument"):
        client._request("set", "only a key")
    with pytest.raises(ValueError, match="argument"):
        client._request("get")
    assert client.get("text", 1) == b"abc"


def test_large_values(client: Client) -> None:
    value = os.urandom(5 << 20)
    client.set("big", value)
    assert client.get("big", 5) == value


def test_a_store_that_goes_away() -> None:
    server = Server(TOKEN)
    client = Client([("127.0.0.1", server.port)], TOKEN, timeout=30)
    threading.Timer(0.1, server.close).start()
    with pytest.raises(ConnectionError, match="gone"):
        client.get("never", 60)
    with pytest.raises(ConnectionError, match="no store within"):
        client.set("a", b"")


def test_the_first_address_that_answers_is_taken(server: Server) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        client = Client([closed.getsockname(), ("127.0.0.1", server.port)], TOKEN, timeout=30)
    assert client.server_address == ("127.0.0.1", server.port)
    assert client.local_address == "127.0.0.1"
    client.close()


def test_the_store_of_another_run_is_passed_over(server: Server) -> None:
    with Server("another token") as other:
        client = Client([("127.0.0.1", other.port), ("127.0.0.1", server.port)], TOKEN, timeout=30)
    assert client.server_address == ("127.0.0.1", server.port)
    client.close()


def test_a_forked_process_gets_its_own_connection(ranks) -> None:
    """The fixture forks ranks from one process; each of them uses the store at once."""

    def use() -> int:
        import os

        from allstep.wire import Client, parse_addresses

        client = Client(parse_addresses(os.environ["ALLSTEP_STORE"]), os.environ["ALLSTEP_TOKEN"])
        client.set("parent", b"1")
        child = os.fork()
        if child == 0:
            for _ in range(100):
                client.add("n", 1)
            os._exit(0)
        for _ in range(100):
            client.add("n", 1)
        os.waitpid(child, 0)
        return client.add("n", 0)

    assert max(ranks(2, use)) == 400


@given(
    st.lists(
        st.tuples(st.sampled_from(["10.0.0.1", "fe80::1", "host"]), st.integers(1, 65535)),
        min_size=1,
        max_size=3,
    )
)
def test_addresses(pairs: list[tuple[str, int]]) -> None:
    assert parse_addresses(format_addresses(pairs)) == pairs


def test_addresses_that_are_not() -> None:
    with pytest.raises(ValueError, match="nonsense"):
        parse_addresses("nonsense")


def test_every_interface_when_asked() -> None:
    with Server(TOKEN, "") as server:
        client = Client([("127.0.0.1", server.port)], TOKEN, timeout=30)
        client.set("k", b"v")
        assert client.server_address[0] == "127.0.0.1"
        client.close()


def test_closing_while_a_client_leaves(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread may be awake for the client's sake when it is asked to end, and gone before it is
    woken for ours."""
    server = Server(TOKEN)
    client = Client([("127.0.0.1", server.port)], TOKEN, timeout=30)

    class Late:
        def send(self, data: bytes) -> None:
            client.close()
            server._thread.join(30)
            assert not server._thread.is_alive()
            wake.send(data)

        def close(self) -> None:
            wake.close()

    wake = server._wake_out
    monkeypatch.setattr(server, "_wake_out", Late())
    server.close()


def test_a_value_that_no_request_can_carry() -> None:
    with Server(token := new_token()) as server:
        client = Client([("127.0.0.1", server.port)], token)
        with pytest.raises(
            ValueError, match=r"set of 67108\d+ bytes: the store accepts at most 67108864"
        ):
            client.set("key", bytes(64 << 20))
        client.set("key", b"still connected")
        assert server.peek("key") == b"still connected"
        client.close()


@pytest.mark.usefixtures("processes")
def test_a_store_whose_name_cannot_be_looked_up() -> None:
    with pytest.raises(ConnectionError, match=r"no store within 0 s at a\.\.b:5: .*label"):
        Client([("a..b", 5)], "token", timeout=0.1)
