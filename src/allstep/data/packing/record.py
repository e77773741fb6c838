"""What a sample becomes in a shard: the bytes of one TFRecord, or of the members of a tar.

| | TFRecord | TFRecord, raw | tar (WebDataset's naming) |
|---|---|---|---|
| image | `image`: encoded bytes | `image/raw`: pixels | `00000017.jpg` (png, webp) |
| size | `shape`: height, width | `image/shape`: height, width, channels | |
| class | `label`: int64 | `label`: int64 | `00000017.cls`: the number as text |
| origin | `filename` | | |
| others | by their names | | `00000017.json`: what JSON can hold |

Raw records hold nothing else, so that images of one size differ in pixels and label only and can
be read many at once. All of it depends on the sample alone: no time, user or machine goes into a
shard.
"""

import json
import os
import tarfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

import numpy as np

from allstep.data.packing.image import SUFFIXES, StoredImage
from allstep.data.sources.folder import IMAGES
from allstep.data.sources.source import Place, Sample
from allstep.data.sources.tar import source as tar
from allstep.data.sources.tfrecord import source as tfrecord
from allstep.data.sources.tfrecord.example import encode
from allstep.data.sources.tfrecord.framing import frame

_REPLACED = frozenset(
    (
        *(
            "image",
            "label",
            "shape",
            "filename",
            "image/filename",
            "image/raw",
            "image/shape",
            "image/height",
            "image/width",
            "height",
            "width",
            "depth",
        ),
        *("image/format", "image/colorspace", "image/channels", "__key__"),
    )
)


@dataclass(frozen=True)
class Item:
    """A sample on its way into a shard."""

    number: int
    place: Place
    sample: Sample
    image: StoredImage


@dataclass(frozen=True)
class Form:
    """A kind of shard: how its files are called, what a sample becomes, what ends a file, and who
    writes its index."""

    suffix: str
    record: Callable[[Item], bytes]
    end: Callable[[int], bytes]
    index: Callable[[Path], object]
    """Walks a shard and writes its index, so that nobody has to walk it later."""


def tfrecord_record(item: Item) -> bytes:
    """One record with an Example in it."""
    image, target = item.image, item.sample.target
    if image.kind == "raw":
        return frame(
            encode({"image/raw": image.content, "image/shape": list(image.shape), "label": target})
        )
    features = {
        "image": image.content,
        "shape": list(image.shape),
        "label": target,
        "filename": filename(item),
    }
    others = {name: _feature(value) for name, value in _others(item.sample).items()}
    return frame(encode({**others, **features}))


def tar_record(item: Item) -> bytes:
    """The members of one sample: image, class, and what else there is."""
    key = f"{item.number:08d}"
    target, others = item.sample.target, _others(item.sample)
    members = {SUFFIXES[item.image.kind]: item.image.content}
    if isinstance(target, int | np.integer):
        members["cls"] = str(int(target)).encode()
    else:
        others["target"] = target
    known = others.pop("json", {})
    if others or known:
        plain = {name: _plain(value) for name, value in others.items()}
        members["json"] = json.dumps(
            {**plain, **known} if isinstance(known, dict) else known, sort_keys=True
        ).encode()
    return b"".join(
        _member(f"{key}.{extension}", content) for extension, content in members.items()
    )


def filename(item: Item) -> bytes:
    """The name a sample had, as the system has it: the feature, else its file, else file and number
    where a file has many."""
    for name in ("filename", "image/filename", "__key__"):
        if (known := item.sample.fields.get(name)) is not None:
            return known if isinstance(known, bytes) else os.fsencode(str(known))
    path = PurePosixPath(item.place.file)
    return os.fsencode(path.name if path.suffix.lower() in IMAGES else f"{path.name}:{item.number}")


def _others(sample: Sample) -> dict[str, Any]:
    """Further features, by name; those that describe the stored bytes are made anew, or were true
    of others."""
    return {name: value for name, value in sample.fields.items() if name not in _REPLACED}


def _plain(value: Any) -> Any:
    """The value as JSON holds it; bytes that are no text by Python's way of writing them."""
    if isinstance(value, bytes | memoryview):
        return bytes(value).decode(errors="backslashreplace")
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    return [_plain(each) for each in value] if isinstance(value, list | tuple) else value


def _feature(value: Any) -> Any:
    """The value as a feature holds it: what has a structure (the `json` of a tar) as text."""
    return json.dumps(value, sort_keys=True) if isinstance(value, dict) or value is None else value


def _member(name: str, content: Any) -> bytes:
    info = tarfile.TarInfo(name)
    info.size, info.mode = len(content), 0o644
    return b"".join(
        (info.tobuf(tarfile.USTAR_FORMAT), content, bytes(-len(content) % tarfile.BLOCKSIZE))
    )


def _tar_end(nbytes: int) -> bytes:
    """Two empty blocks, and the rest of a record of 20 blocks, as tar writes it."""
    end = nbytes + 2 * tarfile.BLOCKSIZE
    return bytes(end + -end % tarfile.RECORDSIZE - nbytes)


FORMS: Mapping[str, Form] = {
    "tfrecord": Form(
        ".tfrecord", tfrecord_record, lambda nbytes: b"", lambda path: tfrecord.Shard(str(path))
    ),
    "tar": Form(".tar", tar_record, _tar_end, lambda path: tar.Shard(str(path), True, None)),
}
