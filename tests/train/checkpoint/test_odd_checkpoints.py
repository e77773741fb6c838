"""Anything that is not a valid checkpoint is reported, and the next older one is used: no
traceback, no hang.
"""

import json
import os
import random
import re
import shutil
import struct
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from allstep.errors import CheckpointError
from allstep.optim import RunningNoiseScale
from allstep.train import read_config
from allstep.train.checkpoint import write_and_read as checkpoint
from allstep.train.checkpoint.names import hidden_name, is_left_over, number_of
from allstep.train.checkpoint.optimizer_state import flatten
from allstep.train.checkpoint.restore import load_optimizer, load_weights, parameter_names
from allstep.train.checkpoint.write_and_read import Snapshot
from allstep.train.health.checkpoint_state import (
    check_batch,
    check_optimizer,
    check_resumed,
    check_used,
)
from allstep.train.health.divergence import LossWatch
from allstep.train.run.progress import RunProgress
from allstep.train.step.build import make_optimizer
from allstep.train.task.classification import Classification
from support.damaged_json import PLAIN, RAW, odd
from support.limited_process import limited, seeds
from support.scores import classified, classified_tally
from support.special_files import ODD

CONFIG = read_config("digits", ["optimizer=sgd"]).resolved(1)
FILES = ("manifest.json", "state.json", "weights.safetensors", "optimizer.safetensors")


def model_and_optimizer() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.named_parameters(), 0.1, momentum=0.9)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    return model, optimizer


