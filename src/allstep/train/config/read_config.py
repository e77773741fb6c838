"""Read a config from a recipe, a YAML file and `key=value` overrides, each on top of the former.

    allstep train                                     the recipe fashion-mnist
    allstep train digits epochs=3 optimizer.lr=0.2    a recipe with two keys changed
    allstep train mine.yaml batch=512                 a file with one key changed
    allstep train data.train=photos epochs=20         data of your own: no recipe

The recipe, the file and the overrides are the layers of a config.

* The key `recipe` of a file names the recipe that it starts from. A file without it starts from the
  defaults of `RunConfig`, never from a recipe, because settings tuned for one dataset are wrong for
  another. The same holds for overrides that name data of the user's own. Such a config has the
  recipe "defaults".
* A section with a key `name` may be given as that name: `model=package.module:factory` is
  `model.name=...`.
* Another choice drops the keys that belong to the former one, unless the same layer sets them:
  another `model.name` drops the options of the model, another `optimizer.name` its betas and trust
  coefficient, `schedule.shape=one-cycle` the warm-up. A recipe's warm-up that is longer than the
  run is shortened to the same fraction of the run.
* A learning rate in a file belongs to a batch, which is rarely the recipe's: if the two differ, the
  file must name its batch (`optimizer.base_batch`). The default learning rate is for SGD: without a
  recipe, another optimizer needs its own.
* `trust=true` (`--trust`) is not a key of a config. It permits the execution of the code that the
  config of a run folder names (`config.trust`), and is ignored in a run folder's own config.
* Within one layer `batch` and `batch_per_worker` exclude each other; either in a later layer
  replaces the one of an earlier layer.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from allstep.console.escape import print_notice
from allstep.errors import ConfigError, cut, did_you_mean
from allstep.files.yaml import Document, parse_yaml, read_yaml
from allstep.train.config.recipes import BASES, DEFAULT
from allstep.train.config.renamed import new_name, translated
from allstep.train.config.run_config import NEUTRAL, RunConfig
from allstep.train.config.trust import TRUST, check_digest, check_factory, is_digest, is_of_run
from allstep.train.config.validate_keys import known_keys, validated

NAMED_SECTIONS = ("data", "model", "optimizer", "sync")
FREE = "model.options"
"""A section with any keys: the keyword arguments of the model."""
ELSEWHERE = {
    "accumulation_steps": "accumulation",
    "amp": "precision",
    "arch": "model.name",
    "batch_size": "batch",
    "dataset": "data.name",
    "dtype": "precision",
    "grad_clip": "optimizer.clip",
    "gradient_accumulation_steps": "accumulation",
    "learning_rate": "optimizer.lr",
    "max_epochs": "epochs",
    "max_grad_norm": "optimizer.clip",
    "num_epochs": "epochs",
    "optimizer.decay": "optimizer.weight_decay",
    "scheduler": "schedule.shape",
    "warmup_epochs": "schedule.warmup",
    "wd": "optimizer.weight_decay",
}
"""Names of config keys in other programs, which the nearest spelling would not find."""


def read_config(
    source: str = DEFAULT, overrides: Sequence[str] = (), instead: str | None = None
) -> RunConfig:
    """Return the config of `source` with `overrides` applied. Raise ConfigError if it is invalid.

    `source` is the name of a recipe, "defaults" or the path of a YAML file (default: the recipe
    fashion-mnist). `overrides` are texts "key=value", such as "optimizer.lr=0.2". `instead` names a
    recipe to start from in place of the one that `source` and `overrides` name.
    """
    given = _read_input(source, overrides)
    layers = [_spelled_out(layer) for layer in given.layers]
    recipe = instead or _recipe(layers)
    if recipe not in BASES:
        raise ConfigError(f"no recipe is called {cut(recipe)!r}; {did_you_mean(recipe, BASES)}")
    place = _places(source, given.lines, layers[-1])
    base = BASES[recipe]()
    whole = base.model_dump()
    for layer in layers:
        _check_keys(layer, place)
        _drop_what_belongs(whole, layer)
        _merge(whole, _one_batch(layer))
    if not _names(layers, "schedule.warmup"):
        whole["schedule"]["warmup"] = warmup_that_fits(
            base, whole["schedule"]["warmup"], whole["epochs"]
        )
    config = validated({**whole, "recipe": recipe}, place)
    if _is_file(source) and instead is None:
        _check_base(config, layers, place)
    _check_optimizer(config, layers, place)
    if is_digest(given.trust):
        check_digest(Path(source), config.model, given.trust)
    elif given.of_run and not given.trust and not _names(layers[1:], "model.name"):
        check_factory(Path(source), config.model)
    return config


def default_source(overrides: Sequence[str]) -> str:
    """Return the source of a config that is given by `overrides` alone.

    It is the default recipe, or "defaults" if the overrides name data of the user's own.
    """
    return NEUTRAL if _names([_from_overrides(overrides)], "data.train") else DEFAULT


def warmup_that_fits(recipe: RunConfig, warmup: Any, epochs: Any) -> Any:
    """Return the epochs of a warm-up that the user did not set.

    It is the recipe's `warmup`, or in a shorter run the same fraction of the run. None stays None,
    which is a fraction of any run.
    """
    is_longer = warmup is not None and isinstance(epochs, int) and 0 < epochs < warmup
    return warmup * epochs / recipe.epochs if is_longer else warmup


def split_arguments(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the recipes and files of a command line, and its key=value overrides.

    The path of a file may contain "=".
    """
    sources = [argument for argument in arguments if _is_source(argument)]
    return sources, [argument for argument in arguments if argument not in sources]


