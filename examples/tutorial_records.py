"""Write TFRecords as in TensorFlow's tutorials, with class names as labels, and read them back.

TensorFlow is not needed. `example` returns the same bytes as

    tf.train.Example(features=tf.train.Features(feature={
        "image_raw": tf.train.Feature(bytes_list=tf.train.BytesList(value=[jpeg])),
        "label": tf.train.Feature(bytes_list=tf.train.BytesList(value=[b"tench"])),
        "height": tf.train.Feature(int64_list=tf.train.Int64List(value=[height])),
        ...
    })).SerializeToString()
"""

import io
import sys
import tempfile
from pathlib import Path

import numpy as np
from allstep.data import Loader, open_source
from allstep.data.augment import CentreCrop
from allstep.data.augment.transform import Transform
from allstep.data.sources.tfrecord.example import encode
from allstep.data.sources.tfrecord.framing import frame
from PIL import Image

NAMES = [b"tench", b"goldfish", b"hen"]


def example(number):
    """Return a record: an encoded image, its label as bytes, its size and its file name."""
    height, width = 32 + number % 8, 48
    pixels = np.random.default_rng(number).integers(0, 256, (height, width, 3), np.uint8)
    jpeg = io.BytesIO()
    Image.fromarray(pixels).save(jpeg, "JPEG")
    features = {"image_raw": jpeg.getvalue(), "label": NAMES[number % len(NAMES)]}
    features |= {"height": height, "width": width, "depth": 3}
    features |= {"filename": f"{number}.jpg".encode(), "Image shapes": [height, width, 3]}
    return encode(features)


def main(folder):
    (folder / "course.tfrecord").write_bytes(
        b"".join(frame(example(number)) for number in range(12))
    )

    source = open_source(folder)
    print(source.describe_labels())
    for number in range(3):
        target = source.read(number).target
        print(
            f"record {number}: label {NAMES[number].decode()}, class {target} of"
            f" {', '.join(source.classes)}"
        )
    for batch in Loader(source, Transform(CentreCrop(32)), batch=6, seed=0):
        print(f"batch of {tuple(batch.data.shape)}, targets {batch.target.tolist()}")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        main(Path(sys.argv[1]))
    else:
        with tempfile.TemporaryDirectory() as new:
            main(Path(new))
