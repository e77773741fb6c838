"""A folder of images, packed into shards."""

from pathlib import Path
from typing import Any

from allstep.data.opening import open_source
from allstep.data.packing.pack import Outcome, pack
from allstep.data.packing.plan import Options
from allstep.data.sources.source import Source

NUM = 24
"""Number of images that `make_folder` writes."""


def packed(folder: Path, target: Path, **options: object) -> Outcome:
    """Pack the images of `folder` into `target`, with arguments of `pack` and of `Options`."""
    calls: Any = {
        key: options.pop(key)
        for key in ("jobs", "overwrite", "strict", "budget", "progress")
        if key in options
    }
    chosen: Any = options
    return pack(open_source(str(folder)), str(folder), target, Options("x", **chosen), **calls)


def shards(folder: Path) -> dict[str, bytes]:
    """Return the content of all shards of `folder`, by file name."""
    return {
        path.name: path.read_bytes()
        for path in sorted(folder.iterdir())
        if path.suffix in (".tfrecord", ".tar")
    }


def everything(source: Source) -> list[tuple[bytes, int]]:
    """Return the image bytes and the label of all samples."""
    samples = [source.read(number) for number in range(len(source))]
    return [(bytes(sample.data), sample.target) for sample in samples]