def _is_source(argument: str) -> bool:
    key, equals, _ = argument.partition("=")
    return (
        not equals
        or "/" in key
        or (argument.endswith((".yaml", ".yml")) and Path(argument).is_file())
    )


class _Input(NamedTuple):
    """The recipe or file and the overrides, as the user gave them."""

    layers: list[dict[str, Any]]
    """Plain keys and values; a later layer takes precedence."""
    lines: Mapping[str, int]
    """Line numbers of the keys in the file."""
    of_run: bool
    """Whether the file is in a run folder, so that another person may have written it."""
    trust: bool | str
    """Whether the user trusts the code that the file names; or a digest of it, if the launcher has
    checked that code."""


def _read_input(source: str, overrides: Sequence[str]) -> _Input:
    document = _document(Path(source)) if _is_file(source) else Document({"recipe": source}, {})
    of_run = _is_file(source) and is_of_run(Path(source))
    layers = [dict(document.value), _from_overrides(overrides)]
    in_file, in_overrides = (_trust(layer, source) for layer in layers)
    trust = in_overrides or (in_file and not of_run)
    if of_run:
        layers[0], old_keys = translated(layers[0])
        # With a digest the launcher has reported them.
        if old_keys and not is_digest(trust):
            _report_old_keys(source, tuple(old_keys))
    return _Input(layers, document.lines, of_run, trust)


@cache
def _report_old_keys(source: str, keys: tuple[str, ...]) -> None:
    """Print one line per file, even if the file is read several times."""
    names = ", ".join(f"{key} is {new_name(key)}" for key in keys)
    print_notice(f"{source}: was written by an older version; read with the new keys: {names}")


def _trust(layer: dict[str, Any], source: str) -> bool | str:
    """Remove the key `trust` from `layer` and return its value."""
    trust = layer.pop(TRUST, False)
    if is_digest(trust):
        return trust
    if not isinstance(trust, bool):
        raise ConfigError(f"{source}: trust: expected true or false, found {cut(repr(trust))}")
    return trust


