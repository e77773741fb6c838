"""Predicting and evaluating with the model of a run: against what the run logged, against plain
torch, and with whatever can be wrong."""

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from PIL import Image
from typer.testing import CliRunner

import allstep
from allstep import data, runlog
from allstep.cli.app import app
from allstep.cli.output_file import check_output
from allstep.cli.saved_run.predict_table import lines
from allstep.errors import CheckpointError, ConfigError
from allstep.train import read_config
from allstep.train.checkpoint import write_and_read as checkpoint
from allstep.train.checkpoint.write_and_read import Snapshot
from allstep.train.folder.claim import claim_folder
from allstep.train.folder.existing_run import Evaluation
from allstep.train.run.loop import train
from allstep.train.step import build
from allstep.train.task.make_task import make_task
from allstep.train.use.evaluate import Reevaluated, reevaluate
from allstep.train.use.load_run import image_transform
from allstep.train.use.predict import Prediction, find_images, load_run, predict
from allstep.train.watch.record_callback import Record
from support.image_folders import CLASSES, encoded, make_folder

# A run on the disk


class Images:
    """What `build.build_model` asks of the data."""

    num_classes = 3
    shape = (3, 12, 12)


FACTS = {
    "shape": [3, 12, 12],
    "mean": [100.0, 110.0, 120.0],
    "std": [50.0, 60.0, 70.0],
    "prepare": "none",
    "classes": list(CLASSES),
}
OVERRIDES = [
    "data.train=gone",
    "model=small-cnn",
    "model.options.widths=[4]",
    "model.options.hidden=8",
    "model.norm=batch",
]


def build_model(arguments: Sequence[str], seed: int = 0) -> torch.nn.Module:
    """With running statistics that are not those of a new model."""
    config = read_config("digits", [*OVERRIDES, *arguments, f"seed={seed}"])
    task = make_task(config, ["a", "b", "c"])
    model = build.build_model(config, task, Images())  # type: ignore[arg-type]
    for name, buffer in model.named_buffers():
        if name.endswith("running_var"):
            buffer.uniform_(0.5, 2)
    return model.to(torch.float64 if config.precision == "float64" else torch.float32)


def save(
    folder: Path, model: torch.nn.Module, samples: int = 100, best: int | None = None, **more: Any
) -> Path:
    score = {"loss": 1.0, "accuracy": 0.5, "count": 10, "top5": 1.0}
    progress = {
        "samples": samples,
        "best": score if best is not None else None,
        "best_samples": best or 0,
    }
    average = {f"{name}/average": tensor for name, tensor in more.get("average", {}).items()}
    state = {"standing": progress, "pictures": {**FACTS, **more.get("facts", {})}}
    return checkpoint.write(
        folder / "checkpoints", Snapshot(samples, model.state_dict(), average, state)
    )


def make_run(folder: Path, *arguments: str, **more: Any) -> torch.nn.Module:
    folder.mkdir(exist_ok=True)
    (folder / "config.yaml").write_text(read_config("digits", [*OVERRIDES, *arguments]).to_yaml())
    model = build_model(arguments)
    save(folder, model, **more)
    return model.eval()


def image(seed: int, height: int = 12, width: int = 12) -> NDArray[np.uint8]:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), np.uint8)


def store(folder: Path, count: int, height: int = 12, width: int = 12) -> list[Path]:
    folder.mkdir(exist_ok=True)
    files = [folder / f"{number:03}.png" for number in range(count)]
    for number, file in enumerate(files):
        Image.fromarray(image(number, height, width)).save(file)
    return files


def by_hand(model: torch.nn.Module, images: Sequence[NDArray[np.uint8]]) -> NDArray[np.float64]:
    """Probabilities by plain numpy and torch."""
    scaled = (np.stack(images) - np.array(FACTS["mean"])) / np.array(FACTS["std"])
    like = next(model.parameters())
    with torch.no_grad():
        logits = model(torch.from_numpy(scaled.transpose(0, 3, 1, 2)).to(like.dtype))
    return torch.softmax(logits.double(), 1).numpy()


