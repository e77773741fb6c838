"""The table of slow workers: the figures of a record in which one was slow for a while."""

from pathlib import Path
from typing import Any

from allstep.report import write_report
from allstep.report.stragglers import COLUMNS, find, stragglers
from support.synthetic_runs import BEGAN, lines, record, write

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
        "what to do": "look for other processes and a low clock rate on its host (`allstep doctor`),"
        " or set shares=speed",
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
