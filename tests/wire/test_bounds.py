"""One authenticated rank can neither fill nor starve the store: memory, replies, turns, numbers."""

import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from allstep.wire import Client, Server, key_table, new_token
from allstep.wire.frames import LENGTH, MAX_FRAME, pack, receive_frame, unpack
from allstep.wire.key_table import Table
from allstep.wire.waiting import Request, WaitingRequests
from support.ranks import wait_until

TOKEN = new_token()
MB = 1 << 20


@pytest.fixture
def server() -> Iterator[Server]:
    with Server(TOKEN) as running:
        yield running


@pytest.fixture
def client(server: Server) -> Iterator[Client]:
    connected = connect(server)
    yield connected
    connected.close()


def connect(server: Server) -> Client:
    return Client([("127.0.0.1", server.port)], TOKEN, timeout=30)


def raw(client: Client) -> socket.socket:
    sock = client._socket()
    sock.settimeout(60)
    return sock


def is_dropped(client: Client, data: bytes) -> bool:
    """Whether the server ends the connection that sends this."""
    try:
        raw(client).sendall(data)
        receive_frame(raw(client))
    except ConnectionError:
        return True
    return False


def resident_nbytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


@pytest.mark.usefixtures("processes")
def test_10000_requests_at_once_delay_another_client_by_one_each(server: Server) -> None:
    greedy, modest, first = (connect(server) for _ in range(3))
    many, few = pack([b"add", b"n", b"1"]) * 10_000, pack([b"add", b"n", b"0"]) * 50
    with server._lock:
        # The thread stops at the lock with this request, so that those of both are there when it
        # continues.
        raw(first).sendall(pack([b"count"]))
        sender = threading.Thread(target=raw(greedy).sendall, args=(many,))
        sender.start()
        # First in line: the kernel reports connections in the order in which they got something.
        wait_until(lambda: unread(raw(greedy)) > 100_000, 30, "a kernel buffer full of requests")
        raw(modest).sendall(few)
    seen = [int(unpack(receive_frame(raw(modest)))[1]) for _ in range(50)]
    # Each turn serves one request of each. What the thread had begun when it was stopped adds one.
    assert seen[-1] <= 55, seen
    replies = [int(unpack(receive_frame(raw(greedy)))[1]) for _ in range(10_000)]
    assert replies == list(range(1, 10_001))
    sender.join(30)
    for each in (greedy, modest, first):
        each.close()


def unread(sock: socket.socket) -> int:
    """Bytes sent on a socket of this host that the other side has not taken."""
    near, far = sock.getsockname()[1], sock.getpeername()[1]
    for line in Path("/proc/net/tcp").read_text().splitlines()[1:]:
        fields = line.split()
        if fields[1].endswith(f":{far:04X}") and fields[2].endswith(f":{near:04X}"):
            return int(fields[4].split(":")[1], 16)
    return 0


def test_a_client_that_does_not_read_its_replies_costs_little_memory(
    server: Server, client: Client
) -> None:
    value = bytes(MB)
    client.set("big", value)
    before = resident_nbytes()
    deaf = connect(server)
    raw(deaf).sendall(pack([b"get", b"1", b"big"]) * 300)
    for number in range(200):
        client.set("k", b"%d" % number)
    assert resident_nbytes() - before < 100 * MB
    # It gets them all once it reads.
    for _ in range(300):
        assert unpack(receive_frame(raw(deaf))) == [b"ok", value]
    deaf.close()


@pytest.mark.usefixtures("processes")
def test_requests_and_replies_under_way_are_bounded_and_the_oldest_goes() -> None:
    with Server(TOKEN, max_held=4 * MB) as server:
        slow = [connect(server) for _ in range(4)]
        for number, each in enumerate(slow, start=1):
            # A frame that never gets whole.
            raw(each).sendall(LENGTH.pack(2 * MB) + bytes(MB))
            wait_until(lambda n=number: server._held >= min(n, 3) * MB, 30, "the bytes")
        wait_until(
            lambda: server._held <= 4 * MB and len(server._connections) == 3, 30, "the end of one"
        )
        with pytest.raises(ConnectionError):
            receive_frame(raw(slow[0]))
        modest = connect(server)
        modest.set("k", b"v")
        assert modest.get("k", 30) == b"v"
        for each in (*slow, modest):
            each.close()
        wait_until(lambda: server._held == 0, 30, "the books to be balanced")