def shares(found: Sequence[Prediction]) -> NDArray[np.float64]:
    return np.array([[dict(each.classes)[name] for name in CLASSES] for each in found])


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["execution=plain"],
        ["model.norm=sync"],
        ["model.norm=ghost", "model.ghost=4"],
        ["precision=float64"],
    ],
    ids=" ".join,
)
def test_predictions_are_those_of_the_model_in_plain_torch(
    tmp_path: Path, arguments: list[str]
) -> None:
    model = make_run(tmp_path / "run", *arguments)
    files = store(tmp_path / "new", 5)
    trained = load_run(tmp_path / "run", device="cpu")
    assert (trained.classes, trained.shape, trained.samples) == (CLASSES, (3, 12, 12), 100)
    found = list(predict(trained, files))
    np.testing.assert_allclose(
        shares(found), by_hand(model, [image(number) for number in range(5)]), atol=1e-5
    )
    for each in found:
        assert [share for _, share in each.classes] == sorted(
            (share for _, share in each.classes), reverse=True
        )
    assert [len(each.classes) for each in predict(trained, files, top=2)] == [2] * 5


def test_in_several_batches_they_are_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_run(tmp_path / "run")
    files = [*store(tmp_path / "new", 7), tmp_path / "gone.png"]
    files.insert(2, tmp_path / "none.png")
    trained = load_run(tmp_path / "run", device="cpu")
    whole = list(predict(trained, files))
    monkeypatch.setattr("allstep.train.use.predict._MAX_IMAGES", 3)
    batched = list(predict(trained, files))
    assert [each.image for each in batched] == [str(file) for file in files]
    assert [each.problem for each in batched] == [each.problem for each in whole]
    good = [number for number, each in enumerate(whole) if each.problem is None]
    assert len(good) == 7
    np.testing.assert_allclose(
        shares([batched[n] for n in good]), shares([whole[n] for n in good]), atol=1e-6
    )


def test_the_mirror_image_counts_where_the_run_has_it_so(tmp_path: Path) -> None:
    make_run(tmp_path / "run", "evaluation.flip=true")
    make_run(tmp_path / "plain")
    Image.fromarray(image(0)).save(tmp_path / "one.png")
    Image.fromarray(image(0)[:, ::-1]).save(tmp_path / "other.png")
    files = [tmp_path / "one.png", tmp_path / "other.png"]
    one, other = shares(list(predict(load_run(tmp_path / "run", device="cpu"), files)))
    np.testing.assert_allclose(one, other, atol=1e-6)
    both = np.log(shares(list(predict(load_run(tmp_path / "plain", device="cpu"), files)))).mean(0)
    np.testing.assert_allclose(one, np.exp(both) / np.exp(both).sum(), atol=1e-5)


def test_the_moving_average_is_what_predicts(tmp_path: Path) -> None:
    other = build_model([], seed=5)
    average = {**dict(other.named_parameters()), **dict(other.named_buffers())}
    model = make_run(tmp_path / "run", "ema.decay=0.9", average=average)
    trained = load_run(tmp_path / "run", device="cpu")
    for name, tensor in trained.model.state_dict().items():
        assert torch.equal(tensor, other.state_dict()[name])
    assert not torch.equal(
        trained.model.state_dict()["head.1.weight"], model.state_dict()["head.1.weight"]
    )


def test_last_or_best(tmp_path: Path) -> None:
    run = tmp_path / "run"
    make_run(run, samples=100)
    with pytest.raises(CheckpointError, match="has not been evaluated"):
        load_run(run, "best")
    save(run, build_model([], 2), 200, best=100)
    assert load_run(run).samples == load_run(run, "last").samples == 200
    best = load_run(run, "best")
    assert (best.samples, best.which) == (100, "best")
    make_run(run, "evaluation.weights=best", samples=100)
    assert load_run(run).samples == 100
    checkpoint.remove(run / "checkpoints" / f"{100:012}")
    with pytest.raises(CheckpointError, match="there is no such checkpoint"):
        load_run(run, "best")


