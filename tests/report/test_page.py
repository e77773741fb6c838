"""The page as text: what must stand in it, what must not, and the command that writes it."""

import base64
import io
import json
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from matplotlib import colormaps
from PIL import Image

from allstep.console.quantities import count, figure, nbytes, seconds
from allstep.errors import ConfigError
from allstep.report import write_report
from allstep.report.compare import compare
from allstep.report.configs import rows
from allstep.report.heat import trust_heat
from allstep.report.run import read_runs
from allstep.train import RECIPES
from support.html_checker import Checker
from support.synthetic_runs import BEGAN, lines, write, write_rich

ALLSTEP = str(Path(sys.executable).parent / "allstep")


def text_of(page: str) -> str:
    """Words of the page without marks."""
    return " ".join(re.sub(r"<[^>]*>", " ", page).split())


def page_of(*folders: Path, now: float = BEGAN + 9999.0) -> str:
    return write_report(folders, folders[0] / "report.html", now=now).read_text()


def run_command(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [ALLSTEP, "report", *map(str, arguments)], capture_output=True, text=True, timeout=120
    )


def test_a_page_is_well_formed_whole_and_small(tmp_path: Path) -> None:
    folders = [write_rich(tmp_path / f"w{n}", workers=n, seconds=0.5 / n) for n in (1, 2, 4)]
    page = page_of(*folders)
    checker = Checker()
    checker.feed(page)
    assert checker.open == []
    assert len(checker.ids) == len(set(checker.ids))
    assert all(address.startswith("data:") for address in checker.addresses)
    assert "http://" not in page and "https://" not in page
    assert checker.alts and all(checker.alts)
    assert len(page) < 300_000
    for title in (
        "Loss",
        "Accuracy by time",
        "Learning rate",
        "Throughput",
        "Slowest worker",
        "Gradient norm",
        "Noise scale",
    ):
        assert title in page
    for title in (
        "Trust ratios",
        "Confusion matrix",
        "The worst mistakes",
        "Where each worker",
        "Files and checksums",
    ):
        assert title in page


def test_the_three_figures_are_at_the_top(tmp_path: Path) -> None:
    page = text_of(page_of(write(tmp_path / "run", lines())))
    assert "throughput 200 images/s epoch time 5 s test accuracy 93.0% of 10,000 samples" in page
    assert page.index("throughput 200") < page.index("What the curves mean")


def test_a_long_run_makes_no_large_page(tmp_path: Path) -> None:
    """90 epochs, 4,500 lines, 8 workers."""
    folder = write(tmp_path / "long", lines(epochs=90, per_epoch=50, workers=8))
    assert len(page_of(folder)) < 200_000


def test_what_a_record_says_is_text_not_markup(tmp_path: Path) -> None:
    evil = "<script>alert(1)</script>\"'><img src=x onerror=alert(2)>"
    made = lines(extra=lambda i: {"trust": {evil: 1.0 + i}})
    made[0]["machine"]["system"] = evil
    made[0]["config"]["recipe"] = evil
    made[0]["world"]["hosts"] = [evil, "h1"]
    folder = write(tmp_path / "a<b>&'\"", [*made, {"kind": "event", "time": BEGAN, "text": evil}])
    (folder / "quarantine.jsonl").write_text('{"number": "<i>", "reason": "<script>"}\n')
    page = page_of(folder)
    assert page.count("<script>") == 1
    assert "<img src=x" not in page and "<i>" not in page.replace("<i></i>", "")
    Checker().feed(page)


def test_control_characters_in_a_record_are_shown_escaped(tmp_path: Path) -> None:
    hostile = "e\x1b[2J\x07\u202evil\ud800"
    told = [
        {"kind": "event", "time": BEGAN + 1, "text": f"stopped and saved `{hostile}` {hostile}"}
    ]
    folder = write(tmp_path / hostile.replace("\ud800", ""), [*lines(), *told])
    page = page_of(folder)
    assert not re.search("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\ud800-\udfff]", page)
    assert r"e\x1b[2J\x07\u202evil" in text_of(page)


