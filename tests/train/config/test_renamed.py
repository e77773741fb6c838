"""Renamed config keys: typing an old one is an error, old run folders are translated."""

from pathlib import Path
from typing import Any

import pytest
import yaml

from allstep.errors import ConfigError
from allstep.train import read_config
from allstep.train.config.read_config import _report_old_keys
from allstep.train.config.renamed import (
    RENAMED,
    new_name,
    translated,
    translated_state,
    with_new_keys,
)
from allstep.train.config.validate_keys import known_keys

OLD = {
    "layout": "plain",
    "data": {"name": "digits", "deviation": [2.0], "mean": [1.0]},
    "evaluation": {"mirror": True, "choose": "best"},
    "average": {"decay": 0.9, "every": 2},
    "growth": {"most": 512},
}
NEW = {
    "execution": "plain",
    "data": {"name": "digits", "std": [2.0], "mean": [1.0]},
    "evaluation": {"flip": True, "weights": "best"},
    "ema": {"decay": 0.9, "every": 2},
    "growth": {"max": 512},
}
VALUES = {
    "average.decay": 0.9,
    "average.every": 2,
    "data.deviation": "[1.0]",
    "evaluation.choose": "best",
}


def test_every_new_name_is_a_key_and_no_old_one() -> None:
    known = set(known_keys())
    assert set(RENAMED.values()) <= known and not RENAMED.keys() & known


@pytest.mark.parametrize("key", [*RENAMED, "average"])
def test_an_old_key_that_is_typed(tmp_path: Path, key: str) -> None:
    new = new_name(key)
    message = f"config key '{key}' is called '{new}' now: write '{new}'"
    with pytest.raises(ConfigError, match=message):
        read_config("digits", [f"{key}={VALUES.get(key, 1)}"])
    with pytest.raises(ConfigError, match=message):
        read_config("digits", [f"{key}={VALUES.get(key, 1)}", f"{new}={VALUES.get(key, 1)}"])
    section, _, name = key.partition(".")
    (tmp_path / "mine.yaml").write_text(
        yaml.safe_dump({"recipe": "digits", section: {name: 1} if name else 1})
    )
    with pytest.raises(ConfigError, match=f"mine.yaml, line .*{message}"):
        read_config(str(tmp_path / "mine.yaml"))


def test_an_old_run_folder_is_translated_with_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _report_old_keys.cache_clear()
    (tmp_path / "run.jsonl").write_text('{"kind": "start"}\n')
    (tmp_path / "config.yaml").write_text(yaml.safe_dump({"recipe": "digits", "batch": 64, **OLD}))
    configs = [read_config(str(tmp_path / "config.yaml")) for _ in range(3)]
    (lines,) = {capsys.readouterr().err}
    assert (
        lines.count("\n") == 1
        and "layout is execution" in lines
        and "growth.most is growth.max" in lines
    )
    for config in configs:
        plain = config.model_dump(mode="json")
        for section, value in NEW.items():
            values: Any = value if isinstance(value, dict) else {}
            assert (
                all(plain[section][key] == each for key, each in values.items())
                or plain[section] == value
            )


def test_translation() -> None:
    assert translated(OLD) == (NEW, list(RENAMED)) and translated(NEW) == (NEW, [])
    assert OLD["average"] == {"decay": 0.9, "every": 2}, "the argument is not changed"
    with pytest.raises(ConfigError, match="'layout' is called 'execution' now, and both are given"):
        translated({"layout": "plain", "execution": "plain"})
    mixed = {"layout": "plain", "execution": "auto"}
    assert with_new_keys(mixed) == mixed
    assert translated({"evaluation": 3, "data": None}) == ({"evaluation": 3, "data": None}, [])
    state = {
        "layout": "plain",
        "average": {"updates": 3},
        "pictures": {"deviation": [1.0], "mean": [2.0]},
    }
    assert translated_state(state) == {
        "execution": "plain",
        "ema": {"updates": 3},
        "pictures": {"std": [1.0], "mean": [2.0]},
    }