@pytest.mark.usefixtures("processes")
def test_what_parked_requests_name_counts_too() -> None:
    with Server(TOKEN, max_held=4 * MB) as server:
        waiting = [connect(server) for _ in range(5)]
        for each in waiting:
            raw(each).sendall(pack([b"wait", b"600", bytes(MB)]))
        wait_until(lambda: len(server._connections) < 5, 60, "the end of one")
        assert server._held <= 4 * MB
        for each in waiting:
            each.close()


def test_more_requests_behind_one_that_waits_than_any_client_of_ours_sends(
    server: Server, client: Client
) -> None:
    hasty = connect(server)
    assert is_dropped(hasty, pack([b"wait", b"600", b"never"]) + pack([b"count"]) * 1_000_000)
    client.set("k", b"v")
    hasty.close()


def test_a_few_requests_behind_one_that_waits_are_answered_in_order(
    server: Server, client: Client
) -> None:
    sock = raw(hasty := connect(server))
    sock.sendall(
        pack([b"get", b"60", b"late"]) + pack([b"set", b"k", b"v"]) + pack([b"check", b"k"])
    )
    client.wait([], 30)
    assert not client.check(["k"])
    client.set("late", b"here")
    assert [unpack(receive_frame(sock)) for _ in range(3)] == [
        [b"ok", b"here"],
        [b"ok"],
        [b"ok", b"1"],
    ]
    hasty.close()


def test_a_reply_of_more_than_64_mb_is_refused(client: Client) -> None:
    client.set("big", bytes(MB))
    with pytest.raises(ValueError, match=f"a reply of 681[0-9]+ bytes, the limit is {MAX_FRAME}"):
        client.get_all(["big"] * 65, 30)
    assert len(client.get_all(["big"] * 60, 30)) == 60


