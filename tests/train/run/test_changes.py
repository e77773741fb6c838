"""What a run reports about its workers: names, totals and lost samples, by a clock of the test."""

from typing import Any

from allstep.comm.join.membership import Place
from allstep.train.run.worlds.changes import Changes, Totals


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def place(*members: tuple[str, int], new: tuple[int, ...] = (), reason: str = "start") -> Place:
    """Return a place in a world of these members: host and process number, by rank."""
    cards = tuple({"host": host, "namespace": [4, 1], "pid": pid} for host, pid in members)
    return Place(1, 0, cards, 0, frozenset(new), frozenset(), reason)


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
