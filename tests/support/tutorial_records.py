"""Records as TensorFlow's tutorials and course material write them: labels as bytes, the image as
`image_raw`."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from allstep.data.sources.tfrecord.example import encode
from support.image_folders import encoded
from support.tfrecord_files import write_records


def tutorial_features(
    seed: int, label: Any, height: int = 24, width: int = 32, kind: str = "JPEG"
) -> dict[str, Any]:
    """The features of one record; `label` as it is to be stored."""
    return {
        "image_raw": encoded(seed, height, width, kind),
        "label": label,
        "height": height,
        "width": width,
        "depth": 3,
        "filename": f"{seed:03}.jpg".encode(),
        "Image shapes": [height, width, 3],
    }


def write_tutorial(path: Path, labels: Sequence[Any], **size: Any) -> Path:
    """A shard of such records, one for each label."""
    path.parent.mkdir(parents=True, exist_ok=True)
    return write_records(
        path, (encode(tutorial_features(row, label, **size)) for row, label in enumerate(labels))
    )


def write_labels(path: Path, labels: Sequence[Any]) -> Path:
    """A shard of records whose image does not matter; None leaves the label out."""
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = ({"image": b"x"} | ({} if label is None else {"label": label}) for label in labels)
    return write_records(path, map(encode, rows))