def test_images_of_another_size_or_kind(tmp_path: Path) -> None:
    """Stretched to the model's size, against Pillow; grey where the model's are grey."""
    smooth = Image.fromarray(image(0, 4, 4)).resize((60, 36), Image.Resampling.BICUBIC)
    smooth.save(tmp_path / "large.png")
    trained = image_transform("none", (3, 12, 12)), image_transform("none", (1, 12, 12))
    expected = np.asarray(smooth.resize((12, 12), Image.Resampling.BOX)).astype(float)
    for transform, reference in zip(
        trained, (expected, expected @ [[0.299], [0.587], [0.114]]), strict=True
    ):
        out = np.empty(transform.shape, np.uint8)
        transform.one(
            (tmp_path / "large.png").read_bytes(), out, transform.draw(0, 0, np.arange(1)), 0
        )
        assert abs(out - reference).mean() < 5
    assert (
        image_transform("CentreCrop(9)", (3, 9, 9)).describe()
        == "CentreCrop(size=(9, 9), shorter=10)"
    )


def test_files_folders_and_patterns(tmp_path: Path) -> None:
    store(tmp_path / "a", 2)
    store(tmp_path / "a" / "b", 1)
    store(tmp_path / "a" / ".hidden", 1)
    (tmp_path / "a" / "notes.txt").write_text("no image")
    odd = tmp_path / "a[0].png"
    odd.write_bytes(encoded(1, kind="PNG"))
    found = find_images(
        [str(tmp_path / "a"), str(odd), str(tmp_path / "a" / "0*.png"), str(tmp_path / "x*.png")]
    )
    names = [str(path.relative_to(tmp_path)) for path in found]
    assert names == [
        "a/000.png",
        "a/001.png",
        "a/b/000.png",
        "a[0].png",
        "a/000.png",
        "a/001.png",
        "x*.png",
    ]


def test_what_is_no_file_is_named_with_the_reason(tmp_path: Path) -> None:
    make_run(tmp_path / "run")
    folder = tmp_path / "odd"
    (folder / "b.jpg").mkdir(parents=True)
    (folder / "dangling.jpg").symlink_to("nothing")
    (folder / "loop.jpg").symlink_to("loop.jpg")
    os.mkfifo(folder / "pipe.jpg")
    (folder / "zero.jpg").symlink_to("/dev/zero")
    found = [
        (Path(each.image).name, each.problem)
        for each in predict(load_run(tmp_path / "run"), find_images([str(folder)]))
    ]
    assert found == [
        ("dangling.jpg", "No such file or directory"),
        ("loop.jpg", "Too many levels of symbolic links"),
        ("pipe.jpg", "is not a regular file"),
        ("zero.jpg", "is not a regular file"),
    ]


AS_OTHER_USER = """
import os, sys
from types import SimpleNamespace
from allstep.train.use.predict import _read, find_images
os.setgroups([]); os.setgid(65534); os.setuid(65534)
trained = SimpleNamespace(prepare=SimpleNamespace(one=None))
print([(path.name, _read(trained, None, None, 0, path)) for path in find_images(sys.argv[1:])])
"""


@pytest.mark.usefixtures("processes")
@pytest.mark.skipif(os.geteuid() != 0, reason="needs root: becomes another user")
def test_folders_of_another_user_are_named() -> None:
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        folder.chmod(0o755)
        store(folder / "closed", 1)
        store(folder / "listed", 1)
        (folder / "closed").chmod(0o700)
        (folder / "listed").chmod(0o744)
        arguments = [made, str(folder / "closed" / "000.png")]
        done = subprocess.run(
            [sys.executable, "-c", AS_OTHER_USER, *arguments],
            capture_output=True,
            text=True,
            timeout=60,
        )
    assert done.returncode == 0, done.stderr
    denied = "Permission denied"
    assert done.stdout.strip() == str(
        [("closed", denied), ("000.png", denied), ("000.png", denied)]
    )