def test_of_many_workers_the_slowest_and_the_fastest_are_shown(tmp_path: Path) -> None:
    compute = [0.3 + rank / 1000 for rank in range(64)]
    times = {
        "input": [0.01],
        "compute": compute,
        "wait": [0.4 - each for each in compute],
        "update": [0.01],
    }
    folder = write(
        tmp_path / "run",
        lines(workers=64, epochs=2, times={key: (value * 64)[:64] for key, value in times.items()}),
    )
    page = text_of(page_of(folder))
    shown = [int(rank) for rank in re.findall(r"worker (\d+) (?:slowest )?\d+%", page)]
    assert shown == [0, 1, 2, 3, *range(52, 64)]
    assert "16 of 64 workers" in page


def test_a_matrix_of_many_classes_is_a_list(tmp_path: Path) -> None:
    folder = write(tmp_path / "run", lines(epochs=2))
    (folder / "mistakes").mkdir()
    counts = [
        [50 if i == j else 7 if (i, j) == (3, 900) else 0 for j in range(1000)] for i in range(1000)
    ]
    content = {"classes": [f"class {i}" for i in range(1000)], "counts": counts}
    (folder / "mistakes" / "confusion.json").write_text(json.dumps(content))
    page = page_of(folder)
    assert "class 3 class 900 7 12.3%" in text_of(page)
    assert 'class="matrix"' not in page and len(page) < 100_000


def test_trust_ratios_are_pixels() -> None:
    """Layers from the top, time from the left, logarithms of the ratios in matplotlib's viridis;
    what was not told is transparent."""
    told: list[dict[str, Any]] = [{"a": 0.01, "b": 0.1}, {"a": 1.0}, {}, {"a": 0.1, "b": 0.0}]
    heat = trust_heat([{"trust": each} for each in told])
    assert heat is not None
    assert (heat.layers, heat.low, heat.high, heat.columns) == (
        ("a", "b"),
        pytest.approx(0.01),
        pytest.approx(1.0),
        3,
    )
    image = Image.open(io.BytesIO(base64.b64decode(heat.source.partition(",")[2]))).convert("RGBA")
    expected = {(0, 0): 0.0, (1, 0): 1.0, (2, 0): 0.5, (0, 1): 0.5}
    for place, part in expected.items():
        assert image.getpixel(place) == colormaps["viridis"](part, bytes=True)
    assert [image.getpixel((x, 1))[3] for x in (1, 2)] == [0, 0]  # type: ignore[index]


def test_a_run_that_still_goes_on(tmp_path: Path) -> None:
    folder = write(tmp_path / "run", lines(end=False))
    page = text_of(page_of(folder, now=BEGAN + 41))
    assert "still going" in page
    assert "validation accuracy 94.0%" in page
    assert "did not end" in text_of(page_of(folder, now=BEGAN + 7200))


def test_a_run_without_steps_says_so(tmp_path: Path) -> None:
    page = text_of(page_of(write(tmp_path / "run", lines()[:1])))
    assert "The record has no steps yet, so there is nothing to draw." in page
    assert "throughput – epoch time – validation accuracy –" in page


def test_runs_beside_the_first(tmp_path: Path) -> None:
    folders = [
        write(tmp_path / "one", lines(workers=1)),
        write(tmp_path / "four", lines(workers=4, seconds=0.15)),
    ]
    (said,) = compare(read_runs(folders))
    assert (
        said.figures
        == "667 images/s against 200: 3.33x with 4 workers against 1 (83% of 4x); test accuracy"
        " 93.00% against 93.00%, not more than chance explains (±0.72 points with"
        " 10,000 samples)"
    )
    assert said.severity == "good"


def test_runs_that_differ_by_more_than_chance(tmp_path: Path) -> None:
    worse = lines()
    worse[-2]["accuracy"] = 0.90
    folders = [write(tmp_path / "a", lines()), write(tmp_path / "b", worse)]
    (said,) = compare(read_runs(folders))
    assert said.severity == "hint"
    assert "93.00%, more than chance explains" in said.figures


