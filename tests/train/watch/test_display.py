"""The text that `Display` writes to a terminal or a file."""

import contextlib
import io
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from allstep.train.config.run_config import RunConfig
from allstep.train.watch import terminal as display
from allstep.train.watch.events import Evaluated, Opening, Result, Score, TrainingScore
from allstep.train.watch.terminal import (
    Display,
    banner,
    batch_line,
    final_figures,
    lr_line,
    warnings,
)
from support.callback_events import CONFIG, opening, progress

SCORE = Score(0.5, 0.9123, 360, 0.995)
RESULT = Result(SCORE, SCORE, 1234.5, 2.0, 5.0, Path("/out"), 2000)


def show(
    send: Callable[[Display], Any], terminal: bool = False, begin: Opening | None = None
) -> str:
    """Return what a display writes for some events after its banner."""
    stream = io.StringIO()
    shown = Display(Console(file=stream, force_terminal=terminal, width=140, highlight=False))
    shown.start(begin or opening())
    banner_ends = 0 if terminal else len(stream.getvalue())
    send(shown)
    shown.close()
    return stream.getvalue()[banner_ends:]


def a_run(shown: Display) -> None:
    shown.progress(progress(640))
    shown.evaluated(Evaluated(1, 1000, SCORE, SCORE, 2.0))
    shown.saved(1000, Path("/out/checkpoints/000000001000"))
    shown.event("the batch grows from 64 to 128 [bold]", batch=128)
    shown.end(RESULT)


@pytest.mark.parametrize("terminal", [False, True])
def test_the_next_rank_0_of_an_elastic_run_continues_without_a_banner(terminal: bool) -> None:
    """The lost one has printed it. A progress bar continues at the position of the run."""
    stream = io.StringIO()
    shown = Display(Console(file=stream, force_terminal=terminal, width=140, highlight=False))
    shown.take_over(opening(position=640))
    assert (shown.bar is not None) == terminal
    if shown.bar is not None:
        (task,) = shown.bar.tasks
        assert (task.completed, task.total) == (640, 2000)
        assert task.fields["epoch"] == "1/2"
    shown.event("lost rank 0")
    shown.progress(progress(1280))
    shown.evaluated(Evaluated(2, 2000, SCORE, SCORE, 2.0))
    shown.close()
    text = stream.getvalue()
    assert "trains" not in text and "run folder" not in text
    lines = [line.rstrip() for line in text.splitlines()]
    assert terminal or lines == [
        "note: lost rank 0",
        "epoch 2/2  loss 0.500  accuracy 91.2%  validation 91.2%       640 images/s  2.0 s",
    ]


def test_plain_lines_where_there_is_no_terminal() -> None:
    text = show(a_run)
    assert "\x1b" not in text and "\r" not in text
    assert [line.rstrip() for line in text.splitlines() if line.strip()] == [
        "epoch 1/2  loss 0.500  accuracy 91.2%  validation 91.2%       640 images/s  2.0 s",
        "saved after 1,000 samples",
        "note: the batch grows from 64 to 128 [bold]",
        "  test accuracy         91.23% of 360 images",
        "  images/s              1,234",
        "  seconds per epoch     2.0",
        "  validation accuracy   91.23%",
        "  weights tested        the last ones",
        "  test loss             0.5000",
        "  total seconds         5.0",
        "look at it: allstep report /out",
    ]


def test_a_bar_on_a_terminal() -> None:
    text = show(a_run, terminal=True)
    assert "640 images/s" in text
    assert "left  saved at 1,000" in text
    assert "saved after" not in text


@pytest.mark.parametrize(
    ("event", "text"),
    [
        (
            Evaluated(1, 1000, SCORE, SCORE, 2.0, is_best=True),
            "epoch 1/2  loss 0.500  accuracy 91.2%  validation 91.2% best  ",
        ),
        (Evaluated(1, 250, SCORE, SCORE, 2.0), "epoch 0.25/2  loss"),
        (
            Evaluated(1, 1000, SCORE, SCORE, 2.0, num_bad=1234),
            "180 images/s  2.0 s  1,234 bad samples skipped",
        ),
        (Evaluated(1, 1000, Score(0.0, 0.0, 0), SCORE, 0.0), "validation 91.2%       0.0 s"),
    ],
)
def test_the_line_of_an_evaluation(event: Evaluated, text: str) -> None:
    assert text in show(lambda shown: shown.evaluated(event))


