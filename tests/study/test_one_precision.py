"""One precision for all runs of a study: by faked CPU flags, kept in the folder, or settled by a
process of its own."""

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from allstep.errors import ConfigError
from allstep.study import StudyFolder
from allstep.study import one_precision as module
from allstep.study.batch.study import BatchGrid
from allstep.study.one_precision import OnePrecision, one_precision, settled_apart
from allstep.study.updates.study import UpdatesSearch
from allstep.train import read_config

AUTO = read_config("digits")
NATIVE, EMULATED = frozenset({"avx512_bf16"}), frozenset({"avx2"})


@pytest.fixture(autouse=True)
def no_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(module, "count_gpus", lambda: 0)


def grid(precision: str | None) -> BatchGrid:
    return BatchGrid(
        "digits", ("data.name=digits",), 64, 1, None, {"plain": ()}, {"64/plain": 1}, precision
    )


def search(precision: str | None) -> UpdatesSearch:
    return UpdatesSearch("digits", (), 0.05, 64, (64,), 2, 0.5, 1, 0.5, precision=precision)


def test_the_machine_decides_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A study that is resumed on the other kind of machine keeps what it was begun with."""
    folder = StudyFolder(tmp_path)
    monkeypatch.setattr(module, "cpu_flags", lambda: NATIVE)
    begun = one_precision(AUTO, folder)
    assert begun == OnePrecision("bfloat16", "this CPU computes in it, flag avx512_bf16")
    with folder.held(grid(begun.name).study()):
        pass
    assert json.loads((tmp_path / "study.json").read_text())["precision"] == "bfloat16"
    monkeypatch.setattr(module, "cpu_flags", lambda: EMULATED)
    resumed = one_precision(AUTO, folder)
    assert resumed == OnePrecision("bfloat16", "kept from the start of the study")
    with folder.held(grid(resumed.name).study()):
        pass
    elsewhere = one_precision(AUTO, StudyFolder(tmp_path / "other"))
    assert elsewhere is not None and elsewhere.name == "float32"


def test_a_precision_that_is_named_stays(tmp_path: Path) -> None:
    assert (
        one_precision(read_config("digits", ["precision=float64"]), StudyFolder(tmp_path)) is None
    )


@pytest.mark.parametrize("make", [grid, search])
def test_every_run_gets_it(make: Any) -> None:
    (trial,) = make("bfloat16").study().wanted({})
    assert "precision=bfloat16" in trial.command
    (other,) = make("float32").study().wanted({})
    assert other.settings != trial.settings, "a run in another precision is another run"
    (plain,) = make(None).study().wanted({})
    assert not any(word.startswith("precision=") for word in plain.command)


def test_a_study_from_before_has_it_in_its_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "cpu_flags", lambda: EMULATED)
    folder = StudyFolder(tmp_path)
    with folder.held(grid(None).study()):
        pass
    assert one_precision(AUTO, folder).name == "float32"  # type: ignore[union-attr]
    for name, precision in (("a", "auto"), ("b", "bfloat16")):
        (tmp_path / "runs" / name).mkdir()
        start = {"kind": "start", "time": 1.0, "config": {"precision": precision}}
        (tmp_path / "runs" / name / "run.jsonl").write_text(json.dumps(start) + "\n")
    assert one_precision(AUTO, folder) == OnePrecision(
        "bfloat16", "kept from the start of the study"
    )


def test_unknown_flags_and_gpus_are_settled_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "settled_apart", lambda config: OnePrecision("float32", "timed"))
    monkeypatch.setattr(module, "cpu_flags", lambda: None)
    assert one_precision(AUTO, StudyFolder(tmp_path)) == OnePrecision("float32", "timed")
    monkeypatch.setattr(module, "cpu_flags", lambda: NATIVE)
    monkeypatch.setattr(module, "count_gpus", lambda: 1)
    assert one_precision(AUTO, StudyFolder(tmp_path)) == OnePrecision("float32", "timed")
    on_cpu = one_precision(read_config("digits", ["device=cpu"]), StudyFolder(tmp_path))
    assert on_cpu is not None and on_cpu.name == "bfloat16"


@pytest.mark.usefixtures("processes")
def test_a_process_of_its_own_settles_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A real one, limited so that the answer is the same on every CPU."""
    monkeypatch.setenv("ONEDNN_MAX_CPU_ISA", "AVX2")
    assert settled_apart(AUTO).name == "float32"


@pytest.mark.usefixtures("processes")
def test_what_is_wrong_there_is_one_line() -> None:
    nowhere = AUTO.model_copy(update={"data": AUTO.data.model_copy(update={"train": "nowhere"})})
    with pytest.raises(ConfigError) as caught:
        settled_apart(nowhere)
    text = str(caught.value)
    assert (
        text.startswith("precision=auto could not be settled: ")
        and "nowhere" in text
        and "\n" not in text
    )

    def never_ends(*_: Any, **options: Any) -> Any:
        raise subprocess.TimeoutExpired("allstep", options["timeout"])

    with pytest.raises(ConfigError, match="no answer after 600 s of timing; set precision=float32"):
        settled_apart(AUTO, never_ends)
