"""Files that a command writes where the user says (`--json FILE`, `--plot FILE.png`, `--out
FILE.html`).

What would go wrong at the end of an hour goes wrong at the start. A file that is there already is
replaced only if it looks like an earlier output: `predict RUN --json *.png`, with the name
forgotten, must not write over the first image.
"""

import sys
from pathlib import Path

from allstep.errors import ConfigError
from allstep.files.atomic import replace_file

STDOUT = "-"
_STARTS = {
    "JSON": (b"{", b"["),
    "HTML": (b"<!doctype html", b"<html"),
    "a drawing": (b"\x89png", b"\xff\xd8\xff", b"%pdf", b"%!ps", b"<?xml", b"<svg"),
}


def check_output(option: str, file: Path | None, kind: str) -> None:
    """Raise ConfigError if `file` cannot be written, or is there and not of this kind.

    kind: JSON, HTML or "a drawing".
    """
    if file is None or str(file) == STDOUT:
        return
    if file.is_dir():
        raise ConfigError(f"{option} {file}: is a folder; expected a file to write")
    if not file.absolute().parent.is_dir():
        raise ConfigError(f"{option} {file}: there is no folder {file.parent}")
    if file.is_file() and not _is_output(file, kind):
        raise ConfigError(
            f"{option} {file}: is there already and is not {kind}: give the name of a new file"
        )


def write_text(option: str, file: Path | None, text: str) -> None:
    """Write to a file, to standard output (`-`) or nowhere (None)."""
    if str(file) == STDOUT:
        sys.stdout.write(text)
    elif file is not None:
        try:
            if file.exists() and not file.is_file():
                file.write_text(text)  # a device, or a pipe
            else:
                replace_file(file.resolve(), text.encode())
        except OSError as error:
            raise ConfigError(
                f"{option} {file}: cannot be written: {error.strerror or error}"
            ) from error


def _is_output(file: Path, kind: str) -> bool:
    try:
        with file.open("rb") as opened:
            start = opened.read(64).lstrip()
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read: {error.strerror or error}") from error
    return not start or start.lower().startswith(_STARTS[kind])