def test_the_command_shows_what_it_can(tmp_path: Path) -> None:
    make_run(tmp_path / "run")
    store(tmp_path / "new", 2)
    (tmp_path / "new" / "bad.jpg").write_bytes(encoded(1)[:200])
    (tmp_path / "empty").mkdir()
    arguments = [str(tmp_path / name) for name in ("run", "new", "gone.jpg", "empty")]
    result = CliRunner().invoke(
        app, ["predict", *arguments, "--json", str(tmp_path / "out.json"), "--top", "2"]
    )
    assert result.exit_code == 1
    first, second, bad, gone, empty = result.stdout.splitlines()
    written = json.loads((tmp_path / "out.json").read_text())
    for line, entry in zip((first, second), written, strict=False):
        likely = entry["classes"][0]
        assert line.startswith(f"{entry['picture']}   ")
        assert f"{likely['class']} {likely['probability']:.1%}" in line
    assert "bad.jpg" in bad
    assert "cannot be read" in bad
    assert "gone.jpg" in gone
    assert "No such file" in gone
    assert "no image in this folder" in empty
    assert [set(entry) for entry in written] == [{"picture", "classes"}] * 2 + [
        {"picture", "problem"}
    ] * 3
    result = CliRunner().invoke(
        app, ["predict", *arguments[:1], str(tmp_path / "new" / "000.png"), "--json", "-"]
    )
    assert result.exit_code == 0
    assert json.loads(result.stdout)[0]["classes"] == [
        {"class": name, "probability": pytest.approx(share, abs=1e-6)}
        for name, share in next(
            iter(predict(load_run(arguments[0]), [tmp_path / "new" / "000.png"]))
        ).classes
    ]


def test_an_image_is_not_written_over(tmp_path: Path) -> None:
    """`--json` in front of a pattern takes the first image as its file."""
    make_run(tmp_path / "run")
    first, second = store(tmp_path / "new", 2)
    before = first.read_bytes()
    result = CliRunner().invoke(
        app, ["predict", str(tmp_path / "run"), "--json", str(first), str(second)]
    )
    assert isinstance(result.exception, ConfigError)
    assert "exists and is not JSON" in str(result.exception)
    assert first.read_bytes() == before
    out = tmp_path / "out.json"
    for _ in range(2):
        assert (
            CliRunner()
            .invoke(app, ["predict", str(tmp_path / "run"), "--json", str(out), str(second)])
            .exit_code
            == 0
        )
    result = CliRunner().invoke(
        app, ["report", str(tmp_path / "run"), "--out", str(tmp_path / "run" / "config.yaml")]
    )
    assert "exists and is not HTML" in str(result.exception)


def test_files_of_a_folder_that_are_left_out_are_named(tmp_path: Path) -> None:
    make_run(tmp_path / "run")
    store(tmp_path / "new", 1)
    (tmp_path / "new" / "x.heic").write_bytes(b"x")
    result = CliRunner().invoke(app, ["predict", str(tmp_path / "run"), str(tmp_path / "new")])
    assert result.exit_code == 0
    assert "1 files are left out" in result.stderr and ".heic (1)" in result.stderr


def test_the_table_keeps_its_columns() -> None:
    found = [
        Prediction("a", (("cat", 0.9), ("dog", 0.1))),
        Prediction("long", problem="what a long reason"),
    ]
    found += [Prediction("b\udcff", (("mouse", 0.5), ("cat", 0.25)))]
    assert lines(found) == [
        "a       cat 90.0%     dog 10.0%",
        "long    cannot be read: what a long reason",
        "b\\xff   mouse 50.0%   cat 25.0%",
    ]


