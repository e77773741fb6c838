"""Configs: layers, typos, invalid values, and files that are read back to equal values."""

import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from pydantic import BaseModel

from allstep.data import order
from allstep.errors import ConfigError
from allstep.optim import LAMB, LARC, LARS, NovoGrad
from allstep.train import RECIPES, RunConfig, read_config
from allstep.train.config import number_types
from allstep.train.config.initial_weights import initial_weights, replaced
from allstep.train.config.read_config import ELSEWHERE
from allstep.train.config.run_config import OWN, ResolvedConfig
from allstep.train.config.validate_keys import known_keys
from allstep.train.step.build import make_optimizer


def complaint(*overrides: str, source: str = "digits") -> str:
    with pytest.raises(ConfigError) as caught:
        read_config(source, overrides)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_the_default_is_fashion_mnist() -> None:
    assert read_config() == RECIPES["fashion-mnist"]()


@pytest.mark.parametrize("recipe", sorted(RECIPES))
def test_recipes_bear_their_names_and_are_described(recipe: str) -> None:
    assert read_config(recipe).recipe == recipe
    assert RECIPES[recipe].__doc__


def test_overrides_change_keys() -> None:
    config = read_config(
        "digits",
        ["epochs=3", "optimizer.lr=2e-1", "model.options.widths=[4, 8]", "optimizer.nesterov=no"],
    )
    assert (config.epochs, config.optimizer.lr, config.model.options["widths"]) == (3, 0.2, [4, 8])
    assert not config.optimizer.nesterov
    assert config.optimizer.momentum == RECIPES["digits"]().optimizer.momentum


def test_a_file_goes_over_its_recipe_and_overrides_over_the_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("recipe: digits\nepochs: 7\noptimizer:\n  lr: 0.3\n")
    config = read_config(str(path), ["optimizer.momentum=0.5"])
    assert (config.recipe, config.epochs, config.optimizer.lr, config.optimizer.momentum) == (
        "digits",
        7,
        0.3,
        0.5,
    )
    assert config.data.name == "digits"


@pytest.mark.parametrize("recipe", sorted(RECIPES))
def test_what_is_written_out_is_whole_and_read_back(tmp_path: Path, recipe: str) -> None:
    config = read_config(
        recipe, ["seed=4", "data.folder=/some/where", "batch_per_worker=8"]
    ).resolved(3)
    path = tmp_path / "config.yaml"
    path.write_text(config.to_yaml())
    assert read_config(str(path)).model_dump() == config.model_dump()
    assert read_config(str(path)).resolved(7) == config
    assert config.batch == 24
    written = yaml.safe_load(path.read_text())
    assert {key for key in known_keys() if "." not in key} <= set(written)


def test_the_batch_is_set_one_way() -> None:
    assert "batch=64 and batch_per_worker=8 are two ways" in complaint(
        "batch=64", "batch_per_worker=8"
    )


