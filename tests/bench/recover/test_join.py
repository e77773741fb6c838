"""`allstep bench recover --part join`: a real worker joins, once; figures from made-up notes."""

import io
import json

import pytest
from rich.console import Console

from allstep.bench.recover.join import measure_joins
from allstep.bench.recover.join_result import COPY, FUNCTIONS, SINGLE, TORCH, Joining, JoinRow
from allstep.bench.recover.notes import Note
from allstep.bench.recover.result import RecoverResult


@pytest.mark.usefixtures("processes")
@pytest.mark.timeout(500)
def test_a_worker_joins() -> None:
    """With the small CNN, whose weights and momentum have 6.4 MB."""
    (row,) = measure_joins(1, models=["small-cnn"])
    assert row.nbytes == 2 * 4 * 805_576
    assert set(row.broadcasts) == {COPY, FUNCTIONS, SINGLE, TORCH}
    assert all(len(seconds) == 1 for seconds in row.broadcasts.values())
    (joining,) = row.joinings
    assert 0 < joining.entered < joining.entered + joining.broadcast + joining.saved < joining.gap
    assert joining.pause < joining.gap < 60


def test_the_parts_of_a_pause() -> None:
    """The commit of the last step also saves, before the world ends."""
    kinds = [("step", 0.0), ("saving", 0.1), ("syncing", 1.0), ("saving", 1.5), ("synced", 1.75)]
    steps = [("step", 3.0 + 0.5 * number) for number in range(4)]
    notes = [Note(kind, at, 3) for kind, at in (*kinds, *steps)]
    assert Joining.of(notes) == Joining(gap=3.0, step=0.5, entered=1.0, broadcast=0.5, saved=0.25)
    assert Joining.of(notes).pause == 2.5


def test_the_tables() -> None:
    joinings = [Joining(pause + 0.1, 0.1, 0.1, 0.05, 0.02) for pause in (0.2, 0.3, 0.7)]
    broadcasts = {COPY: [0.01, 0.02, 0.03], FUNCTIONS: [0.05, 0.05, 0.07]}
    row = JoinRow("resnet18", 89_000_000, joinings, broadcasts)
    result = RecoverResult([], [], [], [row])
    (found,) = json.loads(result.to_json())["rows"]
    assert found["median"] == pytest.approx(0.3)
    assert found["copies"] == pytest.approx(15)
    assert found["target"] == 0.3
    console = Console(width=200, file=io.StringIO(), record=True)
    console.print(result.table())
    text = console.export_text()
    assert "resnet18, 89 MB" in text
    assert "hvd functions" in text
    assert "forming" not in text
