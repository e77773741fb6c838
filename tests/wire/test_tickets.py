"""Tickets of an elastic run: which client the store admits, and which keys it may write."""

import os
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from allstep.wire import Client, Server, TicketRefused, Tickets, find_address, keys, new_token
from allstep.wire.tickets import PROCESS, may_write
from support.ranks import wait_until

TOKEN = new_token()


@pytest.fixture(autouse=True)
def no_process(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each test starts as a process that has used no ticket; its number does not stay."""
    monkeypatch.setenv(PROCESS, "")


@pytest.fixture
def tickets() -> Tickets:
    return Tickets()


@pytest.fixture
def store(tickets: Tickets) -> Iterator[Server]:
    with Server(TOKEN, tickets=tickets) as server:
        yield server


def join(store: Server, ticket: str = "", token: str = TOKEN) -> Client:
    return Client([("127.0.0.1", store.port)], token, timeout=30, ticket=ticket)


def as_another_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PROCESS, "")


def test_a_worker_joins_with_all_its_threads(store: Server, tickets: Tickets) -> None:
    worker = join(store, ticket := tickets.issue("3"))
    worker.set("k", b"v")

    def set_and_close() -> None:
        worker.set("k", b"w")
        worker.close()

    thread = threading.Thread(target=set_and_close)
    thread.start()
    thread.join(30)
    assert worker.get("k", 30) == b"w"
    # A second client of the process, such as that of injected faults, and a second world.
    join(store, ticket).close()
    worker.close()


REFUSED = {
    "none": (lambda tickets: "", r"it has no ticket \(ALLSTEP_TICKET\); only workers that the lau"),
    "unknown": (lambda tickets: "7-" + 32 * "0", "its ticket is unknown to this run"),
    "wrong secret": (lambda tickets: tickets.issue("7")[:-1] + "x", "its ticket is unknown"),
    "another's name": (
        lambda tickets: tickets.issue("1") and "1" + tickets.issue("2")[1:],
        "its ticket is unknown",
    ),
    "without a name": (lambda tickets: "-", "its ticket is unknown"),
}


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize("kind", REFUSED)
def test_other_tickets_get_one_error(store: Server, tickets: Tickets, kind: str) -> None:
    make, reason = REFUSED[kind]
    with pytest.raises(TicketRefused, match=reason) as caught:
        join(store, make(tickets))
    assert "\n" not in str(caught.value)
    wait_until(lambda: not store._connections, 30, "the end of the connection")


def test_the_reason_is_only_for_clients_with_the_token(store: Server) -> None:
    with pytest.raises(PermissionError, match="does not accept our token"):
        join(store, token=new_token())


def test_a_ticket_is_valid_once(
    store: Server, tickets: Tickets, monkeypatch: pytest.MonkeyPatch
) -> None:
    ticket = tickets.issue("3")
    first = join(store, ticket)
    as_another_process(monkeypatch)
    with pytest.raises(TicketRefused, match="the ticket of worker 3 is used by another process"):
        join(store, ticket)
    first.close()
    with pytest.raises(TicketRefused, match="used by another process"):
        join(store, ticket)


@pytest.mark.usefixtures("processes")
def test_processes_that_a_worker_starts_are_the_same_worker(
    store: Server, tickets: Tickets
) -> None:
    ticket = tickets.issue("3")
    script = (
        "import sys; from allstep.wire import Client\n"
        "Client([('127.0.0.1', int(sys.argv[1]))], *sys.argv[2:3], ticket=sys.argv[3]).set('k',b'')"
    )
    command = [sys.executable, "-c", script, str(store.port), TOKEN, ticket]
    worker = join(store, ticket)
    assert subprocess.run(command, timeout=60).returncode == 0
    assert store.peek("k") == b""
    worker.close()
    done = subprocess.run(
        command, timeout=60, env={**os.environ, PROCESS: ""}, capture_output=True, text=True
    )
    assert done.returncode == 1
    assert "used by another process" in done.stderr.splitlines()[-1]


@pytest.mark.usefixtures("processes")
def test_a_revoked_worker_is_cut_off_and_cannot_return(store: Server, tickets: Tickets) -> None:
    """Also a thread of it that waits in the store; another worker is not affected."""
    ticket, other = tickets.issue("1"), tickets.issue("11")
    worker, stays, ended = join(store, ticket), join(store, other), []

    def wait() -> None:
        try:
            worker.get("never", 60)
        except ConnectionError as error:
            ended.append(str(error))

    thread = threading.Thread(target=wait)
    thread.start()
    wait_until(lambda: len(store._waiting) == 1, 30, "the wait")
    tickets.revoke(ticket)
    thread.join(30)
    assert ended and "is gone" in ended[0]
    for _ in range(2):
        with pytest.raises((ConnectionError, TicketRefused)):
            worker.set("k", b"late")
    with pytest.raises(TicketRefused, match="worker 1 is not valid any more: the run has ended it"):
        join(store, ticket)
    assert store.peek("k") is None
    stays.set("k", b"v")
    tickets.revoke(ticket)
    stays.close()


def test_a_worker_writes_only_its_own_keys_below_elastic(store: Server, tickets: Tickets) -> None:
    worker = join(store, ticket := tickets.issue("1"))
    for key in (keys.ask_of(ticket, 0), keys.progress_of(ticket), "allstep/fault/1", "anything"):
        worker.set(key, b"")
    store.set(keys.end_of(0), b"lost")
    forbidden = [
        keys.ask_of("11", 0),
        keys.progress_of("11"),
        keys.place_of(ticket, 0),
        keys.end_of(0),
        keys.change_of(0, 0),
        keys.HOSTS,
        "elastic/ask/1",
    ]
    for key in forbidden:
        for act in (
            lambda key: worker.set(key, b"x"),
            lambda key: worker.append(key, b"x"),
            lambda key: worker.add(key, 1),
            lambda key: worker.compare_set(key, b"", b"x"),
            lambda key: worker.delete(key),
        ):
            with pytest.raises(ValueError, match=f"worker 1 may not write '{key}'"):
                act(key)
    assert worker.get(keys.end_of(0), 30) == b"lost"
    assert ticket.partition("-")[2] not in " ".join(worker.keys())
    worker.close()


def test_keys_of_another_worker() -> None:
    assert may_write("1", b"elastic/ask/1/0")
    assert not may_write("1", b"elastic/ask/10/0")
    assert not may_write("1", b"elastic/progress/10")


def test_an_agent_finds_the_address_of_a_store_that_admits_workers_only(store: Server) -> None:
    addresses = [("127.0.0.1", store.port)]
    assert find_address(addresses, TOKEN, 30) == addresses[0]
    with Server(TOKEN) as fixed:
        assert find_address([("127.0.0.1", fixed.port)], TOKEN, 30) == ("127.0.0.1", fixed.port)
        with pytest.raises(PermissionError):
            find_address([("127.0.0.1", fixed.port)], "another", 30)
