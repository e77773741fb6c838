"""Permission to execute the code that the config of a run folder names.

`model.name: package.module:factory` in a config imports a module and calls a function of it. In a
config file or on the command line this is the user's own decision, like running a script. A run
folder may come from another person, and `allstep predict` or `--resume` must not execute code that
this person named in its `config.yaml`.

```
~/.config/allstep/run-folders.key    32 random bytes that only this user can read, made when needed
RUN/run.seal                         HMAC-SHA256 with that key over the factory's name, its options
                                     and the place of its module
```

Training writes the seal; reading a config with a factory from a run folder requires it. Another
person cannot create one, since the key never leaves the user's home. The factory and its options
cannot be changed, because the seal covers them. It also covers the path of the module, so a seal
copied from a folder of this user is not valid for a module of the same name next to that copy.
Owner and mode of the folder prove nothing: a user who unpacks an archive becomes its owner.

Without a valid seal the user must give `--trust` (or `trust=true`) with each command. Resuming the
training with it seals the folder. A key `trust` in a run folder's own config is ignored.

Models that come with allstep execute no code that a config names, and need no seal.
"""

import contextlib
import hashlib
import hmac
import json
import os
import stat
from pathlib import Path
from typing import TypeGuard

from allstep.errors import ConfigError, cut
from allstep.files.atomic import replace_file
from allstep.files.bounded import open_regular, read_regular
from allstep.files.home import config_home
from allstep.models.user_factory import module_place
from allstep.train.config.run_config import ModelConfig

TRUST = "trust"
SEAL = "run.seal"
# Prefix of the value of `trust` in a command to workers.
_DIGEST = "sha256-"
_MARKS = ("run.jsonl", "checkpoints", SEAL)
_KEY_BYTES = 32


def key_file() -> Path:
    """Return the path of this user's key."""
    return config_home() / "run-folders.key"


def is_of_run(config: Path) -> bool:
    """Return whether a config file is in a run folder, so that it may be another person's."""
    config = config.resolve()
    return config.name == "config.yaml" and any(
        os.path.lexists(config.parent / mark) for mark in _MARKS
    )


def check_factory(config: Path, model: ModelConfig) -> None:
    """Raise ConfigError if `model` in a run folder's `config` names code that is not sealed."""
    if ":" not in model.name or is_sealed(config.parent, model):
        return
    module = model.name.partition(":")[0]
    place = module_place(model.name)
    if place is None:
        raise ConfigError(
            f"{config}: model {model.name}: there is no module {module.partition('.')[0]!r} in"
            f" {Path.cwd()} nor among the installed packages; the model is code of the user: run"
            " this command in the folder that the run was trained from"
        )
    raise ConfigError(
        f"{config}: its model {model.name} would execute code of {place}, and nothing proves that"
        f" you wrote this run folder on this machine with that module ({SEAL}); if you trust both,"
        " add --trust"
    )


def trust_override(model: ModelConfig) -> str:
    """Return the override that permits workers to execute this model, which the launcher checked.

    A worker reads `config.yaml` again seconds later, when another process may have replaced it, and
    on another host it does not have the key. So it gets a digest of the model that was checked.
    """
    return f"{TRUST}={_DIGEST}{_digest(model)}"


def check_digest(config: Path, model: ModelConfig, digest: str) -> None:
    """Raise ConfigError unless `model` is the one that the launcher has checked."""
    if ":" in model.name and digest != _DIGEST + _digest(model):
        raise ConfigError(
            f"{config}: its model {cut(model.name)} is not the one that was checked when this"
            " command started: the file was replaced since; inspect it before you start again"
        )


def is_digest(value: object) -> TypeGuard[str]:
    """Return whether `value` is a value of the key `trust` from `trust_override`."""
    return isinstance(value, str) and value.startswith(_DIGEST)


def _digest(model: ModelConfig) -> str:
    claim = json.dumps(model.model_dump(mode="json"), sort_keys=True)
    return hashlib.sha256(claim.encode(errors="backslashreplace")).hexdigest()


def is_sealed(folder: Path, model: ModelConfig) -> bool:
    """Return whether the run folder has this user's seal for `model`."""
    key = _read_key(key_file())
    expected = None if key is None else _seal(key, model)
    try:
        found = read_regular(folder / SEAL, 1024).strip()
    except OSError:
        return False
    return expected is not None and hmac.compare_digest(found, expected)


def seal(folder: Path, model: ModelConfig) -> None:
    """Record that this user trains `model` in `folder`.

    If the seal cannot be written, later commands need --trust.
    """
    if ":" not in model.name or is_sealed(folder, model):
        return
    with contextlib.suppress(OSError):
        if (made := _seal(_key(), model)) is not None:
            replace_file(folder / SEAL, made + b"\n", 0o644)


def _seal(key: bytes, model: ModelConfig) -> bytes | None:
    """Return the seal of `model`; None if its module is not found."""
    place = module_place(model.name)
    if place is None:
        return None
    options = model.model_dump(mode="json")["options"]
    claim = json.dumps(
        ["allstep run folder", 1, model.name, options, place], sort_keys=True, default=str
    )
    return (
        hmac.new(key, claim.encode(errors="backslashreplace"), hashlib.sha256).hexdigest().encode()
    )


def _key() -> bytes:
    """Return this user's key; create it if there is no usable one."""
    file = key_file()
    if (found := _read_key(file)) is not None:
        return found
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    replace_file(file, os.urandom(_KEY_BYTES), 0o600)
    if (made := _read_key(file)) is None:
        raise OSError(f"{file}: cannot be used as a key")
    return made


def _read_key(file: Path) -> bytes | None:
    """Return the key in `file`; None unless it is a key that only this user can read and write."""
    try:
        with open_regular(file) as opened:
            status = os.fstat(opened.fileno())
            content = opened.read(_KEY_BYTES + 1)
    except OSError:
        return None
    private = status.st_uid == os.geteuid() and not stat.S_IMODE(status.st_mode) & 0o077
    return content if private and len(content) == _KEY_BYTES else None