def test_values_are_bounded_and_the_owner_is_not() -> None:
    with Server(TOKEN, max_nbytes=MB) as small:
        client = connect(small)
        client.set("half", bytes(MB // 2))
        for write in (client.set, client.append):
            with pytest.raises(ValueError, match=r"do not fit: .* of 1048576 are left"):
                write("more", bytes(MB))
            with pytest.raises(ValueError, match="do not fit"):
                write("half" if write == client.append else "more", bytes(MB * 6 // 10))
        with pytest.raises(ValueError, match="do not fit"):
            client.compare_set("more", b"", bytes(MB))
        small.set("allstep/hosts", bytes(MB))
        assert client.get("allstep/hosts", 30) == bytes(MB)
        client.delete("half")
        client.delete("allstep/hosts")
        client.set("more", bytes(MB // 2))
        client.close()


def test_an_appended_value_is_bounded_by_a_reply(client: Client) -> None:
    for _ in range(3):
        client.append("log", bytes(20 * MB))
    with pytest.raises(ValueError, match=f"a reply holds {MAX_FRAME}"):
        client.append("log", bytes(5 * MB))
    assert len(client.get("log", 60)) == 60 * MB


def test_the_number_of_keys_is_bounded(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(key_table, "_MAX_KEYS", 3)
    for key in "abc":
        client.set(key, b"")
    with pytest.raises(ValueError, match="3 keys are stored, the limit is 3"):
        client.set("d", b"")
    client.set("a", b"again")
    client.delete("a")
    client.set("d", b"")


@pytest.mark.parametrize(
    "amount", [b"1" * 21, b"9" * 4000, b"9" * 1_000_000, b"%d" % (1 << 63), b"1.5", b""]
)
def test_numbers_of_more_than_64_bits_are_refused(client: Client, amount: bytes) -> None:
    client.set("many digits", b"7" * 1000)
    with pytest.raises(ValueError, match=r"64 bits|invalid literal"):
        client._request("add", "n", amount)
    with pytest.raises(ValueError, match="64 bits"):
        client.add("many digits", 1)
    assert client.add("n", (1 << 63) - 1) == (1 << 63) - 1
    with pytest.raises(ValueError, match="64 bits"):
        client.add("n", 1)
    assert client.add("n", -1) == (1 << 63) - 2


def test_a_request_of_millions_of_fields_ends_its_connection_only(
    server: Server, client: Client
) -> None:
    greedy = connect(server)
    assert is_dropped(greedy, pack([b"check", *[b""] * 1_000_000]))
    client.set("k", b"v")
    greedy.close()


STEPS = st.tuples(
    st.sampled_from(["set", "append", "add", "compare_set", "delete"]),
    st.sampled_from([b"a", b"bb", b"ccc"]),
    st.binary(max_size=300) | st.integers(-(1 << 64), 1 << 64).map(lambda number: b"%d" % number),
)


@given(st.lists(STEPS, max_size=40))
def test_the_table_knows_how_much_it_holds(steps: list[tuple[str, bytes, bytes]]) -> None:
    kept = Table(max_nbytes=1500)
    for operation, key, value in steps:
        before = dict(kept.values)
        arguments = {"delete": (), "compare_set": (before.get(key, b""), value)}.get(
            operation, (value,)
        )
        try:
            getattr(kept, operation)(key, *map(bytes, arguments))
        except ValueError:
            assert kept.values == before, "what is refused changes nothing"
        held = sum(len(key) + len(value) + 200 for key, value in kept.values.items())
        assert held == kept._nbytes <= 1500


def test_a_parked_request_waits_until_all_keys_are_there_at_once() -> None:
    waiting: WaitingRequests[str] = WaitingRequests()
    request = Request((b"a", b"b", b"c"), True, deadline=10.0)
    assert request.missing({b"a"}) == b"b"
    waiting.add("rank", request, b"b")
    assert waiting.waiting_for(b"a") == []
    assert waiting.waiting_for(b"b") == ["rank"]
    assert waiting.next_deadline == 10.0
    assert waiting.overdue(9.9) == []
    assert waiting.take("rank") is request
    assert waiting.next_deadline == float("inf"), "no request is left to wait for"
    assert request.missing({b"a", b"b"}) == b"c"
    assert request.missing({b"b", b"c"}) == b"a", "deleted meanwhile"
    assert request.missing({b"a", b"b", b"c"}) is None
    waiting.add("rank", request, b"a")
    assert waiting.overdue(10.0) == ["rank"]
    assert waiting.take("rank") is request
    assert waiting.take("rank") is None
    assert len(waiting) == 0
    assert waiting.waiting_for(b"a") == []


@pytest.mark.usefixtures("processes")
def test_a_key_that_is_deleted_before_the_others_come(server: Server, client: Client) -> None:
    found: list[list[bytes]] = []

    def wait() -> None:
        found.append(client.get_all(["a", "b"], 60))
        client.close()

    waiting = threading.Thread(target=wait)
    client.set("a", b"old")
    waiting.start()
    wait_until(lambda: len(server._waiting) == 1, 30, "the waiting request")
    client.delete("a")
    client.set("b", b"2")
    client.set("a", b"1")
    waiting.join(30)
    assert found == [[b"1", b"2"]]


@pytest.mark.usefixtures("processes")
def test_the_server_sleeps_after_the_deadline_of_an_answered_request(
    server: Server, client: Client
) -> None:
    def wait() -> None:
        client.get_all(["a"], 0.5)
        client.close()

    waiting = threading.Thread(target=wait)
    waiting.start()
    wait_until(lambda: len(server._waiting) == 1, 30, "the waiting request")
    server.set("a", b"1")
    waiting.join(30)
    time.sleep(0.6)
    iterations = 0
    run_once = server._run_once

    def counted() -> None:
        nonlocal iterations
        iterations += 1
        run_once()

    server._run_once = counted  # type: ignore[method-assign]
    server.set("b", b"1")
    time.sleep(0.3)
    assert iterations <= 3
