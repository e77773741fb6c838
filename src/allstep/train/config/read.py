"""Where a config comes from: a recipe, a YAML file and `key=value` words, each over the one before.

    allstep train                                     the recipe fashion-mnist
    allstep train digits epochs=3 optimizer.lr=0.2    a recipe with two keys changed
    allstep train mine.yaml batch=512                 a file with one key changed
    allstep train data.train=photos epochs=20         data of your own: no recipe

A file's key `recipe` names what it starts from. Without it a file starts from the defaults of
`RunConfig`, never from a recipe: what is tuned for one dataset is wrong for another. So do words
alone that name data of one's own. Such a config has the recipe "defaults".

A section that has a name may be given as that name: `model=package.module:factory` is
`model.name=...`.

What belongs to a choice goes with it, unless it is said again beside the new one: another
`model.name` drops the options of the model before, another `optimizer.name` its betas and trust
coefficient, `schedule.shape=one-cycle` the warm-up. A recipe's warm-up that is longer than the run
keeps its part of it.

A learning rate in a file belongs to a batch, and the recipe's is hardly the one that the file's
author had in mind: where the two differ, the file has to name it (`optimizer.base_batch`). The
default learning rate is SGD's: without a recipe, another optimizer needs its own.

`trust=true` (`--trust`) is no key of a config: it says that the code which a run folder's config
names may be executed (`config.trust`). In a run folder's own config it does not count.

Within one of them `batch` and `batch_per_worker` exclude each other; the word of a later one
replaces that of an earlier one.
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
from allstep.train.config.validate import known_keys, validated

NAMED_SECTIONS = ("data", "model", "optimizer")
FREE = "model.options"
"""Whatever the model takes."""
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
"""What other programs call our keys: no spelling is near enough to find them."""


def read_config(
    source: str = DEFAULT, words: Sequence[str] = (), instead: str | None = None
) -> RunConfig:
    """The config from `source` with `words` ("key=value") on top.

    source: a recipe's name, "defaults" or a YAML file.

    `instead` starts from another recipe than the one that was named.
    """
    said = _said(source, words)
    layers = [_spelled_out(layer) for layer in said.layers]
    recipe = instead or _recipe(layers)
    if recipe not in BASES:
        raise ConfigError(f"no recipe is called {cut(recipe)!r}; {did_you_mean(recipe, BASES)}")
    place = _places(source, said.lines, layers[-1])
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
    if is_digest(said.trust):
        check_digest(Path(source), config.model, said.trust)
    elif said.of_run and not said.trust and not _names(layers[1:], "model.name"):
        check_factory(Path(source), config.model)
    return config


def default_source(words: Sequence[str]) -> str:
    """Return what `words` start from when no recipe or file is given.

    That is no recipe where they name data of the user's own.
    """
    return NEUTRAL if _names([_from_words(words)], "data.train") else DEFAULT


def warmup_that_fits(recipe: RunConfig, warmup: Any, epochs: Any) -> Any:
    """Return the epochs of a warm-up that the user did not give: the recipe's, if the run is that
    long.

    Else the same part of the run. None, a part of the run by itself, fits any run.
    """
    is_longer = warmup is not None and isinstance(epochs, int) and 0 < epochs < warmup
    return warmup * epochs / recipe.epochs if is_longer else warmup


def split_arguments(arguments: Sequence[str]) -> tuple[list[str], list[str]]:
    """Recipes and files on the one side, key=value on the other.

    A file may have "=" in its path.
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


class _Said(NamedTuple):
    """What the user said: the recipe or file, and the words on top."""

    layers: list[dict[str, Any]]
    """The last word last."""
    lines: Mapping[str, int]
    """Of the keys in the file."""
    of_run: bool
    """The file is a run folder's, so it may be another person's."""
    trust: bool | str
    """The user trusts the code that the file names; a digest: the launcher has checked that code.
    """


def _said(source: str, words: Sequence[str]) -> _Said:
    document = _document(Path(source)) if _is_file(source) else Document({"recipe": source}, {})
    of_run = _is_file(source) and is_of_run(Path(source))
    layers = [dict(document.value), _from_words(words)]
    in_file, in_words = (_trust(layer, source) for layer in layers)
    trust = in_words or (in_file and not of_run)
    if of_run:
        layers[0], old_keys = translated(layers[0])
        if old_keys and not is_digest(trust):  # else the launcher has reported them
            _report_old_keys(source, tuple(old_keys))
    return _Said(layers, document.lines, of_run, trust)


