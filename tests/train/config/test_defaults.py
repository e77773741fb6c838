"""A config without a recipe: textbook settings, key by key, independent of the recipes."""

import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import yaml

from allstep.cli.train import _request
from allstep.errors import ConfigError, DataError
from allstep.train import RECIPES, RunConfig, read_config
from allstep.train.config.check_config import check_config, notes
from allstep.train.config.differences import set_by_recipe, set_by_user
from allstep.train.config.run_config import NEUTRAL
from allstep.train.config.usual_batch import usual_batch
from allstep.train.config.validate_keys import known_keys
from allstep.train.folder.claim import claim_folder
from allstep.train.run.prepare import check, prepare
from allstep.train.step.learning_rate import peak_lr
from allstep.train.watch.terminal import recipe_lines
from support.image_folders import make_folder

DEFAULTS: dict[str, Any] = {
    "recipe": "defaults",
    "seed": 0,
    "epochs": 30,
    "batch": None,
    "batch_per_worker": None,
    "accumulation": 1,
    "label_smoothing": 0.0,
    "overfit": None,
    "device": "auto",
    "execution": "channels-last",
    "share_weights": "auto",
    "shares": "even",
    "log_every": 10,
    "noise_scale": False,
    "sync": {
        "name": "allreduce",
        "parties": "auto",
        "correct": "none",
        "compress": "none",
        "scale": True,
        "outer_lr": None,
        "outer_momentum": None,
        "alpha": None,
    },
    "data": {
        "name": "",
        "folder": None,
        "train": None,
        "validation": None,
        "test": None,
        "split_seed": 0,
        "use": None,
        "augment": "none",
        "prepare": "none",
        "mix": "none",
        "mean": None,
        "std": None,
        "labels_from": None,
        "num_classes": None,
        "workers": "auto",
        "strict": False,
        "budget": None,
        "max_pixels": 100_000_000,
    },
    "model": {
        "name": "resnet18",
        "options": {},
        "norm": "batch",
        "norm_momentum": 0.1,
        "norm_scale": True,
        "ghost": 32,
    },
    "optimizer": {
        "name": "sgd",
        "lr": 0.1,
        "base_batch": 256,
        "scaling": "linear",
        "momentum": 0.9,
        "nesterov": True,
        "betas": None,
        "trust_coefficient": None,
        "weight_decay": 5e-4,
        "decay_all": False,
        "bias_lr": 1.0,
        "clip": None,
        "noise": 0.0,
        "noise_like": None,
    },
    "schedule": {
        "shape": "cosine",
        "warmup": None,
        "warmup_kind": "gradual",
        "warmup_from": 0.0,
        "milestones": [],
        "factor": 0.1,
        "power": 2.0,
        "end": 0.0,
        "keep_updates": False,
    },
    "evaluation": {
        "every": 1.0,
        "flip": False,
        "patience": None,
        "stop_at": None,
        "weights": "last",
    },
    "ema": {"decay": None, "every": 5},
    "growth": {"at": [], "factor": 2, "by_noise": False, "max": None},
    "save": {"seconds": 300.0, "epochs": 1.0, "keep": 3},
}

SETTINGS: dict[str, dict[str, Any]] = yaml.safe_load(
    Path(__file__).with_name("recipes.yaml").read_text()
)
"""All keys of all recipes as they were before the defaults became neutral, `precision` apart."""


def plain(config: RunConfig) -> dict[str, Any]:
    """Return all keys except `precision`, which depends on the machine."""
    return {
        key: value for key, value in config.model_dump(mode="json").items() if key != "precision"
    }


def test_the_defaults_key_by_key() -> None:
    assert plain(RunConfig()) == DEFAULTS
    assert plain(read_config(NEUTRAL)) == DEFAULTS


@pytest.mark.parametrize("recipe", sorted(RECIPES))
def test_a_recipe_has_the_settings_it_was_measured_with(recipe: str) -> None:
    assert plain(read_config(recipe).resolved(2)) == SETTINGS[recipe]
    assert set(SETTINGS) == set(RECIPES)


@pytest.mark.parametrize("recipe", sorted(RECIPES))
def test_a_config_written_before_is_the_same_run(tmp_path: Path, recipe: str) -> None:
    """Such a file has all keys, so no default applies; `precision` is inserted as in old files."""
    before = {**SETTINGS[recipe], "precision": "bfloat16"}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(before, sort_keys=False))
    config = read_config(str(tmp_path / "config.yaml")).resolved(2)
    assert config.model_dump(mode="json") == before
    (tmp_path / "run.jsonl").write_text('{"kind": "start", "time": 1}\n')
    assert claim_folder(config, tmp_path, resume=True).resumes


