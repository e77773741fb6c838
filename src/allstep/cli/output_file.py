"""Output files that an option names: `--json FILE`, `--plot FILE.png`, `--out FILE.html`.

They are checked before the work starts, so that an unusable file does not cost an hour. An existing
file is replaced only if it looks like an earlier output: `predict RUN --json *.png`, with the name
of the JSON file forgotten, must not overwrite the first image.
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
    """Raise ConfigError if `file` cannot be written, or exists and is not of this kind.

    `option` is the option that names the file, for the message. `kind` is "JSON", "HTML" or "a
    drawing". None and "-" (standard output) are accepted.
    """
    if file is None or str(file) == STDOUT:
        return
    if file.is_dir():
        raise ConfigError(f"{option} {file}: is a folder; expected a file to write")
    if not file.absolute().parent.is_dir():
        raise ConfigError(
            f"{option} {file}: there is no folder {file.parent}; create it or give another file"
        )
    if file.is_file() and not _is_output(file, kind):
        raise ConfigError(f"{option} {file}: exists and is not {kind}; give the name of a new file")


def write_text(option: str, file: Path | None, text: str) -> None:
    """Write to a file, to standard output (`-`) or nowhere (None); raise ConfigError on failure."""
    if str(file) == STDOUT:
        sys.stdout.write(text)
    elif file is not None:
        try:
            if file.exists() and not file.is_file():
                # A device or a pipe cannot be replaced.
                file.write_text(text)
            else:
                replace_file(file.resolve(), text.encode())
        except OSError as error:
            raise ConfigError(
                f"{option} {file}: cannot be written: {error.strerror or error}"
            ) from error


def _is_output(file: Path, kind: str) -> bool:
    """Return whether an existing file is empty or starts like an output of this kind."""
    try:
        with file.open("rb") as opened:
            start = opened.read(64).lstrip()
    except OSError as error:
        raise ConfigError(f"{file}: cannot be read: {error.strerror or error}") from error
    return not start or start.lower().startswith(_STARTS[kind])
