"""The order log of a run in an asynchronous mode: `order.jsonl` in the run folder (D19).

It has one line for each round, from synchronization point to synchronization point, with all
updates in the order in which they were applied:

```
{"from": 0, "to": 1337, "batch": 50, "parties": {"0": [700, 1], "1": [637, 1]},
 "pushes": [[party, start, count, step, read, made, [lr of each group], is_torn], ...]}
```

`parties` has the good samples of each party, by which running statistics are averaged, and its
compute threads. The lowest rank appends a line at the synchronization point. A run that resumes
from an earlier position repeats rounds; their new lines replace the old ones. A torn last line is
skipped.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from allstep.files.bounded import open_to_append, parse_json, read_lines

ORDER_LOG = "order.jsonl"
# The whole numbers of a push, before the learning rates and the mark of a torn one.
_NUM_NUMBERS = 6


@dataclass(frozen=True)
class LoggedRound:
    """A round of the order log.

    samples: good samples by party. threads: compute threads by party. pushes: the fields of each
    `kvstore.training.Push`.
    """

    begin: int
    end: int
    batch: int
    samples: Mapping[int, int]
    threads: Mapping[int, int]
    pushes: tuple[tuple[Any, ...], ...]


def append(folder: Path, entry: LoggedRound) -> None:
    """Append a round to the log in `folder`. Raise OSError if it cannot be written."""
    fields = {
        "from": entry.begin,
        "to": entry.end,
        "batch": entry.batch,
        "parties": {
            str(party): [count, entry.threads[party]] for party, count in entry.samples.items()
        },
        "pushes": entry.pushes,
    }
    line = json.dumps(fields, separators=(",", ":")).encode()
    with open_to_append(folder / ORDER_LOG) as file:
        # In one write, so that a reader sees whole lines. After a torn line a new one begins.
        file.write((b"" if _ends_whole(folder / ORDER_LOG) else b"\n") + line + b"\n")


def _ends_whole(path: Path) -> bool:
    with path.open("rb") as file:
        if not file.seek(0, 2):
            return True
        file.seek(-1, 2)
        return file.read(1) == b"\n"


def read(folder: Path) -> list[LoggedRound]:
    """Return the rounds in their order, without those that a resumed run repeated.

    Empty if there is no log.
    """
    found: list[LoggedRound] = []
    if not (folder / ORDER_LOG).exists():
        return found
    for entry in _entries(folder / ORDER_LOG):
        while found and found[-1].end > entry.begin:
            found.pop()
        found.append(entry)
    return found


def _entries(path: Path) -> Iterator[LoggedRound]:
    for line in read_lines(path):
        try:
            fields = parse_json(line)
            yield LoggedRound(
                int(fields["from"]),
                int(fields["to"]),
                int(fields["batch"]),
                {int(party): int(each[0]) for party, each in fields["parties"].items()},
                {int(party): int(each[1]) for party, each in fields["parties"].items()},
                tuple(_fields(each) for each in fields["pushes"]),
            )
        except (ValueError, KeyError, TypeError, IndexError, AttributeError):
            # A kill in the middle of a line leaves a part of it.
            continue


def _fields(values: Sequence[Any]) -> tuple[Any, ...]:
    """Return the fields of a push. Raise ValueError for anything else."""
    *numbers, lrs, is_torn = values
    if len(numbers) != _NUM_NUMBERS or not all(isinstance(each, int) for each in numbers):
        raise ValueError(f"expected {_NUM_NUMBERS} whole numbers, found {numbers}")
    return (*numbers, tuple(float(lr) for lr in lrs), bool(is_torn))