# What can be wrong


def test_no_run_and_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no such folder"):
        load_run(tmp_path / "gone")
    with pytest.raises(ConfigError, match=r"it has no config\.yaml"):
        load_run(tmp_path)
    make_run(tmp_path / "run")
    with pytest.raises(ConfigError, match=r"config\.yaml: is a file; expected a run folder"):
        load_run(tmp_path / "run" / "config.yaml")
    with pytest.raises(ConfigError, match="is a folder; expected a file to write"):
        check_output("--json", tmp_path, "JSON")
    checkpoint.remove(checkpoint.written(tmp_path / "run" / "checkpoints")[0])
    with pytest.raises(CheckpointError, match="has no checkpoint yet"):
        load_run(tmp_path / "run")
    save(tmp_path / "run", build_model([]))
    with pytest.raises(ConfigError, match="expected auto, cpu or cuda"):
        load_run(tmp_path / "run", device="gpu")


def test_a_damaged_checkpoint_gives_way_to_the_one_before(tmp_path: Path) -> None:
    make_run(tmp_path)
    weights = save(tmp_path, build_model([]), 200) / "weights.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1])
    trained = load_run(tmp_path)
    assert trained.samples == 100
    assert "weights.safetensors: expected" in trained.notes[0]
    checkpoint.remove(tmp_path / "checkpoints" / f"{100:012}")
    with pytest.raises(
        CheckpointError, match=r"none of its 1 checkpoints is whole; the newest: .*expected"
    ):
        load_run(tmp_path)


def test_a_checkpoint_of_another_model_names_which_tensors_differ(tmp_path: Path) -> None:
    make_run(tmp_path)
    save(tmp_path, build_model(["model.options.hidden=9"]))
    with pytest.raises(
        CheckpointError,
        match=r"head\.1\.weight is float32 \[9, 144\] .* float32 \[8, 144\] in the model",
    ):
        load_run(tmp_path)


def test_a_shape_that_the_model_does_not_take(tmp_path: Path) -> None:
    make_run(tmp_path)
    shape = [3, 20, 20]
    save(
        tmp_path, build_model([]), samples=200, facts={"shape": shape, "trained_shape": [3, 12, 12]}
    )
    with pytest.raises(
        CheckpointError,
        match=r"pictures\.shape: the model does not accept images of \[3, 20, 20\] \(",
    ):
        load_run(tmp_path)


def test_a_model_of_the_users_that_is_not_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_run(tmp_path / "run")
    (tmp_path / "run" / "config.yaml").write_text(
        read_config("digits", ["model=their_nets:make"]).to_yaml()
    )
    for trust in (False, True):
        with pytest.raises(
            ConfigError,
            match=r"no module 'their_nets' .* in the folder that the run was trained from",
        ):
            load_run(tmp_path / "run", trust=trust)
    (tmp_path / "their_nets.py").write_text(
        "from torch import nn\nclass Net(nn.Sequential):\n"
        # which channels-last images cannot be
        "    def forward(self, x): return self[1](x.view(len(x), -1))\n"
        "def make(num_classes):\n    return Net(nn.Flatten(), nn.Linear(432, num_classes))\n"
    )
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError, match="belongs to another model"):
        load_run(tmp_path / "run", trust=True)
    save(tmp_path / "run", torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(432, 3)))
    (found,) = predict(load_run("run", device="cpu", trust=True), store(tmp_path / "new", 1))
    assert len(found.classes) == 3


def test_a_model_that_diverged_is_reported(tmp_path: Path) -> None:
    make_run(tmp_path / "run")
    model = build_model([])
    torch.nn.init.constant_(model.get_parameter("head.3.bias"), float("inf"))
    save(tmp_path / "run", model)
    (found,) = predict(load_run(tmp_path / "run", device="cpu"), store(tmp_path / "new", 1))
    assert found.problem == "the output of the model is not finite: the run may have diverged"