def test_a_later_override_of_the_batch_replaces_an_earlier_one(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("recipe: digits\nbatch_per_worker: 10\n")
    assert read_config(str(path)).resolved(4).batch == 40
    assert read_config(str(path), ["batch=64"]).resolved(4).batch == 64
    path.write_text("recipe: digits\nbatch: 10\nbatch_per_worker: 10\n")
    assert "two ways" in complaint(source=str(path))


def test_a_batch_that_is_not_settled_is_not_used() -> None:
    """Code that computes takes a `ResolvedConfig`, which cannot be created without its values."""
    whole = read_config("digits", ["optimizer=lars"]).resolved(2)
    assert ResolvedConfig(**dict(whole)) == whole
    for key, value in (
        ("batch", None),
        ("batch_per_worker", 8),
        ("optimizer", read_config("digits", ["optimizer=lars"]).optimizer),
        ("schedule", whole.schedule.model_copy(update={"warmup": None})),
    ):
        with pytest.raises(ValueError, match=key if key.startswith("batch") else "resolved"):
            ResolvedConfig(**{**dict(whole), key: value})


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("epoch=3", "unknown config key 'epoch'; did you mean 'epochs'?"),
        ("lr=3", "unknown config key 'lr'; did you mean 'optimizer.lr'?"),
        ("optimiser.lr=3", "unknown config key 'optimiser.lr'; did you mean 'optimizer.lr'?"),
        ("optimizer.learning=3", "unknown config key 'optimizer.learning'; "),
        ("optimizer.learning_rate=3", "'optimizer.learning_rate'; did you mean 'optimizer.lr'?"),
        ("optimizer.decay=3", "'optimizer.decay'; did you mean 'optimizer.weight_decay'?"),
        ("batch_size=3", "unknown config key 'batch_size'; did you mean 'batch'?"),
        ("ema=0.9", "config key 'ema' is a section: expected one of its keys, such as ema.decay"),
        (
            "model.optionsfoo=3",
            "unknown config key 'model.optionsfoo'; did you mean 'model.options'?",
        ),
        ("model.options=3", "config key 'model.options': expected a valid dictionary"),
        ("optimizer=3", "config key 'optimizer' is a section"),
        ("epochs.x=3", "unknown config key 'epochs.x'; did you mean 'epochs'?"),
        ("epochs=two", "config key 'epochs': expected a valid integer, found 'two'"),
        ("epochs=0", "config key 'epochs': expected a number from 1 to 1000000, found 0"),
        (
            "seed=1180591620717411303424",
            "'seed': expected a number from 0 to 9223372036854775807, found 11805",
        ),
        (
            "data.workers=100000",
            "'data.workers': expected a number from 0 to 1024 or 'auto', found 100000",
        ),
        (
            "data.num_classes=99999999999",
            "'data.num_classes': expected a number from 1 to 16777216",
        ),
        ("data.folder=5", "config key 'data.folder': expected a path, found 5"),
        ("seed=1:2:3", "'seed=1:2:3', line 1: 1:2:3 is a number to the base 60"),
        ("epochs=1.5", "config key 'epochs': expected a valid integer, found 1.5"),
        ("seed=yes", "config key 'seed': expected a valid integer, found True"),
        (
            "optimizer.lr=-1",
            "config key 'optimizer.lr': expected a number from 1e-15 to 1000000000, found -1",
        ),
        ("optimizer.lr=.nan", "config key 'optimizer.lr': expected"),
        ("optimizer.lr=", "config key 'optimizer.lr': expected a valid number, found None"),
        (
            "schedule.shape=round",
            (
                "config key 'schedule.shape': expected 'cosine', 'linear', 'constant', 'step',"
                " 'polynomial', 'exponential' or 'one-cycle'"
            ),
        ),
        ("model.widths=[]", "unknown config key 'model.widths'"),
        (
            "data.workers=many",
            "config key 'data.workers': expected a valid integer or 'auto', found 'many'",
        ),
        ("share_weights=maybe", "config key 'share_weights': expected a valid boolean"),
        (
            "shares=[3, 0]",
            "config key 'shares': expected a number from 1 to 1048576 per worker, such as [3, 1],"
            " or 'even' or 'speed', found [3, 0]",
        ),
        ("shares=fair", "or 'even' or 'speed', found 'fair'"),
        ("shares=[1.5, 1]", "or 'even' or 'speed', found [1.5, 1]"),
        ("shares=[]", "or 'even' or 'speed', found []"),
        ("shares=", "or 'even' or 'speed', found None"),
        ("optimizer.betas=[0.9]", "config key 'optimizer.betas': expected"),
        (
            "optimizer.betas=[0.9, 1.0]",
            "config key 'optimizer.betas': expected a number less than 1, found 1.0",
        ),
        ("epochs=[1", "'epochs=[1': the value is not YAML"),
        ("epochs", "expected key=value, found 'epochs'"),
        ("=3", "expected key=value, found '=3'"),
        ("recipe=digts", "no recipe is called 'digts'; did you mean 'digits'?"),
    ],
)
def test_mistakes_are_reported_in_one_line(override: str, expected: str) -> None:
    assert expected in complaint(override)


def test_shares_are_read_and_written() -> None:
    config = read_config("digits", ["shares=[3, 1]"])
    assert config.shares == (3, 1)
    assert "shares:\n- 3\n- 1\n" in config.to_yaml()
    assert read_config("digits", ["shares=speed"]).shares == "speed"
    assert number_types.MAX_WEIGHT == order.MAX_WEIGHT


