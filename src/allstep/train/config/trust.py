"""Whether a run folder may name code that is executed: if this user wrote it, or trusts it.

`model.name: package.module:factory` in a config imports a module and calls a function of it. In a
config file or on the command line that is the user's own word, like a script to run. A run folder
may come from another person, and `allstep predict` or `--resume` on it must not run what that
person wrote into its `config.yaml`.

```
~/.config/allstep/run-folders.key    32 random bytes that only this user can read, made when needed
RUN/run.seal                         HMAC-SHA256 with that key over the factory's name, its options
                                     and the place of its module
```

Training writes the seal; reading a config with a factory from a run folder asks for it. Another
person cannot make one, since the key never leaves the user's home. What a seal covers cannot be
changed: not the factory, not its options. The place of the module is in it too, so a seal that was
copied from a folder of this user gives no right to a module of the same name next to that copy.
Owner and mode of the folder prove nothing: unpacking an archive makes the unpacker the owner.

Without a valid seal the user says `--trust` (or `trust=true`), once for each command. Continuing
the training with it seals the folder. A key `trust` in a run folder's own config does not count.

Models that come with allstep execute nothing of a config's choice and need no seal.
"""

import contextlib
import hashlib
import hmac
import json
import os
import stat
from pathlib import Path
from typing import TypeGuard

from platformdirs import user_config_path

from allstep.errors import ConfigError, cut
from allstep.files.atomic import replace_file
from allstep.files.bounded import open_regular, read_regular
from allstep.models.by_name import module_place
from allstep.train.config.run_config import ModelConfig

TRUST = "trust"
SEAL = "run.seal"
# What the value of `trust` begins with in a command to workers.
_DIGEST = "sha256-"
_MARKS = ("run.jsonl", "checkpoints", SEAL)
_KEY_BYTES = 32


def key_file() -> Path:
    """Return the place of this user's key."""
    return user_config_path("allstep") / "run-folders.key"


def is_of_run(config: Path) -> bool:
    """Whether a config file is that of a run folder, and so may be another person's."""
    config = config.resolve()
    return config.name == "config.yaml" and any(
        os.path.lexists(config.parent / mark) for mark in _MARKS
    )


def check_factory(config: Path, model: ModelConfig) -> None:
    """ConfigError when `model` in a run folder's `config` is code that is not proved to be the
    user's."""
    if ":" not in model.name or is_sealed(config.parent, model):
        return
    module = model.name.partition(":")[0]
    place = module_place(model.name)
    if place is None:
        raise ConfigError(
            f"{config}: model {model.name}: there is no module {module.partition('.')[0]!r} in"
            f" {Path.cwd()} nor among what is installed; the net is the user's own: call this from"
            " the folder that the run was trained from"
        )
    raise ConfigError(
        f"{config}: its model {model.name} would execute code of {place}, and nothing proves that"
        f" you wrote this run folder on this machine with that module ({SEAL}); if you trust both,"
        " add --trust"
    )


def checked_word(model: ModelConfig) -> str:
    """Return the word that lets workers execute just this model, which the launcher has checked.

    A worker reads `config.yaml` again, seconds later, and by then another process may have
    exchanged it; on another host it also lacks the key. So it gets a digest of what was checked.
    """
    return f"{TRUST}={_DIGEST}{_digest(model)}"


def check_digest(config: Path, model: ModelConfig, digest: str) -> None:
    """ConfigError unless `model` is the one that the launcher has checked."""
    if ":" in model.name and digest != _DIGEST + _digest(model):
        raise ConfigError(
            f"{config}: its model {cut(model.name)} is not the one that was checked when this"
            " command began: the file was exchanged since; look at it before you start again"
        )


def is_digest(value: object) -> TypeGuard[str]:
    """Whether the value of the key `trust` is that of `checked_word`."""
    return isinstance(value, str) and value.startswith(_DIGEST)


def _digest(model: ModelConfig) -> str:
    claim = json.dumps(model.model_dump(mode="json"), sort_keys=True)
    return hashlib.sha256(claim.encode(errors="backslashreplace")).hexdigest()


def is_sealed(folder: Path, model: ModelConfig) -> bool:
    """Whether the run folder has this user's seal for `model`."""
    key = _read_key(key_file())
    expected = None if key is None else _seal(key, model)
    try:
        found = read_regular(folder / SEAL, 1024).strip()
    except OSError:
        return False
    return expected is not None and hmac.compare_digest(found, expected)


def seal(folder: Path, model: ModelConfig) -> None:
    """Record that this user trains `model` in `folder`; where that fails, it needs --trust later."""
    if ":" not in model.name or is_sealed(folder, model):
        return
    with contextlib.suppress(OSError):
        if (made := _seal(_key(), model)) is not None:
            replace_file(folder / SEAL, made + b"\n", 0o644)


def _seal(key: bytes, model: ModelConfig) -> bytes | None:
    """None where the module is not found."""
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
    """This user's key, made if there is none that can be used."""
    file = key_file()
    if (found := _read_key(file)) is not None:
        return found
    file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    replace_file(file, os.urandom(_KEY_BYTES), 0o600)
    if (made := _read_key(file)) is None:
        raise OSError(f"{file}: cannot be used as a key")
    return made


def _read_key(file: Path) -> bytes | None:
    """None unless it is a key that only this user can have read or written."""
    try:
        with open_regular(file) as opened:
            status = os.fstat(opened.fileno())
            content = opened.read(_KEY_BYTES + 1)
    except OSError:
        return None
    private = status.st_uid == os.geteuid() and not stat.S_IMODE(status.st_mode) & 0o077
    return content if private and len(content) == _KEY_BYTES else None
