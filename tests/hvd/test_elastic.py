"""The elastic state and its loop, with the collectives and the restart replaced by plain functions:
no ranks are needed for the rules."""

from typing import Any

import pytest

from allstep.errors import CollectiveMismatch, PeerLost
from allstep.hvd import elastic, kept_errors
from allstep.hvd.elastic import HostUpdateResult, ObjectState, notification_manager, run_fn
from allstep.hvd.exceptions import HorovodInternalError, HostsUpdatedInterrupt


def lonely(**kwargs: Any) -> Any:
    return ObjectState(lambda obj, **_: obj, lambda: 0, **kwargs)


def test_commit_and_restore() -> None:
    state = lonely(epoch=3, best=0.5)
    state.epoch = 4
    state.restore()
    assert state.epoch == 3
    state.epoch, state.best = 5, 0.7
    state.commit()
    state.epoch = 6
    state.restore()
    assert (state.epoch, state.best) == (5, 0.7)


def test_sync_takes_the_roots_present_values_and_saves_them() -> None:
    """Also what was not committed: the model that goes with it was not reset either."""
    sent = []

    def bcast(obj: Any) -> Any:
        sent.append(obj)
        return {"epoch": 9}

    state: Any = ObjectState(bcast, lambda: 1, epoch=1)
    state.epoch = 2
    state.sync()
    assert sent == [{"epoch": 2}]
    assert state.epoch == 9
    state.epoch = 10
    state.restore()
    assert state.epoch == 9


def test_a_state_without_attributes_sends_nothing() -> None:
    def bcast(obj: Any) -> Any:
        raise AssertionError("nothing to send")

    ObjectState(bcast, lambda: 0).sync()


@pytest.mark.parametrize(
    ("messages", "skip_sync"),
    [
        ([(1, HostUpdateResult.removed)], True),
        ([(1, HostUpdateResult.added)], False),
        ([(1, HostUpdateResult.removed), (2, HostUpdateResult.added)], False),
    ],
)
def test_changed_hosts_interrupt_a_commit(messages: list[tuple[int, int]], skip_sync: bool) -> None:
    state = lonely(batch=0)
    for message in messages:
        state.on_hosts_updated(*message)
    state.batch = 1
    with pytest.raises(HostsUpdatedInterrupt) as raised:
        state.commit()
    assert raised.value.skip_sync is skip_sync
    assert state._last_updated_timestamp == len(messages)
    state.commit()  # told once
    state.restore()
    assert state.batch == 1  # saved before the interrupt


def test_old_news_is_no_news() -> None:
    state = lonely()
    state._last_updated_timestamp = 5
    state.on_hosts_updated(5, HostUpdateResult.added)
    state.commit()
    assert state._host_messages.empty()


def test_every_rank_hears_what_the_root_was_told() -> None:
    state = ObjectState(lambda obj: (0, 7, HostUpdateResult.mixed), lambda: 1)
    with pytest.raises(HostsUpdatedInterrupt):
        state.check_host_updates()
    assert state._last_updated_timestamp == 7


class Recorder(ObjectState):
    """Notes what the loop does with it."""

    def __init__(self, log: list[str]) -> None:
        super().__init__(lambda obj: obj, lambda: 0)
        self.log = log
        self.register_reset_callbacks(
            [lambda: log.append("callback 1"), lambda: log.append("callback 2")]
        )

    def sync(self) -> None:
        self.log.append("sync")

    def restore(self) -> None:
        self.log.append("restore")

    def reset(self) -> None:
        self.log.append("state.reset")