def read_layers(source: str, overrides: Sequence[str]) -> list[dict[str, Any]]:
    """Return the layers of a config as the user gave them; a later layer takes precedence."""
    return _read_input(source, overrides).layers


def names_data(source: str, overrides: Sequence[str]) -> bool:
    """Return whether the file or the overrides name a dataset, not only a recipe that has one."""
    sections = [_spelled_out(layer).get("data") for layer in read_layers(source, overrides)]
    return any(
        isinstance(section, Mapping) and (section.get("name") or section.get("train"))
        for section in sections
    )


def _recipe(layers: Sequence[Mapping[str, Any]]) -> str:
    """Return the recipe of the last layer that names one; "recipe:" without a name is none."""
    named = [layer["recipe"] for layer in layers if layer.get("recipe") is not None]
    return str(named[-1] if named else NEUTRAL)


def _is_file(source: str) -> bool:
    return source.endswith((".yaml", ".yml")) or "/" in source


def _document(path: Path) -> Document:
    try:
        document = read_yaml(path)
    except FileNotFoundError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    if not isinstance(document.value, dict):
        raise ConfigError(
            f"{path}: expected keys and values, found {type(document.value).__name__}"
        )
    return document


def _places(
    source: str, lines: Mapping[str, int], given: Mapping[str, Any]
) -> Callable[[str], str]:
    """Return a function from a key to the place in the file that sets it, as text.

    The text is empty for keys that the overrides, `given`, have set.
    """
    given_keys = set(_flat(given))
    return lambda key: (
        f"{source}, line {lines[key]}: " if key in lines and key not in given_keys else ""
    )


def _from_overrides(overrides: Sequence[str]) -> dict[str, Any]:
    layer: dict[str, Any] = {}
    for override in overrides:
        key, equals, value = override.partition("=")
        if not equals or not key:
            raise ConfigError(f"expected key=value, found {cut(override)!r}")
        _merge(layer, _spelled_out(_nested(key, _parsed(override, value))))
    return layer


def _parsed(override: str, value: str) -> Any:
    try:
        return parse_yaml(value, repr(cut(override))).value
    except ConfigError as error:
        if isinstance(error.__cause__, yaml.YAMLError):
            raise ConfigError(f"{cut(override)!r}: the value is not YAML") from error
        raise


def _nested(key: str, value: Any) -> dict[str, Any]:
    for part in reversed(key.split(".")):
        value = {part: value}
    return dict(value)


def _merge(into: dict[str, Any], layer: Mapping[str, Any]) -> None:
    for key, value in layer.items():
        if isinstance(value, Mapping) and isinstance(into.get(key), dict):
            _merge(into[key], value)
        else:
            into[key] = value


def _spelled_out(layer: Mapping[str, Any]) -> dict[str, Any]:
    """Return the layer with `{"name": ...}` where a section is given as its name."""
    return {
        key: {"name": value} if key in NAMED_SECTIONS and isinstance(value, str) else value
        for key, value in layer.items()
    }


def _drop_what_belongs(whole: dict[str, Any], layer: Mapping[str, Any]) -> None:
    """Remove the keys from `whole` that do not apply to another choice in `layer`."""
    if _chooses_another(whole, layer, "model", "name"):
        whole["model"]["options"] = {}
    if _chooses_another(whole, layer, "optimizer", "name"):
        whole["optimizer"].update(betas=None, trust_coefficient=None)
    other_shape = _chooses_another(whole, layer, "schedule", "shape")
    if other_shape and layer["schedule"]["shape"] == "one-cycle":
        whole["schedule"]["warmup"] = 0.0


def _chooses_another(
    whole: Mapping[str, Any], layer: Mapping[str, Any], section: str, key: str
) -> bool:
    own = layer.get(section)
    return isinstance(own, Mapping) and key in own and own[key] != whole[section][key]


def _names(layers: Sequence[Mapping[str, Any]], key: str) -> bool:
    return any(key in _flat(layer) for layer in layers)


