"""The user's own folders: `~` in a path, the folders for caches and settings.

Both need the user's home folder, and a container that runs under a foreign user id has none: no
`HOME`, and no entry in the table of users.
"""

import contextlib
import os
import stat
from pathlib import Path

from platformdirs import user_cache_path, user_config_path

from allstep.errors import ConfigError


def expand_home(path: str | Path) -> Path:
    """Return `path` with a leading `~` or `~user` replaced by that user's home folder.

    Where there is no such user, or no known home folder, the path stays as it is, as in a shell.
    """
    try:
        return Path(path).expanduser()
    except RuntimeError:
        return Path(path)


def cache_home() -> Path:
    """Return allstep's folder for downloads and indexes; ConfigError without a home folder."""
    try:
        return user_cache_path("allstep")
    except RuntimeError as error:
        raise ConfigError(f"{_NO_HOME} or ALLSTEP_CACHE to a folder for downloads") from error


def config_home() -> Path:
    """Return allstep's folder for settings and keys; ConfigError without a home folder."""
    try:
        return user_config_path("allstep")
    except RuntimeError as error:
        raise ConfigError(f"{_NO_HOME} or XDG_CONFIG_HOME to a folder for settings") from error


def private_folder(folder: Path) -> Path:
    """Create a folder for this user alone; raise ConfigError if another user can write to it."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise ConfigError(
            f"{folder} must be a folder that belongs to you alone (mode 700): remove it"
        )
    return folder


_NO_HOME = "this user has no home folder (no HOME, no entry among the users): set HOME,"