def test_top_5_where_there_are_many_classes() -> None:
    many = opening(classes=tuple(map(str, range(11))))
    text = show(
        lambda shown: (shown.evaluated(Evaluated(1, 1000, SCORE, SCORE, 2.0)), shown.end(RESULT)),
        begin=many,
    )
    assert "validation 91.2% (top-5 99.5%)" in text
    assert "test top-5            99.50%" in text


def test_a_bar_is_replaced_by_a_line_a_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 1000.0
    monkeypatch.setattr(display, "time", SimpleNamespace(monotonic=lambda: now))

    def send(shown: Display) -> None:
        nonlocal now
        for seconds in (1, 30, 59, 61, 62, 120, 122):
            now = 1000.0 + seconds
            shown.progress(progress(seconds))
            shown.saved(seconds, Path("/out"))

    assert [line.split("  loss")[0] for line in show(send).splitlines()] == [
        "saved after 1 samples",
        "epoch 1/2  61 samples",
        "saved after 61 samples",
        "epoch 1/2  122 samples",
        "saved after 122 samples",
    ]


def test_the_banner_shows_what_runs_where() -> None:
    lines = banner(opening(share_weights=True))
    assert [name for name, _ in lines[:2]] == ["recipe", "changed"]
    assert lines[2:] == [
        ("hosts", "h1 (2)"),
        ("workers", "2, 1 thread each"),
        ("device", "CPU"),
        ("data", "8x8 digits: 1,000 train, 143 validation, 360 test, from /d"),
        ("model", "1,000 parameters, 1.0 MFLOP per image"),
        ("execution", "plain"),
        ("weights", "one copy on each host"),
        ("batch", "32 per worker x 2 workers = 64"),
        ("lr", "0.05 at batch 64 -> 0.05 at batch 64 (scaling: linear)"),
        ("schedule", "2 epochs: warm-up of 0.1, then cosine"),
        ("run folder", "/out"),
    ]


def test_the_banner_shows_how_many_samples_are_not_used() -> None:
    (line,) = [value for name, value in banner(opening(num_unused=294)) if name == "data"]
    assert line == "8x8 digits: 1,000 train (294 unused), 143 validation, 360 test, from /d"


def test_the_banner_shows_the_cost_of_shared_weights_in_an_elastic_run() -> None:
    lines = dict(banner(opening(share_weights=True, undo_nbytes=244_403_360)))
    expected = (
        "one copy on each host; updates keep an undo copy of 244 MB and the optimizer's state"
    )
    assert lines["weights"] == expected
    assert dict(banner(opening()))["weights"] == "each worker has its own"


def test_the_banner_shows_what_is_special() -> None:
    lines = dict(banner(opening(num_workers=1, position=12345, precision="bfloat16")))
    assert lines["precision"] == "bfloat16"
    assert lines["resumes"] == "after 12,345 samples"
    assert "weights" not in lines


def test_the_banner_shows_which_precision_was_chosen_and_why() -> None:
    lines = dict(
        banner(opening(precision="float32", precision_why="this CPU has no bfloat16 arithmetic"))
    )
    assert lines["precision"] == "float32 (auto: this CPU has no bfloat16 arithmetic)"


def test_notes_and_warnings_follow_the_banner() -> None:
    stream = io.StringIO()
    optimizer = CONFIG.optimizer.model_copy(update={"scaling": "none"})
    config = CONFIG.model_copy(update={"batch": 128, "optimizer": optimizer})
    begin = opening(config=config, notes=("compiling [x] costs more than it saves",))
    Display(Console(file=stream, width=140, highlight=False)).start(begin)
    assert stream.getvalue().splitlines()[-2:] == [
        (
            "warning: optimizer.lr=0.05 is for batch 64, the batch is 128 and optimizer.scaling is"
            " none"
        ),
        "note: compiling [x] costs more than it saves",
    ]