def test_weights_that_are_not_finite_are_named(ranks: Any, tmp_path: Path) -> None:
    make_run(tmp_path / "run")
    assert load_run(tmp_path / "run", device="cpu").notes == ()
    model = build_model([])
    for value, name in (("nan", "head.3.bias"), ("-inf", "features.0.1.running_mean")):
        tensor = dict(model.state_dict())[name]
        tensor.flatten()[1] = float(value)
        path = save(tmp_path / "run", model)
        (note,) = load_run(tmp_path / "run", device="cpu").notes
        assert note.startswith(
            f"warning: {path}: {name} has 1 NaN or infinite values of {tensor.numel()}; "
        )
    shown = CliRunner().invoke(
        app, ["predict", str(tmp_path / "run"), str(store(tmp_path / "new", 1)[0])]
    )
    assert "allstep: warning: " in shown.stderr
    place = str(make_folder(tmp_path / "photos"))
    ((found,),) = ranks(1, evaluations, Evaluation(tmp_path / "run", place=place, device="cpu"))
    assert found.notes == (note,)


# Real runs


def run(arguments: list[str], out: Path) -> None:
    world = allstep.init()
    config = read_config("digits", arguments)
    callbacks = []
    if world.rank == 0:
        claim_folder(config.resolved(world.size), out)
        callbacks.append(Record(runlog.RunLog(out / "run.jsonl")))
    train(config, world, out, callbacks)


def evaluations(*asked: Evaluation) -> list[Any]:
    """What each of them gives, or the error."""
    return [_evaluation(each) for each in asked]


def _evaluation(asked: Evaluation) -> Reevaluated | str:
    try:
        return reevaluate(asked, allstep.init())
    except allstep.UserError as error:
        return str(error)


def logged(folder: Path, part: str) -> dict[str, Any]:
    return [line for line in runlog.read(folder / "run.jsonl").evals if line["part"] == part][-1]


def check_equal(found: Reevaluated, line: dict[str, Any]) -> None:
    assert (found.score.count, found.samples) == (line["count"], line["samples"])
    assert found.score.accuracy == line["accuracy"]
    assert found.score.top5 == line["top5"]
    assert found.score.loss == pytest.approx(line["loss"], rel=1e-4)


def test_evaluating_again_gives_what_a_run_on_images_logged(ranks: Any, tmp_path: Path) -> None:
    """And so do other data without the run's, and predictions of the same images, one by one."""
    folder, other, odd = make_folder(tmp_path / "photos", 20), tmp_path / "other", tmp_path / "odd"
    for name in CLASSES:
        (other / name).mkdir(parents=True)
        (folder / name / "015.jpg").rename(other / name / "x.jpg")
    shutil.copytree(other, odd)
    (odd / "eel").rename(odd / "ant")
    out = tmp_path / "out"
    arguments = [
        f"data.train={folder}",
        f"data.test={other}",
        "data.augment=RandomResizedCrop(16)",
        "batch=16",
        "epochs=2",
    ]
    arguments += ["data.prepare=CentreCrop(16)", "model.norm=sync", "ema.decay=0.5", "ema.every=1"]
    ranks(2, run, arguments, out)
    before = sorted(out.rglob("*"))
    asked = (
        Evaluation(out),
        Evaluation(out, "validation", "last"),
        Evaluation(out, "train", overrides=["data.workers=0"]),
    )
    for test, validation, trained in ranks(2, evaluations, *asked):
        check_equal(test, logged(out, "test"))
        check_equal(validation, logged(out, "validation"))
        assert trained.score.count == 57 - validation.score.count
    assert sorted(out.rglob("*")) == before  # nothing is written there

    folder.rename(tmp_path / "moved")
    make_run(tmp_path / "unnamed", facts={"classes": ["0", "1", "2"]})
    (tmp_path / "moved" / "fox").mkdir()
    asked = Evaluation(out, place=str(other)), Evaluation(out, place=str(odd)), Evaluation(out)
    more = (
        Evaluation(tmp_path / "unnamed", place=str(other)),
        Evaluation(tmp_path / "unnamed", place=str(folder.with_name("moved"))),
    )
    test, other_names, gone, numbers, too_many = ranks(1, evaluations, *asked, *more)[0]
    check_equal(test, logged(out, "test"))
    assert "only there: ant; only in the run: eel" in other_names
    assert "no such file or folder" in gone
    assert numbers.score.count == 3
    assert "has 4 classes, and the model has 3" in too_many

    found = list(predict(load_run(out), find_images([str(other)])))
    right = [each.classes[0][0] == Path(each.image).parent.name for each in found]
    assert sum(right) / 3 == pytest.approx(logged(out, "test")["accuracy"])


