"""A folder that was made for a run which never began: bad input that only the workers could find, such as a net that raises.

```
DIR/config.yaml   what was asked for, and is wrong
DIR/run.jsonl     without a line
DIR/run.lock      of nobody
```

It would only be in the way of the next try, with the mistake mended and the same `--out`. A folder with anything else in it stays.
"""

from pathlib import Path

_ALWAYS = ("config.yaml", "run.lock")
_EMPTY = "run.jsonl"


def remove_unstarted(folder: Path) -> bool:
    """Removes the folder if no run has begun in it; whether it did. Only for one that was made for this run, and that nobody else holds."""
    try:
        found = list(folder.iterdir())
        if not all(_is_of_no_use(path) for path in found):
            return False
        for path in found:
            path.unlink(missing_ok=True)
        folder.rmdir()
    except OSError:  # gone, or not ours to remove: it does no harm
        return False
    return True


def _is_of_no_use(path: Path) -> bool:
    return path.is_file() and (path.name in _ALWAYS or (path.name == _EMPTY and path.stat().st_size == 0))
