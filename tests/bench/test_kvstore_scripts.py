"""The benchmarks of codecs and of embedding rows: each runs once, tiny."""

import json
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import ModuleType

import pytest
import torch

BENCHMARKS = Path(__file__).parent.parent.parent / "benchmarks"


def run(name: str, *options: str, monkeypatch: pytest.MonkeyPatch) -> None:
    spec = spec_from_file_location(f"benchmark_{name}", BENCHMARKS / f"{name}.py")
    assert spec and spec.loader
    module: ModuleType = module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    monkeypatch.setattr(sys, "argv", [name, *options])
    threads = torch.get_num_threads()
    try:
        assert module.main() == 0
    finally:
        torch.set_num_threads(threads)


def test_codecs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "found.json"
    options = ["2bit:0.5", "bf16", "--megabytes", "1", "--rounds", "1", "--json", str(path)]
    run("codecs", *options, monkeypatch=monkeypatch)
    two_bit, half = json.loads(path.read_text())
    assert (two_bit["nbytes"], half["nbytes"]) == (1 << 16, 1 << 19)
    assert two_bit["plain"] > 0 and half["plain"] is None
    assert "pays below" in capsys.readouterr().out


@pytest.mark.usefixtures("processes")
def test_embedding_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "found.json"
    options = ["--rows", "20", "--width", "4", "--tables", "50", "500", "--rounds", "1"]
    options += ["--optimizers", "momentum", "adagrad", "--json", str(path)]
    run("embedding_rows", *options, monkeypatch=monkeypatch)
    found = json.loads(path.read_text())
    assert [each["num_rows"] for each in found["adagrad"]] == [50, 500]
    assert capsys.readouterr().out.count("(target 1.3)") == 2