def test_a_run_on_data_of_ones_own_from_before_is_the_same_run(tmp_path: Path) -> None:
    """It started from fashion-mnist and has that name; the same file is another run today."""
    out = tmp_path / "out"
    out.mkdir()
    before = {**SETTINGS["fashion-mnist"], "precision": "bfloat16", "batch": 16}
    before["data"] = {**before["data"], "train": str(tmp_path / "photos")}
    (out / "config.yaml").write_text(yaml.safe_dump(before, sort_keys=False))
    (out / "run.jsonl").write_text('{"kind": "start", "time": 1}\n')
    config = read_config(str(out / "config.yaml")).resolved(1)
    assert config.model_dump(mode="json") == before
    assert claim_folder(config, out, resume=True).resumes
    (tmp_path / "mine.yaml").write_text(f"data: {{train: {tmp_path / 'photos'}}}\nbatch: 16\n")
    with pytest.raises(
        ConfigError, match=r"recipe was fashion-mnist, is defaults now.*resume it unchanged"
    ):
        claim_folder(read_config(str(tmp_path / "mine.yaml")).resolved(1), out, resume=True)


def test_a_file_starts_from_the_defaults_unless_it_names_a_recipe(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    for first in ("", "recipe:\n", "recipe: defaults\n"):
        path.write_text(f"{first}data: {{train: photos}}\n")
        config = read_config(str(path))
        data = {**DEFAULTS["data"], "name": "photos", "train": "photos"}
        assert plain(config) == {**DEFAULTS, "data": data}
    path.write_text("recipe: fashion-mnist\ndata: {train: photos}\n")
    inherited = read_config(str(path))
    assert (inherited.recipe, inherited.optimizer.bias_lr, inherited.ema.decay) == (
        "fashion-mnist",
        16,
        0.98,
    )
    assert read_config().recipe == "fashion-mnist"


def test_overrides_alone_start_from_fashion_mnist_unless_they_name_data_of_ones_own() -> None:
    def source(*overrides: str) -> str:
        return _request(list(overrides), [], None, None, None, None).source

    assert source() == source("epochs=3") == source("data.name=cifar10") == "fashion-mnist"
    assert source("data.train=photos", "epochs=3") == "defaults"
    assert source("digits", "data.train=photos") == "digits"


@pytest.mark.parametrize(
    ("place", "name"),
    [
        ("photos", "photos"),
        ("/data/photos/", "photos"),
        ("/data/photos/*.tar", "photos"),
        ("s3://bucket/birds/train-{0..9}.tar", "birds"),
        ("synthetic:100x8x8", "synthetic"),
        (".", "data"),
        ("~/*.tfrecord", "data"),
    ],
)
def test_data_is_named_after_its_place(place: str, name: str) -> None:
    config = read_config(NEUTRAL, [f"data.train={place}"])
    assert (config.data.name, config.title) == (name, f"resnet18 on {name}")
    assert read_config(NEUTRAL, [f"data.train={place}", "data.name=mine"]).data.name == "mine"


def test_what_a_run_without_a_recipe_is_called(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = read_config(NEUTRAL, ["data.train=a/b c", "model=package.nets:make"]).resolved(1)
    assert config.title == "make on b c"
    assert claim_folder(config, None).path.name.startswith("make-on-b-c-")


def test_a_config_without_data_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text("epochs: 3\n")
    with pytest.raises(ConfigError, match=r"names no data: set data.train .*\(recipe: digits\)"):
        prepare(str(tmp_path / "mine.yaml"))


@pytest.mark.parametrize("given", ["optimizer: adamw\n", "optimizer: {name: lars}\n"])
def test_another_optimizer_needs_its_own_learning_rate(tmp_path: Path, given: str) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(f"data: photos\n{given}")
    with pytest.raises(
        ConfigError, match=r"mine.yaml, line 2: optimizer.name=\w+ needs a learning rate of its own"
    ):
        read_config(str(path))
    assert read_config(str(path), ["optimizer.lr=0.001"]).optimizer.lr == 0.001
    assert read_config("digits", ["optimizer=adamw"]).optimizer.lr == 0.05, "a recipe is not asked"


# The batch of a run that names none


@pytest.mark.parametrize(
    ("base", "num_train", "expected"),
    [
        (256, 1_281_167, 256),
        (256, 4096, 256),
        (256, 4095, 128),
        (256, 400, 16),
        (256, 240, 8),
        (256, 20, 8),
        (256, 5, 5),
        (256, 1, 1),
        (24, 240, 12),
        (100, 50, 12),
    ],
)
def test_the_batch_suits_the_dataset(base: int, num_train: int, expected: int) -> None:
    assert usual_batch(base, num_train) == expected


def test_a_small_dataset_gets_a_small_batch_and_a_learning_rate_to_match(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "photos", per_class=30)
    (tmp_path / "mine.yaml").write_text(
        f"data: {{train: {folder}, augment: Resize(32), prepare: Resize(32)}}\n"
    )
    prepared = prepare(str(tmp_path / "mine.yaml"))
    assert (prepared.config.batch, peak_lr(prepared.config)) == (8, 0.1 * 8 / 256)
    assert len(check(prepared).train) == 72
    by_worker = prepare(str(tmp_path / "mine.yaml"), ["batch_per_worker=3"]).config
    assert (by_worker.batch, by_worker.resolved(2).batch) == (None, 6)
    with pytest.raises(
        ConfigError, match="a batch of 256 is larger than the training split, which has 72 samples"
    ):
        check(prepare(str(tmp_path / "mine.yaml"), ["batch=256"]))


def test_a_learning_rate_in_a_file_is_not_scaled_to_a_batch_that_it_does_not_name(
    tmp_path: Path,
) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("data: {train: 'synthetic:200x8x8', num_classes: 3}\noptimizer: {lr: 0.01}\n")
    with pytest.raises(
        ConfigError, match=r"line 2: optimizer.lr=0.01 has no reference batch.* to batch=8"
    ):
        prepare(str(path))
    assert peak_lr(prepare(str(path), ["optimizer.base_batch=8"]).config) == 0.01
    assert peak_lr(prepare(str(path), ["batch=32", "optimizer.base_batch=16"]).config) == 0.02


def test_data_that_is_gone_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"data.train: .*gone: no such file or folder"):
        prepare(NEUTRAL, [f"data.train={tmp_path / 'gone'}"])


@pytest.mark.parametrize(
    ("overrides", "num_train", "expected"),
    [
        (
            ["batch=256"],
            400,
            "an epoch has only 2 updates: 400 training samples at batch 256.*it is 16 then",
        ),
        (["batch=16"], 400, None),
        (["batch=256", "overfit=400"], 400, None),
    ],
)
def test_few_updates_are_noted(overrides: list[str], num_train: int, expected: str | None) -> None:
    found = notes(read_config(NEUTRAL, ["data.name=digits", *overrides]).resolved(1), 1, num_train)
    assert len(found) == (expected is not None)
    if expected:
        assert re.search(expected, found[0])
    assert notes(read_config("fashion-mnist", ["batch=256"]).resolved(1), 1, 400) == []


# The banner


def test_the_banner_lists_what_a_recipe_sets() -> None:
    """Every key in which it differs from the defaults, as overrides that reproduce the recipe."""
    lines = dict(recipe_lines(read_config("digits", ["optimizer.lr=0.2", "seed=3"]).resolved(2)))
    assert lines == {
        "recipe": (
            "digits sets epochs=150 batch=64 model.name=small-cnn 'model.options.widths=[32,64]'"
            " model.options.hidden=64 model.norm=none optimizer.lr=0.05 optimizer.base_batch=64"
            " schedule.warmup=0.5 save.seconds=2 save.epochs=null"
        ),
        "changed": "seed=3 optimizer.lr=0.2",
    }


@pytest.mark.parametrize("recipe", sorted(RECIPES))
def test_the_overrides_of_a_recipe_make_it_of_the_defaults(recipe: str) -> None:
    whole = RECIPES[recipe]()
    overrides = [*shlex.split(" ".join(set_by_recipe(recipe))), f"data.name={whole.data.name}"]
    made = read_config(NEUTRAL, overrides).model_copy(update={"recipe": recipe})
    assert plain(made) == plain(whole)
    assert set_by_user(whole) == set_by_user(whole.resolved(2)) == []


def test_the_banner_of_a_run_without_a_recipe() -> None:
    overrides = [
        "data.train=photos",
        "data.augment=RandomResizedCrop(224), Flip()",
        "epochs=60",
        "batch=16",
    ]
    assert recipe_lines(read_config(NEUTRAL, overrides).resolved(2)) == [
        ("recipe", "none: the defaults"),
        ("changed", "epochs=60 'data.augment=RandomResizedCrop(224), Flip()'"),
    ]
    assert recipe_lines(read_config(NEUTRAL, ["data.name=digits"]).resolved(2)) == [
        ("recipe", "none: the defaults")
    ]
    adam = read_config(
        NEUTRAL, ["data.name=digits", "optimizer=adamw", "optimizer.lr=0.001", "schedule.warmup=2"]
    )
    assert (
        dict(recipe_lines(adam.resolved(2)))["changed"]
        == "optimizer.name=adamw optimizer.lr=0.001 schedule.warmup=2"
    )
    assert recipe_lines(adam.model_copy(update={"recipe": "of another version"})) == []


def test_every_default_is_a_key_that_a_file_may_give() -> None:
    check_config(read_config(NEUTRAL, ["data.name=digits"]), 2)
    assert "recipe" in known_keys()