def test_equal_weights_are_said_to_be_equal(tmp_path: Path) -> None:
    folders = [write_rich(tmp_path / "a"), write_rich(tmp_path / "b")]
    assert "the last weights are equal, bit by bit" in compare(read_runs(folders))[0].figures


def test_configs_beside_their_recipe() -> None:
    digits = RECIPES["digits"]().model_dump(mode="json")
    changed = {**digits, "seed": 3, "optimizer": {**digits["optimizer"], "lr": 0.2}}
    found = {row.key: (row.recipe, *row.values) for row in rows([digits, changed]) if row.differs}
    assert found == {"seed": ("0", "0", "3"), "optimizer.lr": ("0.05", "0.05", "0.2")}
    assert not [row for row in rows([digits]) if row.differs]


def test_values_are_written_as_people_write_them() -> None:
    digits = RECIPES["digits"]().model_dump(mode="json")
    changed = {
        **digits,
        "optimizer": {**digits["optimizer"], "lr": 1e9, "weight_decay": 0.123456789},
    }
    changed["growth"] = {**digits["growth"], "at": [4.0, 6.5]}
    found = {row.key: (row.recipe, *row.values) for row in rows([changed]) if row.differs}
    assert found == {
        "optimizer.lr": ("0.05", "1e+09"),
        "optimizer.weight_decay": ("0.0005", "0.123456789"),
        "growth.at": ("none", "4, 6.5"),
    }


def test_a_batch_that_grows_is_drawn_and_told(tmp_path: Path) -> None:
    grown = lines(
        extra=lambda i: {"batch": 64 if i < 40 else 128, "memory": [400_000_000, 410_000_000]}
    )
    page = page_of(write(tmp_path / "run", grown))
    assert "64 over all workers, grown to 128" in text_of(page)
    assert "at most 410 MB of a worker" in text_of(page)
    assert "<b>Batch</b>" in page
    same = page_of(write(tmp_path / "same", lines(extra=lambda i: {"batch": 64})))
    assert (
        "64 over all workers" in text_of(same)
        and "grown" not in text_of(same)
        and "<b>Batch</b>" not in same
    )


def test_a_run_that_went_on_and_one_that_diverged_say_so_at_the_top(tmp_path: Path) -> None:
    diverged = lines(epochs=1, end=False)
    told = {"text": "the loss is nan at step 9", "step": 9, "lr": 1.0}
    diverged.append({"kind": "event", "time": diverged[-1]["time"], **told})
    resumed = [*lines(epochs=4, end=False), *lines(began=BEGAN + 500)]
    folders = [write(tmp_path / "resumed", resumed), write(tmp_path / "diverged", diverged)]
    words = text_of(page_of(*folders, now=BEGAN + 1000))
    assert "resumed finished 2 workers, resumed once" in words
    assert "diverged diverged 2 workers" in words
    assert "The run diverged" in words


def test_training_validation_and_test_are_next_to_each_other(tmp_path: Path) -> None:
    """A run of today, and an older one, whose steps are shown without a gap."""
    new, old = write(tmp_path / "new", lines()), write(tmp_path / "old", lines(sample=False))
    words = text_of(page_of(new))
    table = (
        "training validation gap test accuracy 95.00% of 10,000 94.00% of 10,000 -1.0 ± 0.6 points"
        " 93.00% of 10,000"
    )
    assert table in words and "last tenth" not in words
    both = text_of(page_of(new, old))
    assert "old, accuracy 95.00% of 100 * 94.00% of 10,000 – 93.00%" in both
    assert (
        "last tenth of an epoch of training steps" in both
        and "a fixed sample of the training split" in both
    )


def test_a_run_that_ended_early_says_why(tmp_path: Path) -> None:
    early = lines()
    early[-1]["why"] = "no better validation accuracy in 3 evaluations (evaluation.patience)"
    assert f"Ended early {early[-1]['why']}" in text_of(page_of(write(tmp_path / "run", early)))


