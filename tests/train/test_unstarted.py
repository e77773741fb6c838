"""Folders of runs that never began go; whatever else is in a folder makes it stay as it is."""

from pathlib import Path

import pytest

from allstep.train.unstarted import remove_unstarted


def filled(folder: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


@pytest.mark.parametrize("more", [{}, {"run.jsonl": ""}, {"run.jsonl": "", "run.lock": "{}"}])
def test_nothing_has_begun(tmp_path: Path, more: dict[str, str]) -> None:
    folder = filled(tmp_path / "lr=0.1", {"config.yaml": "a: 1", **more})
    assert remove_unstarted(folder)
    assert not folder.exists()
    assert not remove_unstarted(folder), "it is gone"


@pytest.mark.parametrize(
    "name", ["run.jsonl", "checkpoints/000000000100/state.json", "notes.txt", "tensorboard/events"]
)
def test_something_is_there(tmp_path: Path, name: str) -> None:
    folder = filled(tmp_path / "out", {"config.yaml": "a: 1", name: "x"})
    assert not remove_unstarted(folder)
    assert (folder / name).read_text() == "x"
    assert (folder / "config.yaml").exists()