def test_the_table_shows_how_it_ended() -> None:
    best = Result(
        SCORE,
        SCORE,
        1.0,
        2.0,
        5.0,
        Path("/a b"),
        900,
        Score(0.4, 0.95, 143),
        "best",
        "no better score in 3 evaluations",
        num_bad=7,
    )
    lines = dict(final_figures(best))
    assert next(iter(lines)) == "test accuracy"
    assert lines["best validation"] == "95.00%"
    assert lines["weights tested"] == "the best ones"
    assert lines["ended early"] == "no better score in 3 evaluations"
    assert lines["bad samples"] == "7 skipped"
    assert "look at it: allstep report '/a b'" in show(lambda shown: shown.end(best))
    assert "training accuracy" not in lines
    with_sample = replace(best, train=TrainingScore(SCORE, 900, 1.25))
    assert (
        dict(final_figures(with_sample))["training accuracy"]
        == "91.23% of 360 training samples, evaluated in 1.25 s"
    )


def test_the_sum_of_the_batch() -> None:
    assert batch_line(CONFIG, 3) == "21 or 22 per worker x 3 workers = 64"
    assert (
        batch_line(CONFIG.model_copy(update={"accumulation": 4}), 2)
        == "8 per worker x 2 workers x 4 accumulated = 64"
    )
    per_worker = RunConfig(batch_per_worker=10).resolved(1)
    assert batch_line(per_worker, 1) == "10 per worker x 1 worker = 10"


@pytest.mark.parametrize(
    ("changed", "num_workers", "expected"),
    [
        ({"shares": "speed"}, 2, "32 per worker x 2 workers = 64, then by speed"),
        ({"shares": "speed"}, 1, "64 per worker x 1 worker = 64"),
        ({"shares": (3, 1)}, 2, "48 + 16 = 64 (shares [3, 1])"),
        (
            {"shares": (3, 1), "accumulation": 4},
            2,
            "48 + 16 = 64 (shares [3, 1], 4 accumulated)",
        ),
        (
            {"shares": (1,) * 8 + (8,)},
            9,
            "4 to 32 per worker x 9 workers = 64 (shares [1, 1, 1, 1, 1, 1, 1, 1, 8])",
        ),
    ],
)
def test_the_line_of_a_batch_in_uneven_shares(
    changed: dict[str, Any], num_workers: int, expected: str
) -> None:
    assert batch_line(CONFIG.model_copy(update=changed), num_workers) == expected


def test_the_rate_and_the_warning() -> None:
    scaled = CONFIG.model_copy(update={"batch": 128})
    assert lr_line(scaled, 0.1) == "0.05 at batch 64 -> 0.1 at batch 128 (scaling: linear)"
    assert warnings(scaled) == []
    unscaled = CONFIG.model_copy(
        update={"optimizer": CONFIG.optimizer.model_copy(update={"scaling": "none"})}
    )
    assert warnings(unscaled) == []


@pytest.mark.parametrize("terminal", [False, True])
def test_names_are_shown_and_not_obeyed(terminal: bool) -> None:
    """Control characters are escaped in the banner, in notes and in the final table."""
    hostile, harmless = "e\x1b]0;t\x07\r\n\u202e[red]", r"e\x1b]0;t\x07\r\n\u202e[red]"

    def send(shown: Display) -> None:
        shown.event(hostile)
        shown.end(replace(RESULT, why=hostile, out=Path(f"/{hostile}")))

    begin = replace(opening(), data_folder=Path(f"/{hostile}"), notes=(hostile,))
    stream = io.StringIO()
    shown = Display(
        Console(file=stream, force_terminal=terminal, width=140, highlight=False, color_system=None)
    )
    shown.start(begin)
    send(shown)
    shown.close()
    text = stream.getvalue()
    assert text.count(harmless) == 5
    assert not any(each in text for each in ("\x1b]", "\x07", "\u202e"))


def test_a_full_disk_under_standard_output_is_reported_once(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with Path("/dev/full").open("w") as full:
        display = Display(Console(file=full, highlight=False))
        for _ in range(3):
            with pytest.raises(OSError, match="No space left"):
                display.event("a line")
        with contextlib.suppress(OSError):
            full.close()
    expected = (
        "allstep: standard output cannot be written: No space left on device; the run continues\n"
    )
    assert capsys.readouterr().err == expected
