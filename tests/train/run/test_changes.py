"""What an elastic run reports about changes of its world: text, figures, totals, lost samples.

The clock is the test's, so that each duration is chosen.
"""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from allstep.comm.join.membership import Place
from allstep.data.order import even
from allstep.train.run.adapt_shares import report_new_world
from allstep.train.run.worlds import changes as changes_module
from allstep.train.run.worlds.changes import Changes, Totals
from allstep.train.watch.callback import Callback


@pytest.fixture(autouse=True)
def reported(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the commits that the launcher has received."""
    found: list[int] = []
    monkeypatch.setattr(changes_module, "report_updates", found.append)
    return found


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def place(*members: tuple[str, int], new: tuple[int, ...] = (), reason: str = "start") -> Place:
    """Return a place in a world of these members: host and process number, by rank."""
    cards = tuple({"host": host, "namespace": [4, 1], "pid": pid} for host, pid in members)
    return Place(1, 0, cards, 0, frozenset(new), frozenset(), reason)


def numbered(pids: Sequence[int], reason: str = "", new: Sequence[int] = ()) -> Place:
    """Return a place among these processes; those with an even number are on host h0, else h1."""
    return place(*((f"h{pid % 2}", pid) for pid in pids), new=tuple(new), reason=reason)


def after_a_change(changes: Changes, then: Place, *, was_lost: bool) -> tuple[str, dict[str, Any]]:
    """Leave the world, form the next one at 100 samples, and finish a step of 50 there."""
    changes.leave(was_lost=was_lost)
    changes.form(then, 100, is_due=False)
    changes.note_step(1, 100, 150)
    change = changes.end_change()
    assert change is not None and changes.end_change() is None
    return change


def begun(*members: tuple[str, int]) -> Changes:
    changes = Changes(Clock())
    changes.start(place(*members))
    changes.begin(place(*members), 0, is_due=False)
    changes.note_step(1, 0, 100)
    return changes


def test_every_lost_and_joined_worker_is_named() -> None:
    changes = begun(("a", 1), ("a", 2), ("b", 3), ("b", 4))
    reason = "lost rank 1 on a: killed by signal 9 (SIGKILL)"
    then = place(("a", 1), ("b", 4), ("a", 9), new=(2,), reason=reason)
    text, figures = after_a_change(changes, then, was_lost=True)
    assert text.startswith(
        f"{reason}; 2 workers lost (rank 1 on a, rank 2 on b); 1 worker joined (rank 2 on a);"
        " 3 workers continue from sample 100 after 0.00 s"
    )
    assert figures["lost_workers"] == ["rank 1 on a", "rank 2 on b"] and figures["lost"] == 2
    assert figures["joined_workers"] == ["rank 2 on a"] and figures["joined"] == 1


def test_a_lost_worker_that_the_reason_names_is_named_once() -> None:
    reason = "lost rank 1 on a: killed by signal 9 (SIGKILL)"
    changes = begun(("a", 1), ("a", 2))
    text, _ = after_a_change(changes, place(("a", 1), reason=reason), was_lost=True)
    assert text.startswith(f"{reason}; 1 worker continues from sample 100")


def test_a_lost_host_and_a_host_that_leaves_name_their_workers() -> None:
    reason = "lost host b: no sign of life for 10 s"
    changes = begun(("a", 1), ("b", 2), ("b", 3))
    text, _ = after_a_change(changes, place(("a", 1), reason=reason), was_lost=True)
    assert text.startswith(f"{reason}; 2 workers lost (ranks 1, 2 on b); 1 worker continues")
    reason = "b received signal 10 and leaves"
    changes = begun(("a", 1), ("b", 2), ("b", 3))
    text, _ = after_a_change(changes, place(("a", 1), reason=reason), was_lost=False)
    assert text.startswith("2 workers left (ranks 1, 2 on b); 1 worker continues")
    assert (changes.totals.lost, changes.totals.left) == (0, 2)


def test_of_many_workers_some_are_named_and_all_are_in_the_event() -> None:
    changes = begun(*(("a", pid) for pid in range(40)))
    text, figures = after_a_change(
        changes, place(("a", 0), reason="lost host a: cut"), was_lost=True
    )
    assert f"ranks {', '.join(map(str, range(1, 17)))} on a and 23 more)" in text
    assert len(figures["lost_workers"]) == 39


def test_samples_that_no_update_has_seen_are_counted_as_lost() -> None:
    """The next step begins where the last surviving update has ended, or samples are missing."""
    changes = begun(("a", 1), ("a", 2))
    then = place(("a", 1), reason="lost rank 1 on a: killed")
    changes.leave(was_lost=True)
    changes.form(then, 130, is_due=False)
    changes.note_step(1, 130, 180)
    assert changes.totals.samples_lost == 30
    changes.note_step(2, 180, 230)
    assert str(changes.totals).endswith("30 samples lost")
    # A step that is repeated loses none; a worker that joins counts on from its source.
    changes.note_step(2, 180, 230)
    joined = Changes(Clock())
    joined.take(changes.totals)
    joined.form(place(("a", 1), ("a", 3), new=(1,)), 230, is_due=False)
    joined.note_step(3, 230, 280)
    assert joined.totals.samples_lost == 30


def test_a_run_that_stops_before_its_next_world_counts_the_last_loss() -> None:
    clock = Clock()
    changes = Changes(clock)
    changes.start(place(("a", 1), ("a", 2), ("a", 3)))
    changes.begin(place(("a", 1), ("a", 2), ("a", 3)), 0, is_due=False)
    changes.note_step(1, 0, 50)
    clock.now += 1
    changes.leave(was_lost=True)
    clock.now += 2
    changes.stop(num_left=1)
    assert changes.end_change() is None
    assert str(changes.totals) == (
        "2 workers lost, 0 joined, 3.0 s without a step of 3 s, 0 samples lost"
    )
    assert Totals(samples_lost=1).has_any is False


def test_a_worker_that_is_lost_before_the_run_begins_is_a_change_too() -> None:
    changes = Changes(Clock())
    changes.start(place(("a", 1), ("a", 2)))
    changes.leave(was_lost=True)
    then = place(("a", 1), reason="lost rank 1 on a: killed")
    changes.begin(then, 0, is_due=False)
    changes.note_step(1, 0, 50)
    text, figures = changes.end_change() or ("", {})
    assert text.startswith("lost rank 1 on a: killed; 1 worker continues from sample 0 after")
    assert figures["lost"] == 1


def test_a_lost_worker_is_one_event_with_hosts_and_seconds(reported: list[int]) -> None:
    now = [100.0]
    seen = Changes(lambda: now[0])
    seen.start(numbered([2, 3, 4]))
    seen.begin(numbered([2, 3, 4]), 0, is_due=False)
    now[0] = 101.0
    seen.note_step(2, 0, 1500)
    assert seen.end_change() is None
    now[0] = 101.25
    seen.leave(was_lost=True)
    now[0] = 101.75
    seen.form(numbered([3, 4], "lost rank 0 on h0: killed"), 1500, is_due=True)
    now[0] = 102.75
    seen.note_step(4, 1500, 1550)
    change = seen.end_change()
    assert change is not None
    text, figures = change
    assert text == (
        "lost rank 0 on h0: killed; 2 workers continue from sample 1,500 after 1.75 s without a"
        " step (noticed 0.25, formed 0.50, first step 1.00)"
    )
    assert figures == {
        "generation": 1,
        "position": 1500,
        "workers": 2,
        "hosts": ["h1", "h0"],
        "due": True,
        "lost": 1,
        "joined": 0,
        "lost_workers": ["rank 0 on h0"],
        "joined_workers": [],
        "gap": 1.75,
        "noticed": 0.25,
        "formed": 0.5,
        "first_step": 1.0,
    }
    # It is reported once, and may be unrecorded until another step of that world.
    assert seen.unconfirmed == change
    seen.note_step(6, 1550, 1600)
    assert seen.unconfirmed is None
    assert seen.end_change() is None and reported == [2, 4, 6]
    assert seen.totals == Totals(lost=1, seconds=1.75, position=1600, elapsed=2.75)
    assert str(seen.totals) == (
        "1 worker lost, 0 joined, 1.8 s without a step of 3 s, 0 samples lost"
    )


@pytest.mark.parametrize(
    ("after", "was_lost", "text", "totals"),
    [
        ([2, 3, 5], False, "1 worker joined (rank 2 on h1); 3 workers", Totals(joined=1)),
        ([3], False, "1 worker left (rank 0 on h0); 1 worker continues", Totals(left=1)),
        (
            [3, 5, 7],
            False,
            "2 workers joined (ranks 1, 2 on h1), 1 worker left (rank 0 on h0); 3 workers",
            Totals(joined=2, left=1),
        ),
        ([2, 3], False, "why; 2 workers continue", Totals()),
    ],
)
def test_the_text_names_who_joined_left_or_was_lost(
    after: list[int], was_lost: bool, text: str, totals: Totals
) -> None:
    seen = Changes(lambda: 0.0)
    seen.start(numbered([2, 3]))
    seen.leave(was_lost=was_lost)
    seen.form(numbered(after, "why"), 0, is_due=False)
    change = seen.end_change()
    assert change is not None and change[0].startswith(text)
    assert seen.totals == totals and seen.totals.has_any == (totals != Totals())


def test_a_world_that_is_lost_before_its_first_step_adds_to_the_change() -> None:
    now = [0.0]
    seen = Changes(lambda: now[0])
    seen.start(numbered([2, 3, 4]))
    seen.leave(was_lost=False)
    seen.form(numbered([2, 3, 4, 5]), 100, is_due=False)
    now[0] = 1.0
    seen.leave(was_lost=True)
    seen.form(numbered([2, 5], "lost rank 1"), 100, is_due=False)
    now[0] = 3.0
    change = seen.end_change()
    assert change is not None
    assert change[0].startswith(
        "lost rank 1; 2 workers lost (rank 1 on h1, rank 2 on h0); 1 worker joined (rank 1 on h1);"
        " 2 workers continue"
    )
    assert change[1]["gap"] == 3.0 and seen.totals.lost == 2 and seen.totals.joined == 1


def test_a_worker_that_joins_reports_from_its_first_world_on() -> None:
    """It may be the next rank 0, so it has the totals of the others."""
    seen = Changes(lambda: 50.0)
    seen.take(Totals(lost=3, joined=2, seconds=4.0, elapsed=40.0))
    seen.form(numbered([2, 3, 5], new=[2]), 800, is_due=False)
    change = seen.end_change()
    assert change is not None
    assert change[0].startswith("1 worker joined (rank 2 on h1); 3 workers continue")
    assert seen.totals == Totals(lost=3, joined=3, seconds=4.0, elapsed=40.0)


class Heard(Callback):
    def __init__(self) -> None:
        self.lines: list[tuple[str, dict[str, Any]]] = []

    def event(self, text: str, **figures: Any) -> None:
        self.lines.append((text, figures))


@pytest.mark.parametrize(
    ("shares", "weights", "text"),
    [
        ("speed", even(3), "shares by speed: even at first for the 3 workers that continue"),
        ((3, 1), even(3), "shares=[3, 1] is for 2 workers: 3 workers have even shares"),
        ((3, 1), (3, 1), "shares=[3, 1] for the 2 workers that continue"),
    ],
)
def test_a_new_world_records_its_shares(shares: Any, weights: tuple[int, ...], text: str) -> None:
    job: Any = SimpleNamespace(
        config=SimpleNamespace(shares=shares),
        loaders={"train": SimpleNamespace(shares=weights)},
        progress=SimpleNamespace(batch=64),
    )
    heard = Heard()
    report_new_world(job, heard, 1280)
    assert heard.lines == [(text, {"samples": 1280, "batch": 64, "shares": list(weights)})]
    job.config.shares = "even"
    report_new_world(job, heard, 1280)
    assert len(heard.lines) == 1
