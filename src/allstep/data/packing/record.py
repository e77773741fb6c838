"""Serialization of samples: the bytes of one TFRecord, or of the members of a tar.

| | TFRecord | TFRecord, raw | tar (file names as in WebDataset) |
|---|---|---|---|
| image | `image`: encoded bytes | `image/raw`: pixels | `00000017.jpg` (png, webp) |
| size | `shape`: height, width | `image/shape`: height, width, channels | |
| class | `label`: int64 | `label`: int64 | `00000017.cls`: the number as text |
| origin | `filename` | | |
| others | by their names | | `00000017.json`: values that JSON can represent |

Raw records contain nothing else, so that images of one size differ only in pixels and label, and
many can be read at once. The bytes depend only on the sample: a shard contains no time, user or
machine.
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

# Features of the source that are not copied: they are written again, or describe only the
# source's own bytes.
_REPLACED = frozenset(
    (
        "__key__",
        "image",
        "label",
        "shape",
        "filename",
        "height",
        "width",
        "depth",
        "image/filename",
        "image/raw",
        "image/shape",
        "image/height",
        "image/width",
        "image/format",
        "image/colorspace",
        "image/channels",
    )
)


@dataclass(frozen=True)
class Item:
    """A sample and its converted image, ready to be serialized."""

    number: int
    place: Place
    sample: Sample
    image: StoredImage


@dataclass(frozen=True)
class Form:
    """A format of shards."""

    suffix: str
    """Suffix of the file names."""
    record: Callable[[Item], bytes]
    """Function that returns the bytes of a sample."""
    end: Callable[[int], bytes]
    """Function that returns the end of a file that has that many bytes so far."""
    index: Callable[[Path], object]
    """Function that scans a shard and writes its index, so that opening needs no scan."""


def tfrecord_record(item: Item) -> bytes:
    """Return one TFRecord that contains an Example."""
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
    """Return the tar members of one sample: image, class, and further features as JSON."""
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
    """Return the original name of a sample, as the bytes of a file name.

    That is a feature with the name, otherwise the name of its image file, otherwise the name of
    the file that contains many samples, with the sample's number.
    """
    for name in ("filename", "image/filename", "__key__"):
        if (known := item.sample.fields.get(name)) is not None:
            return known if isinstance(known, bytes) else os.fsencode(str(known))
    path = PurePosixPath(item.place.file)
    return os.fsencode(path.name if path.suffix.lower() in IMAGES else f"{path.name}:{item.number}")


def _others(sample: Sample) -> dict[str, Any]:
    """Return the further features by name, without those that describe the source's bytes."""
    return {name: value for name, value in sample.fields.items() if name not in _REPLACED}


def _plain(value: Any) -> Any:
    """Return the value as JSON can represent it; bytes that are not UTF-8 become escapes."""
    if isinstance(value, bytes | memoryview):
        return bytes(value).decode(errors="backslashreplace")
    if isinstance(value, np.ndarray | np.generic):
        return value.tolist()
    return [_plain(each) for each in value] if isinstance(value, list | tuple) else value


def _feature(value: Any) -> Any:
    """Return the value as a feature can store it; a dict (the `json` of a tar) becomes text."""
    return json.dumps(value, sort_keys=True) if isinstance(value, dict) or value is None else value


def _member(name: str, content: Any) -> bytes:
    info = tarfile.TarInfo(name)
    info.size, info.mode = len(content), 0o644
    return b"".join(
        (info.tobuf(tarfile.USTAR_FORMAT), content, bytes(-len(content) % tarfile.BLOCKSIZE))
    )


def _tar_end(nbytes: int) -> bytes:
    """Return two empty blocks, and padding to a record of 20 blocks, as tar writes them."""
    end = nbytes + 2 * tarfile.BLOCKSIZE
    return bytes(end + -end % tarfile.RECORDSIZE - nbytes)


FORMS: Mapping[str, Form] = {
    "tfrecord": Form(
        ".tfrecord", tfrecord_record, lambda nbytes: b"", lambda path: tfrecord.Shard(str(path))
    ),
    "tar": Form(".tar", tar_record, _tar_end, lambda path: tar.Shard(str(path), True, None)),
}