def test_configs_of_recipes_that_are_not_ours() -> None:
    found = {
        row.key: row
        for row in rows(
            [{"recipe": "mine", "batch": 1}, {"recipe": "mine", "batch": 2, "extra": None}]
        )
    }
    assert found["batch"].differs and found["extra"].differs and not found["recipe"].differs
    assert found["extra"].values == ("–", "none")


@pytest.mark.parametrize(
    ("said", "expected"),
    [
        (seconds(0.549), "0.55 s"),
        (seconds(59.7), "1 min"),
        (seconds(75), "1 min 15 s"),
        (seconds(7500), "2 h 5 min"),
        (seconds(90000), "1 d 1 h"),
        (count(1234.5), "1,234"),
        (count(12.34), "12.3"),
        (figure(0.000012345), "1.23e-05"),
        (figure(0.37921), "0.3792"),
        (nbytes(54824), "54.8 kB"),
        (nbytes(12), "12 bytes"),
    ],
)
def test_figures_as_people_read_them(said: str, expected: str) -> None:
    assert said == expected


def test_a_page_that_cannot_be_written(tmp_path: Path) -> None:
    folder = write(tmp_path / "run", lines())
    with pytest.raises(
        ConfigError, match=r"nowhere/report.html: cannot be written: No such file or directory"
    ):
        write_report([folder], tmp_path / "nowhere" / "report.html")
    with pytest.raises(ConfigError, match="cannot be written"):
        write_report([folder], folder)
    with pytest.raises(
        ConfigError, match="a report shows 1 to 8 runs, found 9; give fewer run folders"
    ):
        write_report([folder] * 9)
    assert sorted(file.name for file in folder.iterdir()) == ["run.jsonl"]


@pytest.mark.usefixtures("processes")
def test_the_command_loads_no_torch(tmp_path: Path) -> None:
    folder = write_rich(tmp_path / "run")
    code = (
        "import sys; from allstep.cli.app import app; app(sys.argv[1:], standalone_mode=False);"
        " print('torch' in sys.modules)"
    )
    command = [sys.executable, "-c", code, "report", str(folder)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert result.stdout == f"{folder}/report.html\nFalse\n", result.stderr


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize(
    ("arguments", "words"),
    [(["nowhere"], "allstep: nowhere: there is no such folder"), ([], "Missing argument 'RUN...'")],
)
def test_wrong_use_is_a_line_and_status_2(arguments: list[str], words: str) -> None:
    result = run_command(*arguments)
    assert result.returncode == 2
    assert words in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.usefixtures("processes")
def test_a_real_run(tmp_path: Path) -> None:
    """What `allstep train` writes today is what the report reads."""
    run = tmp_path / "run"
    train = [
        ALLSTEP,
        "train",
        "digits",
        "epochs=2",
        "log_every=2",
        "--workers",
        "2",
        "--out",
        str(run),
    ]
    subprocess.run(train, check=True, capture_output=True, timeout=170)
    result = run_command(run)
    assert (result.returncode, result.stdout, result.stderr) == (0, f"{run}/report.html\n", "")
    page = (run / "report.html").read_text()
    words: Any = text_of(page)
    for part in (
        "test accuracy",
        "2 on 1 host with 1 thread each",
        "1,294 train, 143 validation, 360 test",
        "worker 1",
        "finished",
        "Too short for a verdict on over- or underfitting",
        "a fixed sample of the training split",
    ):
        assert part in words, part
    assert "Some files could not be read completely" not in words
    assert re.search(
        r"accuracy [\d.]+% of 143 [\d.]+% of 143 [+-][\d.]+ ± [\d.]+ points [\d.]+% of 360 loss",
        words,
    )
    assert (
        page.count("<polyline") == 2 + 2 + 4
    )  # loss, accuracy, rate, throughput, slowest worker, norm of the gradient
    assert time.strftime("%Y") in words
