"""The computed points of a survey that has not ended, one JSON line each.

```
RUN/landscape/.<kind>-<digest of the settings>.points
{"point": "center", "loss": 0.0123, "accuracy": 0.996}
```

A point is appended as soon as it is computed, so a kill costs only the points in progress; the
last line may then be incomplete and is dropped. The name follows from weights, samples, seed and
grid, so points of other settings are never mixed. A loss that is not finite is stored as null.
"""

import hashlib
import json
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from allstep.errors import ConfigError
from allstep.files.bounded import MAX_LINE, open_to_append, parse_json, read_lines

FOLDER = "landscape"
_MAX_NAME = 100


@dataclass(frozen=True)
class Value:
    """Loss and accuracy at a point; None where they are not finite."""

    loss: float | None
    accuracy: float | None

    @classmethod
    def of(cls, loss: float, accuracy: float) -> "Value":
        """Return the value of two numbers, of which the loss may be NaN or infinite."""
        return cls(loss if math.isfinite(loss) else None, accuracy)


def point_file(run: Path, kind: str, settings: Mapping[str, Any]) -> Path:
    """Return the file with the points of a survey."""
    text = json.dumps(settings, sort_keys=True)
    return run / FOLDER / f".{kind}-{hashlib.sha256(text.encode()).hexdigest()[:16]}.points"


def read_points(file: Path) -> dict[str, Value]:
    """Return the points that were computed before; lines that are no points are dropped."""
    found: dict[str, Value] = {}
    try:
        for line in read_lines(file):
            if len(line) < MAX_LINE and (entry := _entry(line)) is not None:
                found.setdefault(*entry)
    except FileNotFoundError:
        pass
    except OSError as error:
        raise ConfigError(
            f"{file}: cannot be read: {error.strerror or error}; remove it to compute its points"
            " again"
        ) from error
    return found


def _entry(line: bytes) -> tuple[str, Value] | None:
    """Return name and value of the point in a line; None if it has none."""
    try:
        entry = parse_json(line)
        name, loss, accuracy = entry["point"], entry["loss"], entry["accuracy"]
    except (ValueError, TypeError, KeyError):
        return None
    is_point = isinstance(name, str) and len(name) <= _MAX_NAME
    if not is_point or not (_is_number(loss) and _is_number(accuracy)):
        return None
    return name, Value(loss, accuracy)


def _is_number(value: object) -> bool:
    return value is None or (isinstance(value, int | float) and not isinstance(value, bool))


class PointWriter:
    """Appends points to a file, created with its folder if needed."""

    def __init__(self, file: Path) -> None:
        try:
            file.parent.mkdir(exist_ok=True)
            self._file = open_to_append(file)
            # After a kill the last line may have no end.
            self._file.write(b"\n" if os.fstat(self._file.fileno()).st_size else b"")
        except OSError as error:
            raise _unwritable(file, error) from error
        self.path = file

    def add(self, name: str, value: Value) -> None:
        """Append a point."""
        entry = {"point": name, "loss": value.loss, "accuracy": value.accuracy}
        try:
            self._file.write(json.dumps(entry).encode() + b"\n")
        except OSError as error:
            raise _unwritable(self.path, error) from error

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _unwritable(file: Path, error: OSError) -> ConfigError:
    return ConfigError(
        f"{file}: cannot be written: {error.strerror or error}; the landscape of a"
        " run is stored in its folder"
    )