@cache
def _report_old_keys(source: str, keys: tuple[str, ...]) -> None:
    """Print one line for each file, however often it is read."""
    names = ", ".join(f"{key} is {new_name(key)}" for key in keys)
    print_notice(f"{source}: was written by an older version; read with today's keys: {names}")


def _trust(layer: dict[str, Any], source: str) -> bool | str:
    """Takes the key `trust` out of `layer`; its value."""
    trust = layer.pop(TRUST, False)
    if is_digest(trust):
        return trust
    if not isinstance(trust, bool):
        raise ConfigError(f"{source}: trust: expected true or false, found {cut(repr(trust))}")
    return trust


def read_layers(source: str, words: Sequence[str]) -> list[dict[str, Any]]:
    """What the user said, the last word last."""
    return _said(source, words).layers


def names_data(source: str, words: Sequence[str]) -> bool:
    """Whether the user asked for a data set himself, rather than for a recipe that has one."""
    sections = [_spelled_out(layer).get("data") for layer in read_layers(source, words)]
    return any(
        isinstance(section, Mapping) and (section.get("name") or section.get("train"))
        for section in sections
    )


def _recipe(layers: Sequence[Mapping[str, Any]]) -> str:
    """The last one named; "recipe:" without a name in a file is none."""
    return str(
        next(
            (layer["recipe"] for layer in reversed(layers) if layer.get("recipe") is not None),
            NEUTRAL,
        )
    )


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


def _places(source: str, lines: Mapping[str, int], said: Mapping[str, Any]) -> Callable[[str], str]:
    """Where in the file a key was set, in words; nothing for keys that the words of the command
    line, `said`, have set."""
    said_keys = set(_flat(said))
    return lambda key: (
        f"{source}, line {lines[key]}: " if key in lines and key not in said_keys else ""
    )


def _from_words(words: Sequence[str]) -> dict[str, Any]:
    layer: dict[str, Any] = {}
    for word in words:
        key, equals, value = word.partition("=")
        if not equals or not key:
            raise ConfigError(f"expected key=value, found {cut(word)!r}")
        _merge(layer, _spelled_out(_nested(key, _parsed(word, value))))
    return layer


def _parsed(word: str, value: str) -> Any:
    try:
        return parse_yaml(value, repr(cut(word))).value
    except ConfigError as error:
        if isinstance(error.__cause__, yaml.YAMLError):
            raise ConfigError(f"{cut(word)!r}: the value is not YAML") from error
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
    """With `{"name": ...}` in place of a section's name."""
    return {
        key: {"name": value} if key in NAMED_SECTIONS and isinstance(value, str) else value
        for key, value in layer.items()
    }


def _drop_what_belongs(whole: dict[str, Any], layer: Mapping[str, Any]) -> None:
    """Takes out of `whole` what another choice in `layer` has no use for."""
    if _chooses_another(whole, layer, "model", "name"):
        whole["model"]["options"] = {}
    if _chooses_another(whole, layer, "optimizer", "name"):
        whole["optimizer"].update(betas=None, trust_coefficient=None)
    if (
        _chooses_another(whole, layer, "schedule", "shape")
        and layer["schedule"]["shape"] == "one-cycle"
    ):
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
    """ConfigError for a rate of the file's own that would be scaled from a batch that the file does
    not name."""
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
        " optimizer.base_batch, to the batch itself if the learning rate is meant as it stands"
    )


def _check_optimizer(
    config: RunConfig, layers: Sequence[Mapping[str, Any]], place: Callable[[str], str]
) -> None:
    """ConfigError for an optimizer that would get SGD's default learning rate:

    AdamW diverges with 0.1.
    """
    name = config.optimizer.name
    if (
        config.recipe != NEUTRAL
        or name == BASES[NEUTRAL]().optimizer.name
        or _names(layers, "optimizer.lr")
    ):
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
    """What other programs call by that name, or the key of the same last word in another section
    ("lr"), else the nearest one."""
    word = key.rpartition(".")[2]
    if ours := ELSEWHERE.get(key) or ELSEWHERE.get(word):
        return f"did you mean {ours!r}?"
    same = [name for name in known if name.rpartition(".")[2] == word]
    return did_you_mean(same[0] if same else key, known)


def _one_batch(layer: dict[str, Any]) -> dict[str, Any]:
    """A layer that says the batch one way takes the other way back."""
    ways = [way for way in ("batch", "batch_per_worker") if layer.get(way) is not None]
    if len(ways) == 2:
        both = " and ".join(f"{way}={cut(str(layer[way]))}" for way in ways)
        raise ConfigError(f"{both} are two ways of saying one thing; give one of them")
    other = {"batch": "batch_per_worker", "batch_per_worker": "batch"}
    return {**layer, **{other[way]: None for way in ways}}
