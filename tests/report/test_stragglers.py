"""The table of slow workers: the figures of a record in which one was slow for a while."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from allstep.report import write_report
from allstep.report.judge import straggler
from allstep.report.stragglers import COLUMNS, find, stragglers
from allstep.runlog import RunRecord
from support.synthetic_runs import BEGAN, lines, record, start, write

USUAL, SLOW = 0.3, 0.45


def times(line: int, first: int, last: int) -> dict[str, Any]:
    """Return four workers on hosts h0 and h1, of which worker 1 is slow in some lines."""
    compute = [USUAL, SLOW if first <= line < last else USUAL, USUAL, USUAL]
    wait = [0.47 - each for each in compute]
    return {"input": [0.01] * 4, "compute": compute, "wait": wait, "update": [0.02] * 4}


def made(first: int, last: int, **options: Any) -> list[dict[str, Any]]:
    return lines(workers=4, extra=lambda line: times(line, first, last), **options)


def test_one_row_has_who_where_since_when_and_what_it_cost() -> None:
    found = stragglers(record(made(30, 60)))
    assert found is not None and found.left_out == 0
    (row,) = found.rows
    assert dict(zip(COLUMNS, row, strict=True)) == {
        "which": "worker 1 on h0",
        "part": "compute",
        "slower": "1.45 times",
        # A line has 100 samples, and a batch 64.
        "time a step": "288 ms, others 192 ms",
        "from": "epoch 3",
        "for": "15 s",
        # 100 samples in 0.5 s, of which 0.15 s are the difference.
        "cost": "86 of 286 images/s",
        "what to do": "look for other processes and a low clock rate on its host (`allstep doctor`);"
        " if it stays slow, asynchronous training (sync=async) gains up to 1.3x; uneven shares"
        " (shares=speed) gain the same without staleness",
    }


def test_no_row_where_no_worker_is_slow_for_long() -> None:
    for first, last in ((0, 0), (30, 34)):
        assert stragglers(record(made(first, last))) is None
    assert stragglers(record(lines(workers=1))) is None
    assert find(record(lines(epochs=0, end=False))) == []


def test_the_most_costly_come_first_and_the_rest_is_counted() -> None:
    def extra(line: int) -> dict[str, Any]:
        return times(line, 0, 1000 if line % 10 < 5 + (line > 200) else 0)

    found = stragglers(record(lines(workers=4, epochs=25, extra=extra)))
    assert found is not None
    assert (len(found.rows), found.left_out) == (20, 5)
    assert found.rows[0][5] == "3 s"


def test_the_page_has_the_table(tmp_path: Path) -> None:
    slow, usual = (
        write(tmp_path / name, made(20, 40 if name == "slow" else 20)) for name in ("slow", "usual")
    )
    page = write_report([slow, usual], tmp_path / "page.html", now=BEGAN + 9999).read_text()
    assert page.count("Slow workers and hosts</h2>") == 1
    assert "<td>worker 1 on h0</td>" in page and "<code>allstep doctor</code>" in page
    other = write_report([usual], tmp_path / "other.html", now=BEGAN + 9999).read_text()
    assert "Slow workers" not in other


# Several worlds


def several(
    *worlds: tuple[str, Sequence[str], int, int | None], names_hosts: bool = True
) -> RunRecord:
    """Return a record of worlds: how each begins ("event" of an elastic run, or "start"), the host
    of each rank, the number of step lines, and the rank that is slow.

    800 samples at the end of each world have no step line, since their interval was in progress.
    """
    made: list[dict[str, Any]] = []
    number = samples = 0
    for kind, hosts, num_lines, slow in worlds:
        named = {"hosts": list(hosts)} if names_hosts else {}
        begin = {"text": "lost rank 0", "gap": 0.1, **named}
        if kind == "start":
            begin = {**start(len(hosts), 8), "world": named}
        made.append({**begin, "kind": kind, "time": BEGAN + number * 0.5 + 0.1})
        for _ in range(num_lines):
            number, samples = number + 1, samples + 100
            compute = [SLOW if rank == slow else USUAL for rank in range(len(hosts))]
            wait = [0.47 - each for each in compute]
            own = {"input": [0.01] * len(hosts), "update": [0.02] * len(hosts)}
            speed = {"seconds": 0.5, "images_per_second": 200.0, "samples": samples}
            at = {"kind": "step", "time": BEGAN + number * 0.5}
            made.append({**at, **speed, **own, "compute": compute, "wait": wait})
        samples += 800
    return record(made)


def found_in(made: RunRecord) -> list[tuple[str, int, int]]:
    return [(each.name, each.since, each.until) for each in find(made)]


THREE, TWO = ("a", "b", "b"), ("a", "b")


def test_a_worker_that_was_slow_before_the_workers_changed_is_found() -> None:
    made = several(("start", THREE, 40, 1), ("event", TWO, 20, None))
    assert found_in(made) == [("worker 1 on b", 0, 4000)]


def test_each_world_is_searched_by_itself_and_with_its_hosts() -> None:
    """Three workers, then two, then three others. The speed is that of the lines alone."""
    made = several(
        ("start", ("a", "b", "c"), 10, 1), ("event", ("a", "c"), 10, None), ("event", THREE, 10, 1)
    )
    assert found_in(made) == [("host b (worker 1)", 0, 1000), ("worker 1 on b", 3600, 4600)]
    assert [round(each.speed) for each in find(made)] == [200, 200]


def test_a_spare_on_another_host_is_another_worker() -> None:
    made = several(("start", TWO, 10, 1), ("event", ("a", "c"), 10, 1))
    assert [name for name, _, _ in found_in(made)] == ["host b (worker 1)", "host c (worker 1)"]
    assert straggler(made) is not None and "worker 1 on c works" in straggler(made).figures


@pytest.mark.parametrize(
    ("then", "expected"),
    [
        (TWO, [("host b (worker 1)", 0, 2800)]),
        (("a", "c"), [("host b (worker 1)", 0, 1000), ("host c (worker 1)", 1800, 2800)]),
    ],
    ids=["the same hosts", "others"],
)
def test_a_resumed_run_continues_its_world_on_the_same_hosts(then: Any, expected: Any) -> None:
    assert found_in(several(("start", TWO, 10, 1), ("start", then, 10, 1))) == expected


def test_a_record_without_hosts_has_rows_without_hosts() -> None:
    """As earlier versions wrote it in elastic runs."""
    made = several(("start", THREE, 10, 1), ("event", TWO, 10, 0), names_hosts=False)
    assert found_in(made) == [("worker 1", 0, 1000), ("worker 0", 1800, 2800)]