def _check_base(
    config: RunConfig, layers: Sequence[Mapping[str, Any]], place: Callable[[str], str]
) -> None:
    """Raise ConfigError if a file's learning rate would be scaled from a batch it does not name."""
    section = config.optimizer
    stays = config.batch_per_worker is None and config.batch in (None, section.base_batch)
    if stays or section.scaling == "none":
        return
    if not _names(layers[:1], "optimizer.lr") or _names(layers, "optimizer.base_batch"):
        return
    batch = (
        f"batch={config.batch}" if config.batch else f"batch_per_worker={config.batch_per_worker}"
    )
    by = "the default config" if config.recipe == NEUTRAL else f"recipe {config.recipe}"
    raise ConfigError(
        f"{place('optimizer.lr')}optimizer.lr={section.lr:g} has no reference batch, and {by} would"
        f" scale it ({section.scaling}) from {section.base_batch} to {batch}: set"
        " optimizer.base_batch, to the batch itself if the learning rate must not be scaled"
    )


def _check_optimizer(
    config: RunConfig, layers: Sequence[Mapping[str, Any]], place: Callable[[str], str]
) -> None:
    """Raise ConfigError if another optimizer would get SGD's default learning rate.

    AdamW, for example, diverges with 0.1.
    """
    name = config.optimizer.name
    is_default = name == BASES[NEUTRAL]().optimizer.name
    if config.recipe != NEUTRAL or is_default or _names(layers, "optimizer.lr"):
        return
    raise ConfigError(
        f"{place('optimizer.name') or place('optimizer')}optimizer.name={name} needs a learning"
        f" rate of its own: the default, {config.optimizer.lr:g}, is for sgd; set optimizer.lr and"
        " the batch it is for, optimizer.base_batch (0.001 at batch 256 is usual for adamw)"
    )


def _flat(layer: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in layer.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}"


def _check_keys(layer: Mapping[str, Any], place: Callable[[str], str]) -> None:
    known = list(known_keys())
    sections = {key.partition(".")[0] for key in known if "." in key}
    for key in _flat(layer):
        if new := new_name(key):
            raise ConfigError(
                f"{place(key)}config key {key!r} is called {new!r} now: write {new!r}"
            )
        if key == FREE or key.startswith(f"{FREE}."):
            continue
        if key in sections:
            raise ConfigError(
                f"{place(key)}config key {key!r} is a section: expected one of its keys, such as"
                f" {_within(key, known)}"
            )
        if key not in known:
            raise ConfigError(
                f"{place(key)}unknown config key {cut(key)!r}; {_suggestion(key, known)}"
            )


def _within(section: str, known: Sequence[str]) -> str:
    return next(key for key in known if key.startswith(f"{section}."))


def _suggestion(key: str, known: Sequence[str]) -> str:
    """Return a suggestion for an unknown key.

    It is the key that has this name in other programs, or a key of another section with the same
    last component ("lr"), else the nearest spelling.
    """
    last = key.rpartition(".")[2]
    if ours := ELSEWHERE.get(key) or ELSEWHERE.get(last):
        return f"did you mean {ours!r}?"
    same = [name for name in known if name.rpartition(".")[2] == last]
    return did_you_mean(same[0] if same else key, known)


def _one_batch(layer: dict[str, Any]) -> dict[str, Any]:
    """Return the layer so that its `batch` or `batch_per_worker` removes the other of the two.

    Raise ConfigError if it has both.
    """
    keys = [key for key in ("batch", "batch_per_worker") if layer.get(key) is not None]
    if len(keys) == 2:
        both = " and ".join(f"{key}={cut(str(layer[key]))}" for key in keys)
        raise ConfigError(f"{both} are two ways to set the batch; give only one of them")
    other = {"batch": "batch_per_worker", "batch_per_worker": "batch"}
    return {**layer, **{other[key]: None for key in keys}}
