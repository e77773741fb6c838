"""Checks before a run: data, damaged files, run folder, number of workers.

None of them needs torch.
"""

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import allstep.data.sets.catalogue
from allstep.data.sets.load import FILES, NAMED, NamedSet
from allstep.data.sources import idx
from allstep.errors import ConfigError, DataError, UserError
from allstep.train import read_config
from allstep.train.config.check_config import notes
from allstep.train.config.num_workers import choose_num_workers, count_gpus, default_num_workers
from allstep.train.folder.claim import claim_folder
from allstep.train.run.prepare import check, prepare


@pytest.fixture
def no_fashion(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Simulate a machine without Fashion-MNIST, whose server does not answer."""
    nowhere = NamedSet(
        "fashion-mnist", "Fashion-MNIST", (), "http://127.0.0.1:9/", dict.fromkeys(FILES, "")
    )
    monkeypatch.setattr(allstep.data.sets.catalogue, "NAMED", {**NAMED, "fashion-mnist": nowhere})
    monkeypatch.setenv("ALLSTEP_CACHE", str(tmp_path / "cache"))


@pytest.mark.usefixtures("no_fashion")
def test_data_that_is_nowhere_gives_way_to_the_digits() -> None:
    prepared = prepare(overrides=["epochs=2"])
    assert prepared.config.recipe == prepared.config.data.name == "digits"
    assert prepared.config.epochs == 2
    assert prepared.note is not None
    assert prepared.note.startswith(
        "training on the 8x8 digits that come with allstep: Fashion-MNIST is not in"
    )
    with pytest.raises(DataError, match="Fashion-MNIST is not in"):
        prepare("fashion-mnist-large")  # who asks for another recipe than the default one means it
    assert "\n" not in prepared.note
    check(prepared)


@pytest.mark.usefixtures("no_fashion")
def test_data_that_was_asked_for_by_name_does_not_give_way(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="Fashion-MNIST is not in"):
        prepare(overrides=["data.name=fashion-mnist"])
    path = tmp_path / "config.yaml"
    path.write_text(read_config().to_yaml())
    with pytest.raises(DataError, match="Fashion-MNIST is not in"):
        prepare(str(path))


def test_a_folder_that_was_given_does_not_give_way(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=f"expected {FILES[0]}"):
        prepare(folder=tmp_path)


def test_the_folder_is_kept_in_the_config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in FILES:
        shape = (40, 4, 4) if "images" in name else (40,)
        idx.write(tmp_path / name, np.zeros(shape, np.uint8))
    monkeypatch.chdir(tmp_path.parent)
    prepared = prepare("digits", ["batch=8"], folder=Path(tmp_path.name))
    assert prepared.config.data.folder == tmp_path
    check(prepared)
    (tmp_path / FILES[3]).write_bytes((tmp_path / FILES[3]).read_bytes()[:-7])
    with pytest.raises(DataError, match=f"{FILES[3]}: is truncated: expected 48 bytes, found 41"):
        check(prepared)


WRONG = [
    (["model.name=resnet5"], "no model is called 'resnet5' .*did you mean 'resnet50'"),
    (["model.name=no_such_module:net"], "no module 'no_such_module'"),
    (["data.mean=[3]"], "data.mean is given without data.std"),
    (["data.std=[3]"], "data.std is given without data.mean"),
    (
        ["data.mean=[1, 2]", "data.std=[1, 2]"],
        "'data.mean': expected one value for each of 1 channels, found 2",
    ),
    (["batch=4000"], "a batch of 4000 is larger than the training split, which has 1294 samples"),
    (
        ["batch_per_worker=700"],
        "a batch of 1400 is larger than the training split, which has 1294 samples",
    ),
    (["accumulation=100"], "a batch of 64 cannot be divided into 100 micro-batches"),
    (["overfit=5000"], "'overfit': expected 1 to 1294 training samples, found 5000"),
    (
        ["schedule.milestones=[3]"],
        "milestones belong to schedule.shape=step, and the shape is cosine",
    ),
    (
        ["schedule.milestones=[3, 170, 180]", "schedule.shape=step"],
        r"epoch 170 is not reached, the run has 150: write .*=\[3\]",
    ),
    (["growth.at=[4, 2]"], "'growth.at': expected increasing epochs, found 4, 2"),
    (["growth.at=[150]"], "epoch 150 is not reached, the run has 150"),
    (["growth.at=[2]", "growth.by_noise=true"], "two ways to decide"),
    (["growth.max=32"], "'growth.max': expected at least the batch, 64, found 32"),
    (["model.norm=ghost", "model.ghost=1"], "'model.ghost': expected at least 2 samples.*found 1"),
    (
        ["model.norm=ghost", "model.ghost=128"],
        "a ghost batch of 128 samples is larger than the batch, which has 64",
    ),
    (
        ["batch=3", "model.norm=batch"],
        "3 samples on 2 workers in 1 micro-batch each are 1 at a time, and model.norm=batch needs"
        " 2",
    ),
    (
        ["batch_per_worker=1", "model.norm=ghost", "model.ghost=2"],
        "2 samples on 2 workers .*model.norm=ghost needs 2",
    ),
    (
        ["batch=8", "accumulation=4", "model.norm=batch"],
        "8 samples on 2 workers in 4 micro-batches each .*sync or group",
    ),
    (
        ["batch=1", "model.norm=sync"],
        "1 sample on 1 worker in 1 micro-batch each are 1 at a time, .*norm=group",
    ),
    (["overfit=3", "model.norm=batch"], "3 samples on 2 workers"),
    (
        ["shares=[3, 1, 2]"],
        r"^shares=\[3, 1, 2\]: expected one whole number from 1 to 1,048,576 for each of 2",
    ),
    (
        ["shares=speed", "model.norm=ghost"],
        "shares=speed and model.norm=ghost exclude each other: .*set shares=even",
    ),
    (["shares=[3, 1]", "model.norm=ghost"], r"shares=\[3, 1\] and model.norm=ghost exclude"),
    (
        ["batch=16", "shares=[15, 1]", "model.norm=batch"],
        "16 samples on 2 workers in 1 micro-batch each are 1 at a time",
    ),
    (["data.augment=Flp()"], "'data.augment': no operation is called 'Flp'; did you mean 'Flip'"),
    (["data.prepare=Flp()"], "'data.prepare': no operation"),
    (["data.mix=Flip()"], "'data.mix': Flip works on single images"),
    (["data.validation=1437"], "'data.validation': expected 1 to 1436 of 1437 samples, found 1437"),
    (["data.validation=0"], "'data.validation': expected 1 to 1436 of 1437 samples, found 0"),
    (["data.use=1295"], "'data.use': expected 1 to 1294 training samples, .* found 1295"),
    (["data.use=1/2000"], r"'data.use': expected 1 to 1294 .* found 1/2000 \(0 samples\)"),
    (["data.use=1.5"], "'data.use': expected a number from 2 to .*1/64, found 1.5"),
    (["data.use=1/0"], "'data.use': expected a number from 2 to .*1/64, found '1/0'"),
    (["data.use=3/2"], "'data.use': expected a number from 2 to .*1/64, found '3/2'"),
    (["data.use=-5"], "'data.use': expected a number from 2 to .*1/64, found -5"),
    (["data.use=true"], "'data.use': expected a number from 2 to .*1/64, found True"),
    (["data.use=.nan"], "'data.use': expected a number from 2 to .*1/64, found nan"),
    (["data.use=half"], "'data.use': expected a number from 2 to .*1/64, found 'half'"),
    (["data.use=1/64"], "a batch of 64 is larger than the training split, which has 20 samples"),
    (["data.num_classes=9"], "the training split has 10 classes"),
    (["data.name=digit"], "no dataset is called 'digit' .*did you mean 'digits'"),
    (["model.name=vgg16"], "expected images of at least 32x32 pixels, these are 8x8"),
    (["data.augment=Resize(16)"], "small-cnn takes images of one size.*16x16 and 8x8"),
    (["data.train=/no/such/place"], "data.train: /no/such/place: no such file or folder"),
    (
        ["data.train=x", "data.folder=y"],
        "data.folder=.*y is for a named dataset, and data.train=.*x names",
    ),
]


@pytest.mark.parametrize(
    ("overrides", "complaint"), WRONG, ids=[" ".join(overrides) for overrides, _ in WRONG]
)
def test_what_cannot_run_is_reported_before_anything_starts(
    overrides: list[str], complaint: str
) -> None:
    with pytest.raises(UserError, match=complaint) as caught:
        check(prepare("digits", overrides), num_workers=2)
    assert "\n" not in str(caught.value)


def test_what_depends_on_the_workers_is_checked_when_they_are_known() -> None:
    overrides = ["batch_per_worker=16", "model.norm=ghost", "model.ghost=32"]
    check(prepare("digits", overrides), num_workers=2)
    with pytest.raises(ConfigError, match="larger than the batch, which has 16"):
        check(prepare("digits", overrides), num_workers=1)


@pytest.mark.parametrize(
    "overrides",
    [
        ["batch=4", "model.norm=batch"],
        ["batch=2", "model.norm=sync"],
        ["batch=8", "accumulation=4", "model.norm=sync"],
        ["batch=2", "model.norm=group"],
        ["batch=16", "shares=[7, 1]", "model.norm=batch"],
        ["batch=16", "shares=[15, 1]", "model.norm=sync"],
    ],
    ids=" ".join,
)
def test_two_samples_at_a_time_are_enough_for_a_norm(overrides: list[str]) -> None:
    check(prepare("digits", overrides), num_workers=2)


@pytest.mark.parametrize(
    ("overrides", "num_workers", "expected"),
    [
        (
            ["noise_scale=true"],
            1,
            "noise_scale: nothing is measured, since one worker .* accumulation=2",
        ),
        (["growth.by_noise=true"], 1, "growth.by_noise: the batch will not grow, since one worker"),
        (["noise_scale=true"], 2, None),
        (["noise_scale=true", "accumulation=2"], 1, None),
        ([], 1, None),
        (
            ["model.norm=batch"],
            1,
            "the last batch of an epoch has 1 sample, so that model.norm=batch sees 1 at a time",
        ),
        (["model.norm=sync"], 2, "the last batch of an epoch has 1 sample"),
        (["model.norm=batch", "batch=71"], 2, "the last batch of an epoch has 3 samples"),
        (["model.norm=sync", "batch=71"], 2, None),
        (["model.norm=batch", "batch=32"], 1, "has 1 sample"),
        (["model.norm=batch", "batch=50"], 2, None),
    ],
    ids=str,
)
def test_what_may_not_be_as_the_user_thinks(
    overrides: list[str], num_workers: int, expected: str | None
) -> None:
    """With 1,281 samples: 20 batches of 64 and one sample."""
    found = notes(prepare("digits", overrides).config.resolved(num_workers), num_workers, 1281)
    assert [bool(re.search(expected, each)) for each in found] == [True] if expected else not found


def test_places_are_kept_as_they_are_meant_everywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    overrides = [
        "data.train=here/train-*.tfrecord",
        "data.validation=7",
        "data.test=https://host/x.tar",
    ]
    section = prepare("digits", overrides).config.data
    assert section.train == str(tmp_path / "here" / "train-*.tfrecord")
    assert (section.validation, section.test) == (7, "https://host/x.tar")
    assert (
        prepare("digits", ["data.train=synthetic:10x8x8"]).config.data.train == "synthetic:10x8x8"
    )


@pytest.mark.parametrize(
    ("num_gpus", "num_cores", "batch", "expected"),
    [
        (0, 2, 128, 2),
        (0, 64, 128, 8),
        (0, 64, 4096, 8),
        (0, 64, 64, 4),
        (0, 64, 63, 3),
        (0, 64, 8, 1),
        (0, 1, 128, 1),
        (4, 64, 128, 4),
        (4, 2, 128, 4),
        (4, 2, 32, 2),
        (0, 6, None, 6),
    ],
)
def test_how_many_workers(num_gpus: int, num_cores: int, batch: int | None, expected: int) -> None:
    assert choose_num_workers(num_gpus, num_cores, batch) == expected


def test_how_many_workers_here() -> None:
    assert default_num_workers(read_config("digits", ["batch=16"])) == 1
    assert 1 <= default_num_workers(read_config("digits", ["batch_per_worker=1"])) <= 8
    assert count_gpus() >= 0


def test_the_run_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = read_config("digits").resolved(1)
    folders = [claim_folder(config, None).path for _ in range(3)]
    assert len(set(folders)) == 3
    assert all(
        folder.parent == Path("runs") and folder.name.startswith("digits-") for folder in folders
    )
    assert read_config(str(folders[0] / "config.yaml")).resolved(1) == config


def test_a_folder_that_holds_a_run_is_left_alone(tmp_path: Path) -> None:
    config = read_config("digits").resolved(1)
    assert claim_folder(config, tmp_path / "out").path == tmp_path / "out"
    claim_folder(config, tmp_path / "out")  # no run in it so far
    (tmp_path / "out" / "run.jsonl").write_text('{"kind": "start"}\n')
    claim_folder(config, tmp_path / "out")  # killed before its first step
    (tmp_path / "out" / "run.jsonl").write_text('{"kind": "start"}\n{"kind": "step"}\n')
    with pytest.raises(ConfigError, match="already holds a run"):
        claim_folder(config, tmp_path / "out")
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot be written"):
        claim_folder(config, tmp_path / "file")


@pytest.mark.usefixtures("processes")
def test_no_torch_before_the_workers() -> None:
    code = (
        "import sys\nfrom allstep.train.run.prepare import check, prepare\n"
        "import allstep.train.config.num_workers, allstep.train.folder.claim\n"
        "check(prepare('digits'))\nassert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=100)