@pytest.mark.parametrize(
    ("error", "steps"),
    [
        (
            HorovodInternalError("gone"),
            ["restore", "reset", "state.reset", "callback 1", "callback 2", "sync"],
        ),
        (PeerLost("gone"), ["restore", "reset", "state.reset", "callback 1", "callback 2", "sync"]),
        (
            HostsUpdatedInterrupt(False),
            ["reset", "state.reset", "callback 1", "callback 2", "sync"],
        ),
        (HostsUpdatedInterrupt(True), ["reset", "state.reset", "callback 1", "callback 2"]),
    ],
)
def test_the_loop(error: Exception, steps: list[str]) -> None:
    log: list[str] = []
    errors = [error]

    def train(state: Recorder, more: int, factor: int = 1) -> int:
        log.append("train")
        state.on_hosts_updated(1, HostUpdateResult.added)
        if errors:
            raise errors.pop()
        return more * factor

    state = Recorder(log)
    assert run_fn(train, lambda: log.append("reset"))(state, 3, factor=2) == 6
    assert log == ["sync", "train", *steps, "train"]
    assert state._host_messages.qsize() == 1  # what came before the reset is forgotten


def test_a_request_that_arrives_before_the_reset_is_done_is_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The next world may be asked to change while its ranks still enter it."""
    requests: list[str] = []
    monkeypatch.setattr(elastic, "requested_changes", lambda: tuple(requests))
    errors: list[Exception] = [HostsUpdatedInterrupt(False)]

    def reset() -> None:
        requests.append("grow")
        notification_manager.note_change("grow")

    def train(state: Recorder) -> None:
        if errors:
            raise errors.pop()

    state = Recorder([])
    run_fn(train, reset)(state)
    assert state._host_messages.get()[1] == HostUpdateResult.added
    # Also one that arrived before the loop began.
    state = Recorder([])
    run_fn(train, reset)(state)
    assert state._host_messages.get()[1] == HostUpdateResult.added


def test_other_errors_end_the_loop() -> None:
    def train(state: Recorder) -> None:
        notification_manager.handle_hosts_updated(3, HostUpdateResult.added)
        raise ValueError("a mistake")

    state = Recorder([])
    with pytest.raises(ValueError, match="a mistake"):
        run_fn(train, lambda: pytest.fail("no reset"))(state)
    assert state._host_messages.qsize() == 1  # it listened
    notification_manager.handle_hosts_updated(4, HostUpdateResult.added)
    assert state._host_messages.qsize() == 1  # and does no more


def test_a_disagreement_that_repeats_is_raised() -> None:
    """Other failures are not, and neither is one after a commit."""
    calls: list[str] = []

    def train(state: Any) -> None:
        calls.append("call")
        number = calls.count("call")
        if number == 3:
            state.commit()
        error = PeerLost("lost") if number in (1, 2) else CollectiveMismatch("3 against 4")
        raise HorovodInternalError(str(error)) from error

    with pytest.raises(HorovodInternalError, match="3 against 4"):
        run_fn(train, lambda: calls.append("reset"))(lonely())
    assert calls == ["call", "reset"] * 3 + ["call"]


def test_an_error_of_a_framework_in_place_of_ours() -> None:
    state, calls = lonely(batch=0), []

    def train(state: Any) -> str:
        calls.append(state.batch)
        state.batch += 1
        if len(calls) == 1:
            kept_errors.keep(HorovodInternalError("lost rank 1"), "lost rank 1")
            raise KeyError("a callback failed: lost rank 1")
        if len(calls) == 2:
            return "done"
        raise KeyError("a callback failed: lost rank 1")

    assert run_fn(train, lambda: None)(state) == "done"
    assert calls == [0, 0]
    # Handled: the text alone means nothing.
    with pytest.raises(KeyError):
        run_fn(train, lambda: pytest.fail("no reset"))(state)


def test_a_failure_while_the_callbacks_run_is_one_too() -> None:
    """A rank can be lost then, and others join after it."""
    state, log = lonely(), []

    def callback() -> None:
        log.append("callback")
        if log.count("callback") == 1:
            raise HorovodInternalError("lost")

    def train(state: Any) -> str:
        log.append("call")
        if log.count("call") == 1:
            raise HorovodInternalError("lost")
        return "done"

    state.register_reset_callbacks([callback])
    assert run_fn(train, lambda: log.append("reset"))(state) == "done"
    assert log == ["call", "reset", "callback", "reset", "callback", "call"]