def snapshot(samples: int) -> Snapshot:
    """Return a snapshot with everything that the state of a run may hold."""
    model, optimizer = model_and_optimizer()
    tensors, numbers = flatten(optimizer.state_dict(), ["weight", "bias"])
    progress = RunProgress(
        samples,
        5,
        10,
        classified(0.5, 0.5, 10, 1.0),
        samples,
        0,
        since=classified_tally(1.0, 2.0, 3.0, 4.0),
    )
    images = {"shape": [3, 4, 4], "trained_shape": [3, 4, 4], "mean": [1.0] * 3, "std": [2.0] * 3}
    state = {
        "standing": progress.to_plain(),
        "optimizer": numbers,
        "loader": {"seed": 0, "position": samples},
        "precision": {"name": "float32", "scale": 1.0, "steps_since": 0},
        "growth": {"times": 0, "last": 0, "room": 0},
        "watch": asdict(LossWatch()),
        "execution": "plain",
        "pictures": {**images, "prepare": "none", "classes": ["a", "b"]},
        "ema": {"updates": 3},
        "noise": asdict(RunningNoiseScale()),
    }
    return Snapshot(samples, model.state_dict(), tensors, state)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Write three checkpoints; the test damages the newest."""
    for samples in (10, 20, 30):
        checkpoint.write(tmp_path / "checkpoints", snapshot(samples))
    return tmp_path / "checkpoints"


def rewrite(path: Path, name: str, content: bytes) -> None:
    """Replace the contents of files, with matching checksums."""
    (path / name).write_bytes(content)
    files = {each: path / each for each in FILES[1:]}
    entries = {
        each: {"nbytes": file.stat().st_size, "sha256": checkpoint._hash(file.read_bytes())}
        for each, file in files.items()
    }
    (path / "manifest.json").write_text(json.dumps({"format": 1, "files": entries}))


def newest(folder: Path, check: Callable[[Snapshot], None] = check_resumed) -> checkpoint.Newest:
    found = checkpoint.newest(folder, check)
    assert found.path is not None and found.snapshot is not None, found.complaints
    assert all("\n" not in each for each in found.complaints)
    return found


def takes_the_one_before(folder: Path, check: Callable[[Snapshot], None] = check_resumed) -> None:
    found = newest(folder, check)
    assert found.path is not None and found.path.name == "000000000020", found.complaints
    assert len(found.complaints) == 1 and str(folder / "000000000030") in found.complaints[0], (
        found.complaints
    )


@pytest.mark.usefixtures("processes")
@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", sorted(ODD))
@pytest.mark.parametrize("file", FILES)
def test_something_else_in_the_place_of_a_file(folder: Path, file: str, kind: str) -> None:
    (folder / "000000000030" / file).unlink()
    ODD[kind](folder / "000000000030" / file)
    limited(takes_the_one_before, [folder])


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize("kind", sorted(ODD))
def test_something_else_in_the_place_of_a_checkpoint(folder: Path, kind: str) -> None:
    shutil.rmtree(folder / "000000000030")
    ODD[kind](folder / "000000000030")
    limited(takes_the_one_before, [folder])
    # It does not prevent writing a checkpoint, either.
    checkpoint.write(folder, snapshot(30))
    assert newest(folder).complaints == ()


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize("file", ["weights.safetensors", "state.json"])
def test_holes_as_large_as_the_manifest_states(folder: Path, file: str) -> None:
    path = folder / "000000000030"
    ODD["terabyte of holes"](path / file)
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["files"][file]["nbytes"] = 1 << 40
    (path / "manifest.json").write_text(json.dumps(manifest))
    limited(takes_the_one_before, [folder])


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize("raw", RAW, ids=[each[:12] for each in RAW])
@pytest.mark.parametrize("place", ["whole", "value"])
@pytest.mark.parametrize("file", ["manifest.json", "state.json"])
def test_odd_json(folder: Path, file: str, place: str, raw: str) -> None:
    path = folder / "000000000030"
    good = json.loads((path / file).read_text())
    key = (
        ("files", "weights.safetensors", "nbytes")
        if file == "manifest.json"
        else ("standing", "updates")
    )
    inner = good
    for each in key[:-1]:
        inner = inner[each]
    inner[key[-1]] = "HOLE"
    content = (raw if place == "whole" else json.dumps(good).replace('"HOLE"', raw)).encode()
    if file == "state.json":
        rewrite(path, file, content)
    else:
        (path / file).write_bytes(content)
    limited(takes_the_one_before, [folder])


@pytest.mark.parametrize(
    ("place", "value", "message"),
    [
        ((), [], "state.json: expected keys and values, found list"),
        (("standing",), None, "state.json: standing: .* found 'None'"),
        (
            ("standing", "samples"),
            31,
            "standing.samples: expected 30, as in the folder's name, found 31",
        ),
        (("standing", "batch"), 0, "standing.batch"),
        (("standing", "best"), {"loss": "x"}, "standing.best.loss"),
        (("standing", "since"), [1, 2], "standing.since"),
        (("optimizer", "groups"), {}, "optimizer.groups"),
        (("watch",), {"colour": 1}, "watch.colour"),
        (
            ("execution",),
            "upside-down",
            "execution: expected one of plain, channels-last, compiled, found 'upside-down'",
        ),
        (("precision", "name"), "float7", "precision.name"),
        (("noise",), 3, "noise"),
    ],
)
def test_a_state_of_other_types(
    folder: Path, place: tuple[str, ...], value: Any, message: str
) -> None:
    state = dict(snapshot(30).state)
    if place:
        inner: Any = state
        for key in place[:-1]:
            inner = inner[key]
        inner[place[-1]] = value
    rewrite(folder / "000000000030", "state.json", json.dumps(state if place else value).encode())
    takes_the_one_before(folder)
    assert re.search(message, newest(folder).complaints[0]), newest(folder).complaints


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("shape", value) for value in ([3, 10**9, 10**9], [3, 60_000, 60_000], [3, 0, 4])),
        *(("mean", value) for value in ([1.0], None)),
        *(("std", value) for value in ([0.0, 1.0, 1.0], [1.0, -1.0, 1.0], [1.0, 1.0, 1e300])),
        *(("classes", value) for value in ([], "ab")),
        ("prepare", 3),
        ("trained_shape", [1]),
    ],
)
def test_images_of_other_kinds(folder: Path, key: str, value: Any) -> None:
    """`predict` and `eval` use them; a resumed run takes them from its data, except the classes."""
    state = json.loads(json.dumps(snapshot(30).state))
    state["pictures"][key] = value
    rewrite(folder / "000000000030", "state.json", json.dumps(state).encode())
    takes_the_one_before(folder, check_used)
    assert len(newest(folder).complaints) == (key == "classes")


@pytest.mark.parametrize("check", [check_used, check_resumed])
@pytest.mark.parametrize("value", [-5, 1.5, True, 31, "30", None])
def test_a_position_that_cannot_be(
    folder: Path, check: Callable[[Snapshot], None], value: Any
) -> None:
    state = json.loads(json.dumps(snapshot(30).state))
    state["standing"]["samples"] = value
    rewrite(folder / "000000000030", "state.json", json.dumps(state).encode())
    takes_the_one_before(folder, check)
    assert "state.json: standing.samples: " in newest(folder, check).complaints[0]


@pytest.mark.parametrize(
    ("overrides", "num_samples", "good", "bad"),
    [
        ([], None, [64], [7, 63, 65, 128, 1 << 40]),
        (["growth.at=[1]", "growth.factor=2"], None, [64, 128, 1 << 30], [63, 1 << 40]),
        (["growth.at=[1]", "growth.max=256"], 1000, [64, 256], [63, 257]),
        (["growth.by_noise=true"], 1000, [64, 1000], [63, 1001]),
        (["growth.at=[1]"], 40, [64, 40], [39, 65]),
    ],
)
def test_a_batch_that_cannot_be(
    overrides: list[str], num_samples: int | None, good: list[int], bad: list[int]
) -> None:
    config = read_config(
        "digits", ["batch=64", "schedule.shape=constant", "schedule.warmup=0", *overrides]
    ).resolved(1)
    for batch in good + bad:
        found = snapshot(10)
        found.state["standing"]["batch"] = batch
        if batch in good:
            check_batch(found, config, num_samples)
        else:
            with pytest.raises(
                CheckpointError, match=rf"standing\.batch: expected .*, found {batch}"
            ):
                check_batch(found, config, num_samples)


def check_both(found: Snapshot) -> None:
    """Check a snapshot as a resumed run does."""
    check_resumed(found)
    check_optimizer(found, CONFIG)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(
            ("param_names", value)
            for value in ({}, None, [{}, "bias"], ["weight"], ["bias", "weight"])
        ),
        *(("params", value) for value in ([0, 0], [0, 7], ["0", "1"], [True, 1])),
        *(("dampening", value) for value in ({}, "x", True, 1e300)),
        *(("maximize", value) for value in (2**63, "yes", [])),
        *(("lr", value) for value in (None, [0.1], -1e300)),
        *(("rate_factor", value) for value in ([1.0], "1", None)),
    ],
)
def test_settings_of_the_optimizer_of_other_kinds(folder: Path, key: str, value: Any) -> None:
    state = json.loads(json.dumps(snapshot(30).state))
    state["optimizer"]["groups"][0][key] = value
    rewrite(folder / "000000000030", "state.json", json.dumps(state).encode())
    takes_the_one_before(folder, check_both)
    assert "state.json: optimizer.groups" in newest(folder, check_both).complaints[0]


@pytest.mark.parametrize("name", ["sgd", "adamw", "lars", "larc", "lamb", "novograd"])
def test_settings_of_each_optimizer_pass(name: str) -> None:
    config = read_config("digits", [f"optimizer={name}"]).resolved(1)
    optimizer = make_optimizer(config, nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)))
    names = parameter_names(optimizer.state_dict())
    numbers = json.loads(json.dumps(flatten(optimizer.state_dict(), names)[1]))
    check_optimizer(Snapshot(10, {}, {}, {"optimizer": numbers}), config)


def test_a_manifest_that_names_other_files(folder: Path, tmp_path: Path) -> None:
    """Other files are not read; reading a pipe would hang."""
    os.mkfifo(tmp_path / "pipe")
    path = folder / "000000000030"
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["files"]["../../pipe"] = {"nbytes": 0, "sha256": ""}
    (path / "manifest.json").write_text(json.dumps(manifest))
    assert newest(folder).complaints == ()
    del manifest["files"]["weights.safetensors"]
    (path / "manifest.json").write_text(json.dumps(manifest))
    takes_the_one_before(folder)


@pytest.mark.parametrize("name", ["²", "٠٠٠٠٠٠٠٠٠٠٤٠", "0000000000040", "40", "9" * 200])
def test_names_with_other_digits(folder: Path, name: str) -> None:
    shutil.copytree(folder / "000000000010", folder / name)
    found = newest(folder)
    assert found.path is not None and found.path.name == "000000000030"
    (complaint,) = found.complaints
    assert complaint == f"{folder / name}: is not the name of a checkpoint, which has 12 digits"
    with pytest.raises(CheckpointError, match="is not the name of a checkpoint"):
        checkpoint.read(folder / name)
    assert name not in [path.name for path in checkpoint.written(folder)]
    checkpoint.write(folder, snapshot(40))
    assert (folder / name).exists()


def test_numbers_of_names() -> None:
    assert number_of("000000000000") == 0
    assert number_of("1000000000000") == 10**12
    assert [
        number_of(name) for name in ("", "1", "0100000000000", " 00000000010", "-00000000010")
    ] == [None] * 5


def test_odd_hidden_names_are_left_alone(folder: Path) -> None:
    """Regression: a hidden name without a process caused an IndexError in every write."""
    odd = [".000000000040", ".000000000040.²", ".000000000040.x", ".٠٠٠٠٠٠٠٠٠٠٤٠.1", ".hidden"]
    for name in odd:
        (folder / name).mkdir()
    checkpoint.write(folder, snapshot(40))
    assert newest(folder).complaints == ()
    assert all((folder / name).exists() for name in odd)


def test_leftovers_are_distinguished_from_what_is_being_written() -> None:
    mine = hidden_name("000000000010")
    parent = os.getppid()
    assert is_left_over(mine) and is_left_over(f"{mine}.gone")
    # The pid of the writer belongs to another process now, as in a restarted container.
    assert is_left_over(f".000000000010.{parent}-1")
    started = Path(f"/proc/{parent}/stat").read_text().rpartition(")")[2].split()[19]
    assert not is_left_over(f".000000000010.{parent}-{started}")
    # A name of an earlier version.
    assert not is_left_over(f".000000000010.{parent}")
    assert is_left_over(".000000000010.4194305")


def test_a_saver_removes_what_is_left_over_though_it_writes_nothing(folder: Path) -> None:
    """This happens if a run is killed after its last checkpoint, while it removes an old one."""
    from allstep.train.checkpoint.saver import Saver

    left = folder / ".000000000010.4194305-7.gone"
    left.mkdir()
    (left / "weights.safetensors").write_bytes(b"x")
    Saver(folder).close()
    assert not left.exists()


def header(tensors: Any) -> bytes:
    text = (tensors if isinstance(tensors, str) else json.dumps(tensors)).encode()
    return struct.pack("<Q", len(text)) + text


@pytest.mark.usefixtures("processes")
@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\xff" * 8,
        struct.pack("<Q", 1 << 62) + b"{}",
        header("[" * 100_000),
        header({"a": 3}),
        header({"a": {"dtype": "F99", "shape": [1], "data_offsets": [0, 4]}}) + b"1234",
        header({"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}) + b"1234",
        header({"a": {"dtype": "F32", "shape": [1 << 40, 1 << 40], "data_offsets": [0, 4]}})
        + b"1234",
        header({"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 0]}}) + b"1234",
        header({"a": {"dtype": "F32", "shape": [1], "data_offsets": [0, 1 << 60]}}) + b"1234",
        header({"a": {"dtype": "F8_E8M0", "shape": [4], "data_offsets": [0, 4]}})[:-1] + b"1234",
    ],
    ids=range(11),
)
def test_headers_of_tensors_that_make_no_sense(folder: Path, content: bytes) -> None:
    rewrite(folder / "000000000030", "weights.safetensors", content)
    limited(takes_the_one_before, [folder])


def use(found: Snapshot) -> None:
    """Load a snapshot as `make_job` does; only CheckpointError may be raised."""
    state = found.state
    model, optimizer = model_and_optimizer()
    LossWatch(**state["watch"])
    if "noise" in state and state["noise"] is not None:
        RunningNoiseScale(**state["noise"])
    try:
        RunProgress.from_plain(dict(state["standing"]), Classification(2))
        load_weights(model, found.weights)
        load_optimizer(optimizer, found)
    except CheckpointError:
        return
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    after = optimizer.state_dict()
    flatten(after, parameter_names(after))


def test_settings_that_a_checkpoint_lacks_or_has_too_many(folder: Path) -> None:
    """Found by the soak: errors in the first step. Another version of torch has other settings."""
    path = folder / "000000000030"
    state = json.loads((path / "state.json").read_text())
    for group in state["optimizer"]["groups"]:
        del group["lr"]
        group["unknown"] = {}
    rewrite(path, "state.json", json.dumps(state).encode())
    found = newest(folder, check_both)
    assert found.path == path and found.snapshot is not None
    use(found.snapshot)
    _, optimizer = model_and_optimizer()
    expected = [group["lr"] for group in optimizer.param_groups]
    load_optimizer(optimizer, found.snapshot)
    assert [group["lr"] for group in optimizer.param_groups] == expected
    assert not any("unknown" in group for group in optimizer.param_groups)


@pytest.mark.usefixtures("processes")
@pytest.mark.soak(1)  # its count is in `seeds`
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("file", FILES)
def test_whatever_is_in_a_file_there_is_a_checkpoint(folder: Path, file: str) -> None:
    """Random damage with matching checksums; what passes the checks raises no error later."""
    path = folder / "000000000030"
    whole = {name: (path / name).read_bytes() for name in FILES}

    def one(seed: int) -> None:
        dice = random.Random(seed)
        for name, content in whole.items():
            (path / name).write_bytes(content)
        if file.endswith(".json"):
            content = odd(json.loads(whole[file]), seed)
        else:
            size = struct.unpack("<Q", whole[file][:8])[0]
            text = odd(json.loads(whole[file][8 : 8 + size]), seed)
            length = (
                len(text) if dice.random() < 0.9 else dice.choice([0, 1, 1 << 63, len(text) + 1])
            )
            content = struct.pack("<Q", length) + text + whole[file][8 + size :]
        if file == "manifest.json":
            (path / file).write_bytes(content)
        else:
            rewrite(path, file, content)
        for check in (check_both, check_used):
            found = newest(folder, check)
            assert found.path is not None and found.path.name in ("000000000020", "000000000030")
            assert (found.path.name == "000000000020") == bool(found.complaints)
            if check is check_both and found.snapshot is not None:
                use(found.snapshot)

    assert limited(one, seeds(250)) >= 250


def test_the_damage_is_damage() -> None:
    """Check the random damage: most documents differ from the good one, and some parse."""
    good = {"a": {"b": [1, 2.5, "x"]}, "c": None}
    made = [odd(good, seed) for seed in range(200)]
    parsed = 0
    for each in made:
        try:
            parsed += json.loads(each) != good
        except (ValueError, RecursionError):
            continue
    assert sum(each != json.dumps(good).encode() for each in made) > 150
    assert parsed > 60 and len(PLAIN) > 20


@pytest.mark.parametrize(
    ("name", "value"),
    [("momentum", "x"), ("lr", None), ("lr", True), ("weight_decay", [1]), ("nesterov", "yes")],
)
def test_a_setting_of_the_optimizer_of_another_kind(name: str, value: Any) -> None:
    parameter = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.SGD([("w", parameter)], lr=0.1, momentum=0.9)
    state = optimizer.state_dict()
    tensors, numbers = flatten(state, parameter_names(state))
    load_optimizer(optimizer, Snapshot(1, {}, tensors, {"optimizer": numbers}))
    numbers["groups"][0][name] = value
    with pytest.raises(CheckpointError, match=f"{name} is .* expected something like"):
        load_optimizer(optimizer, Snapshot(1, {}, tensors, {"optimizer": numbers}))