@pytest.mark.parametrize(
    ("shares", "size", "expected"),
    [("even", 3, (1, 1, 1)), ("speed", 2, (1, 1)), ((3, 1), 2, (3, 1)), ((3, 1), 3, (1, 1, 1))],
)
def test_shares_at_the_start_of_a_world(shares: Any, size: int, expected: Any) -> None:
    """A list is for as many workers; an elastic run may have other numbers of them."""
    assert initial_weights(shares, size) == expected
    note = "shares=[3, 1] is for 2 workers: 3 workers have even shares"
    assert replaced(shares, size) == (note if (size, shares) == (3, (3, 1)) else "")


LONG = "x" * 9999


def keys_of(
    wanted: type, section: type[BaseModel] = RunConfig, prefix: str = ""
) -> Iterator[tuple[str, bool]]:
    """Return the keys whose value may have this type, and whether it is a list of them."""
    for name, field in section.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield from keys_of(wanted, kind, f"{prefix}{name}.")
        elif re.search(rf"\b{wanted.__name__}\b", str(kind)) or kind is wanted:
            yield f"{prefix}{name}", "tuple" in str(kind)


@pytest.mark.parametrize("value", ["1e308", "-1e308", "1e39", ".nan", ".inf", "1e-320"])
def test_every_number_is_in_a_range_that_float32_survives(value: str) -> None:
    keys = dict(keys_of(float))
    assert {
        "optimizer.lr",
        "optimizer.weight_decay",
        "evaluation.every",
        "data.mean",
        "growth.at",
    } <= set(keys)
    if value == "1e-320":
        # Where 0 is allowed, so is what rounds to it.
        keys = {
            key: keys[key]
            for key in ("optimizer.lr", "evaluation.every", "data.std", "save.seconds")
        }
    for key, is_list in keys.items():
        assert f"config key '{key}': expected " in complaint(
            f"{key}=[{value}]" if is_list else f"{key}={value}"
        ), key


def test_every_integer_has_an_upper_bound() -> None:
    keys = dict(keys_of(int))
    assert {
        "seed",
        "epochs",
        "batch",
        "data.workers",
        "data.validation",
        "growth.factor",
        "save.keep",
    } <= set(keys)
    for key in keys:
        assert f"config key '{key}': expected a number from " in complaint(f"{key}={1 << 64}"), key


@pytest.mark.parametrize(
    "override",
    [
        *("epochs=" + LONG, f"{LONG}=1", LONG, "recipe=" + LONG, "trust=" + LONG),
        *(
            "seed=0x" + "f" * 9999,
            "epochs=[" + LONG,
            "seed=[" + "1," * 9999 + "]",
            "epochs=*" + LONG,
        ),
    ],
)
def test_long_values_are_cut_in_errors(override: str) -> None:
    assert len(complaint(override)) < 2000


def test_the_largest_batch_of_a_worker_makes_a_valid_config(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    path.write_text(read_config("digits", [f"batch_per_worker={1 << 20}"]).resolved(1024).to_yaml())
    assert read_config(str(path)).batch == 1 << 30


def test_what_other_programs_call_a_key_leads_to_one_that_is_there() -> None:
    assert set(ELSEWHERE.values()) <= set(known_keys())
    assert not set(ELSEWHERE) & set(known_keys())


def test_a_section_with_a_name_may_be_given_as_its_name() -> None:
    config = read_config(
        "digits", ["model=package.module:factory", "model.options.depth=3", "optimizer=lamb"]
    )
    assert (config.model.name, config.optimizer.name) == ("package.module:factory", "lamb")
    assert config.model.options == {"depth": 3}, "the recipe's options belong to the recipe's net"


def test_what_is_wrong_in_a_file_is_reported_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text("recipe: digits\n# mine\noptimizer:\n  momentum: 0.9\n  lr: fast\n")
    assert f"{path}, line 5: config key 'optimizer.lr': expected a valid number" in complaint(
        source=str(path)
    )
    assert complaint("optimizer.lr=slow", source=str(path)).startswith("config key 'optimizer.lr'")
    path.write_text("recipe: digits\nsaving:\n  keep: 2\n")
    assert (
        f"{path}, line 3: unknown config key 'saving.keep'; did you mean 'save.keep'?"
        == complaint(source=str(path))
    )


def test_unknown_recipes_are_corrected() -> None:
    assert (
        complaint(source="fashion_mnist")
        == "no recipe is called 'fashion_mnist'; did you mean 'fashion-mnist'?"
    )


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("a: [", "is not YAML"),
        ("- 1\n- 2\n", "expected keys and values, found list"),
        ("", "expected keys and values, found NoneType"),
        (
            "!!python/object/apply:os.system [true]",
            "the tag !!python/object/apply:os.system is not supported",
        ),
        ("epoch: 3", "unknown config key 'epoch'"),
        ("1: 3", "unknown config key '1'"),
    ],
)
def test_files_that_are_wrong(tmp_path: Path, content: str, expected: str) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(content)
    assert expected in complaint(source=str(path))


