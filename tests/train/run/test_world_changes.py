"""What an elastic run reports about changes of its world: text, figures and totals.

The clock is a list of one number, so that each duration is chosen.
"""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from allstep.comm.join.membership import Place
from allstep.data.order import even
from allstep.train.run.adapt_shares import report_new_world
from allstep.train.run.worlds import changes
from allstep.train.run.worlds.changes import Changes, Totals
from allstep.train.watch.callback import Callback


@pytest.fixture(autouse=True)
def reported(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the commits that the launcher has received."""
    found: list[int] = []
    monkeypatch.setattr(changes, "report_updates", found.append)
    return found


def place(pids: Sequence[int], reason: str = "", new: Sequence[int] = ()) -> Place:
    """Return a place among these processes; those with an even number are on host h0, else h1.

    `new` has the ranks that join.
    """
    cards = tuple({"host": f"h{pid % 2}", "namespace": "pid:[1]", "pid": pid} for pid in pids)
    return Place(1, 0, cards, 0, frozenset(new), frozenset(), reason)


def test_a_lost_worker_is_one_event_with_hosts_and_seconds(reported: list[int]) -> None:
    now = [100.0]
    seen = Changes(lambda: now[0])
    seen.start(place([2, 3, 4]))
    seen.begin(place([2, 3, 4]), 0, is_due=False)
    now[0] = 101.0
    seen.note_step(2, 0, 1500)
    assert seen.end_change() is None
    now[0] = 101.25
    seen.leave(was_lost=True)
    now[0] = 101.75
    seen.form(place([3, 4], "lost rank 0 on h0: killed"), 1500, is_due=True)
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
    seen.start(place([2, 3]))
    seen.leave(was_lost=was_lost)
    seen.form(place(after, "why"), 0, is_due=False)
    change = seen.end_change()
    assert change is not None and change[0].startswith(text)
    assert seen.totals == totals and seen.totals.has_any == (totals != Totals())


def test_a_world_that_is_lost_before_its_first_step_adds_to_the_change() -> None:
    now = [0.0]
    seen = Changes(lambda: now[0])
    seen.start(place([2, 3, 4]))
    seen.leave(was_lost=False)
    seen.form(place([2, 3, 4, 5]), 100, is_due=False)
    now[0] = 1.0
    seen.leave(was_lost=True)
    seen.form(place([2, 5], "lost rank 1"), 100, is_due=False)
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
    seen.form(place([2, 3, 5], new=[2]), 800, is_due=False)
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
