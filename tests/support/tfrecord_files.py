"""TFRecord files for tests, by the plainest means: written record by record, read from beginning to
end, each record checked."""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from allstep.data.sources.tfrecord.framing import OVERHEAD, data_at, frame, length_at


def write_records(path: Path, records: Iterable[Any]) -> Path:
    """A file of these records."""
    path.write_bytes(b"".join(map(frame, records)))
    return path


def read_records(content: Any) -> Iterator[memoryview]:
    """The data of all records in `content`; ValueError at the first damage."""
    view, offset = memoryview(content).cast("B"), 0
    while offset < len(view):
        length = length_at(view, offset)
        yield data_at(view, offset, length)
        offset += OVERHEAD + length