def test_a_file_that_is_missing(tmp_path: Path) -> None:
    assert "No such file" in complaint(source=str(tmp_path / "mine.yaml"))


def test_configs_are_frozen() -> None:
    config = read_config("digits")
    with pytest.raises(ValueError, match="frozen"):
        config.epochs = 3  # type: ignore[misc]
    assert isinstance(config, RunConfig)


def signature_default(kind: type, name: str) -> object:
    return inspect.signature(kind).parameters[name].default


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("adamw", torch.optim.AdamW),
        ("lamb", LAMB),
        ("novograd", NovoGrad),
        ("lars", LARS),
        ("larc", LARC),
    ],
)
def test_an_optimizer_has_its_own_defaults(name: str, kind: type[torch.optim.Optimizer]) -> None:
    """The defaults of its class: in the optimizer and in the config that is written."""
    config = read_config("digits", [f"optimizer={name}"])
    made = make_optimizer(config.resolved(1), torch.nn.Linear(3, 2))
    assert isinstance(made, kind)
    for key in OWN[name]:
        assert (
            made.defaults[key]
            == signature_default(kind, key)
            == getattr(config.resolved(1).optimizer, key)
        )
        assert (
            make_optimizer(
                config.model_copy(update={"batch": 64}).resolved(1), torch.nn.Linear(3, 2)
            ).defaults[key]
            == OWN[name][key]
        )
    written = yaml.safe_load(config.resolved(1).to_yaml())["optimizer"]
    assert {key for key in ("betas", "trust_coefficient") if written[key] is not None} == set(
        OWN[name]
    )


def test_values_that_are_given_go_over_an_optimizers_own(tmp_path: Path) -> None:
    path = tmp_path / "old.yaml"
    path.write_text(
        "recipe: digits\noptimizer: {name: larc, trust_coefficient: 0.001, betas: [0.9, 0.999]}\n"
    )
    assert read_config(str(path)).resolved(1).optimizer.trust_coefficient == 0.001
    assert read_config("digits", ["optimizer=novograd", "optimizer.betas=[0.8, 0.9]"]).resolved(
        1
    ).optimizer.betas == (
        0.8,
        0.9,
    )
    path.write_text(read_config("digits", ["optimizer=lars"]).resolved(1).to_yaml())
    assert read_config(str(path)).optimizer.trust_coefficient == 0.001
    assert (
        read_config(str(path), ["optimizer=larc"]).resolved(1).optimizer.trust_coefficient == 0.02
    ), "another optimizer"


RATE = "epochs: 3\noptimizer: {lr: 0.1}\n"


@pytest.mark.parametrize(
    "more", ["batch: 128\n", "batch_per_worker: 512\n", "recipe: digits\nbatch: 128\n"]
)
def test_a_rate_in_a_file_belongs_to_a_batch(tmp_path: Path, more: str) -> None:
    """Scaled from a recipe's batch that the file does not name, the learning rate would change."""
    path = tmp_path / "mine.yaml"
    path.write_text(RATE + more)
    message = complaint(source=str(path))
    by = "recipe digits" if "recipe" in more else "the default config"
    assert message.startswith(
        f"{path}, line 2: optimizer.lr=0.1 has no reference batch, and {by} would scale it (linear)"
        " from "
    )
    assert "set optimizer.base_batch" in message
    for override in ("optimizer.base_batch=128", "optimizer.scaling=none"):
        assert read_config(str(path), [override]).optimizer.lr == 0.1


def test_a_rate_that_stays_as_it_is_needs_no_batch(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    for text in (RATE, RATE + "batch: 256\n", "batch: 128\n", RATE + "recipe: digits\nbatch: 64\n"):
        path.write_text(text)
        read_config(str(path))
    read_config(
        "digits", ["batch=128", "optimizer.lr=0.1"]
    )  # on a recipe it is the recipe's rate that is changed
