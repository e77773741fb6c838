"""What the terminal shows."""

import io
from pathlib import Path

from rich.console import Console

from allstep.train import read_config
from allstep.train.display import Display, banner, batch_sum, rate_line, warnings
from allstep.train.watch import EpochEnd, Opening, Progress, Result, Score
from allstep.world import World

SCORE = Score(0.5, 0.9123, 360)


def opening(*words: str, num_workers: int = 2) -> Opening:
    config = read_config("digits", words).resolved(num_workers)
    world = World(0, num_workers, 0, num_workers, 0, 1, "h1", "allstep")
    samples = {"train": 1294, "validation": 143, "test": 360}
    hosts, threads = ("h1",) * num_workers, (1,) * num_workers
    return Opening(
        config, world, hosts, threads, "CPU", "8x8 digits", Path("/d"), samples, 0.1, 1000, 4000, 10**6, Path("/out")
    )


def show(terminal: bool) -> str:
    stream = io.StringIO()
    display = Display(Console(file=stream, force_terminal=terminal, width=100, highlight=False))
    display.start(opening("epochs=2"))
    display.progress(Progress(0, 640, 1.0, 0.5, 0.1, 1.0, 640.0, {}))
    display.epoch(EpochEnd(0, 1294, SCORE, SCORE, 2.0))
    display.end(Result(SCORE, SCORE, 1234.5, 2.0, 5.0, Path("/out")))
    return stream.getvalue()


def test_plain_lines_where_there_is_no_terminal() -> None:
    text = show(terminal=False)
    assert "\x1b" not in text
    assert "\r" not in text
    assert "epoch 1/2  loss 0.500  accuracy 91.2%  validation 91.2%  647 images/s  2.0 s" in text
    assert "test accuracy       91.23% of 360 pictures" in text
    assert "run folder: /out" in text


def test_a_bar_on_a_terminal() -> None:
    text = show(terminal=True)
    assert "640 images/s" in text
    assert "left" in text


def test_the_banner_says_what_runs_where() -> None:
    lines = dict(banner(opening()))
    assert lines["hosts"] == "h1 (2)"
    assert lines["workers"] == "2, 1 thread each"
    assert lines["batch"] == "32 per worker x 2 workers = 64"
    assert lines["data"] == "8x8 digits: 1,294 train, 143 validation, 360 test, from /d"
    assert lines["run folder"] == "/out"


def test_the_sum_of_the_batch() -> None:
    assert batch_sum(opening(num_workers=3).config, 3) == "21 or 22 per worker x 3 workers = 64"
    assert batch_sum(opening("accumulation=4").config, 2) == "8 per worker x 2 workers x 4 accumulated = 64"
    assert batch_sum(opening("batch_per_worker=10").config, 1) == "20 per worker x 1 worker = 20"


def test_the_rate_and_the_warning() -> None:
    scaled, unscaled = opening("batch=128").config, opening("batch=128", "optimizer.scaling=none").config
    assert rate_line(scaled, 0.1) == "0.05 at batch 64 -> 0.1 at batch 128 (scaling: linear)"
    assert warnings(scaled) == []
    assert warnings(unscaled) == ["the rate 0.05 belongs to batch 64, the batch is 128 and optimizer.scaling is none"]
    assert warnings(opening("optimizer.scaling=none").config) == []