def test_evaluating_again_gives_what_a_run_on_arrays_logged(ranks: Any, tmp_path: Path) -> None:
    """Of a set known by name, with the best weights."""
    arguments = [
        "epochs=2",
        "batch=128",
        "save.epochs=1",
        "evaluation.weights=best",
        "data.validation=50",
    ]
    ranks(1, run, arguments, tmp_path / "out")
    found = ranks(1, evaluations, Evaluation(tmp_path / "out"))[0][0]
    assert found.which == "best"
    check_equal(
        replace(found, samples=logged(tmp_path / "out", "test")["samples"]),
        logged(tmp_path / "out", "test"),
    )
    images = data.load(data.find(data.named_set("digits"))).test
    files = [tmp_path / f"{number}.png" for number in range(100)]
    for number, file in enumerate(files):
        Image.fromarray(images.images[number]).save(file)
    likely = [int(each.classes[0][0]) for each in predict(load_run(tmp_path / "out"), files)]
    assert np.mean(np.array(likely) == images.labels[:100]) == pytest.approx(
        found.score.accuracy, abs=0.1
    )


def test_only_the_data_of_a_run_can_be_another(tmp_path: Path) -> None:
    make_run(tmp_path)
    for override, complaint in (
        ("epochs=3", "only keys of data can be set here"),
        ("data.mean=[0]", "cannot be set here"),
    ):
        with pytest.raises(ConfigError, match=complaint):
            Evaluation(tmp_path, overrides=[override]).config()
    with pytest.raises(ConfigError, match=r"did you mean 'data\.folder'"):
        Evaluation(tmp_path, overrides=["data.foldr=x"]).config()
    assert Evaluation(tmp_path, overrides=["data.test=x"]).config().data.test == "x"
    for arguments in (["--part", "all"], ["--which", "first"]):
        result = CliRunner().invoke(app, ["eval", str(tmp_path), *arguments])
        assert isinstance(result.exception, ConfigError)


def test_an_image_with_too_many_pixels_is_one_line_of_the_table(tmp_path: Path) -> None:
    """The limit is the run's own, or the one that is given."""
    make_run(tmp_path / "run", "data.max_pixels=200")
    store(tmp_path / "new", 1)
    Image.fromarray(image(1, 20, 20)).save(tmp_path / "new" / "large.png")
    arguments = [
        "predict",
        str(tmp_path / "run"),
        str(tmp_path / "new"),
        "--device",
        "cpu",
        "--json",
        str(tmp_path / "out"),
    ]
    for more, num_problems in ((), 1), (("--max-pixels", "400"), 0), (("--max-pixels", "100"), 2):
        outcome = CliRunner().invoke(app, [*arguments, *more])
        assert outcome.exit_code == bool(num_problems), outcome.output
        problems = [
            each["problem"]
            for each in json.loads((tmp_path / "out").read_text())
            if "problem" in each
        ]
        assert len(problems) == num_problems and all(
            text.startswith("too large: ") for text in problems
        )
