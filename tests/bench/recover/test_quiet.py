"""`allstep bench recover --part quiet`: two real sets of workers, a short turn; made-up figures."""

import io
import json

import pytest
from rich.console import Console

from allstep.bench.recover.quiet import QuietPair, QuietRow, measure_quiet
from allstep.bench.recover.result import RecoverResult


@pytest.mark.usefixtures("processes")
@pytest.mark.timeout(300)
def test_the_smallest_run() -> None:
    named: list[str] = []
    row = measure_quiet(2, named.append, seconds_per_turn=0.01)
    assert len(row.pairs) == len(named) == 2
    assert all(0 < pair.ratio < 1000 for pair in row.pairs)


def test_the_median_of_the_ratios_counts() -> None:
    """Not the ratio of the medians: the machine changes its speed between the pairs."""
    pairs = QuietPair(1.0, 1.01), QuietPair(9.0, 9.0), QuietPair(2.0, 2.2)
    row = QuietRow(pairs)
    assert row.ratio == pytest.approx(1.01)
    result = RecoverResult([], [], [], quiet=row)
    (found,) = json.loads(result.to_json())["rows"]
    assert found["ratios"] == pytest.approx([1.01, 1.0, 1.1])
    console = Console(width=200, file=io.StringIO(), record=True)
    console.print(result.table())
    assert "a step when no worker is lost" in console.export_text()
