"""What the launcher's store keeps of workers: nothing of those that have ended."""

from collections.abc import Iterator

import pytest

from allstep import wire
from allstep.launch.elastic.worker_keys import WorkerKeys
from allstep.launch.elastic.worker_table import WorkerTable
from allstep.wire import keys


@pytest.fixture
def store() -> Iterator[wire.Server]:
    with wire.Server(wire.new_token(), "127.0.0.1") as server:
        yield server


def test_the_keys_of_a_worker_that_has_ended_are_deleted(store: wire.Server) -> None:
    """Worker 1 has an unanswered request; the keys of worker 10 begin like those of worker 1."""
    workers, kept = WorkerTable(), WorkerKeys(store)
    for number in range(11):
        worker = workers.add(number, "a", number)
        store.set(keys.ask_of(worker.ticket, 0), b"{}")
        kept.answer(worker, {"rank": number})
        store.set(keys.progress_of(worker.ticket), b"[0, 1]")
    store.set(keys.ask_of(workers[1].ticket, 1), b"{}")
    assert kept.new_progress(workers[10]) == b"[0, 1]"
    before = store.keys("elastic/")
    for number in range(10):
        kept.forget(workers.end(number))
    assert len(before) == 23
    assert store.keys("elastic/") == ["elastic/place/10/0", "elastic/progress/10/steps"]
    assert kept.new_progress(workers[10]) is None


def test_a_request_of_a_worker_that_has_ended_meanwhile_is_deleted(store: wire.Server) -> None:
    workers, kept = WorkerTable(), WorkerKeys(store)
    worker = workers.add(0, "a", 0)
    asked = keys.ask_of(worker.ticket, 0)
    assert workers.is_living(asked)
    workers.end(0)
    store.set(asked, b"{}")
    assert not workers.is_living(asked)
    kept.forget_request(asked)
    assert store.keys("elastic/") == []


def test_each_progress_is_returned_once(store: wire.Server) -> None:
    workers, kept = WorkerTable(), WorkerKeys(store)
    worker = workers.add(0, "a", 0)
    assert kept.new_progress(worker) is None
    for value in (b"[0, 1]", b"[0, 2]"):
        store.set(keys.progress_of(worker.ticket), value)
        assert kept.new_progress(worker) == value
        assert kept.new_progress(worker) is None
