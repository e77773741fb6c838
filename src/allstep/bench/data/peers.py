"""The other loaders of `allstep bench data`, each used as in its own documentation.

All do the same work: a random resized crop (8 to 100% of the area, 3:4 to 4:3) to a square, a
random flip, a batch of uint8. Or, for small images: four pixels of zeros around, a random crop of
the original size, a flip. Each is an endless generator of the number of images in a batch.
"""

import io
import json
import math
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

FILES, TARS, RECORDS, ARRAYS = "files", "tars", "records", "images.npy"
"""Names in the benchmark's folder: the same images, in each loader's own format."""


@dataclass(frozen=True)
class Settings:
    """Parameters of the benchmark.

    `folder` holds the images, `size` is the output's height and width in pixels, `num_threads` the
    number of threads or processes of a contender.
    """

    folder: str
    size: int
    batch: int
    num_threads: int

    @property
    def path(self) -> Path:
        return Path(self.folder)

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> "Settings":
        return cls(**json.loads(text))


# Loaders for torch


def _crop_box(width: int, height: int, random: np.random.Generator) -> tuple[int, int, int, int]:
    """Return (left, top, width, height) of a random resized crop: ten tries, then the middle."""
    for _ in range(10):
        area = width * height * random.uniform(0.08, 1.0)
        ratio = math.exp(random.uniform(math.log(3 / 4), math.log(4 / 3)))
        wide, high = round(math.sqrt(area * ratio)), round(math.sqrt(area / ratio))
        if 0 < wide <= width and 0 < high <= height:
            return (
                int(random.integers(width - wide + 1)),
                int(random.integers(height - high + 1)),
                wide,
                high,
            )
    side = min(width, height)
    return (width - side) // 2, (height - side) // 2, side, side


def _with_pillow(content: bytes, size: int, random: np.random.Generator) -> NDArray[np.uint8]:
    from PIL import Image

    image = Image.open(io.BytesIO(content)).convert("RGB")
    left, top, wide, high = _crop_box(*image.size, random)
    image = image.resize(
        (size, size), Image.Resampling.BILINEAR, (left, top, left + wide, top + high)
    )
    if random.random() < 0.5:
        image = image.transpose(Image.Transpose.FLIP_LEFT_RIGHT)
    return np.array(image)


def _with_opencv(content: bytes, size: int, random: np.random.Generator) -> NDArray[np.uint8]:
    import cv2

    image = cv2.imdecode(np.frombuffer(content, np.uint8), cv2.IMREAD_COLOR)
    assert image is not None
    left, top, wide, high = _crop_box(image.shape[1], image.shape[0], random)
    image = cv2.resize(image[top : top + high, left : left + wide], (size, size))
    image = cv2.cvtColor(image, cv2.COLOR_BGR2RGB)
    return np.asarray(cv2.flip(image, 1) if random.random() < 0.5 else image, np.uint8)


DECODERS: Mapping[str, Callable[[bytes, int, np.random.Generator], NDArray[np.uint8]]] = {
    "Pillow": _with_pillow,
    "OpenCV": _with_opencv,
}


class FilesDataset:
    """A folder of images, one file each, read as in torchvision's example."""

    def __init__(self, settings: Settings, decoder: str) -> None:
        self.paths = sorted(str(path) for path in (settings.path / FILES).iterdir())
        self.size, self.decoder = settings.size, decoder

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, number: int) -> Any:
        import torch

        random = _generator()
        pixels = DECODERS[self.decoder](Path(self.paths[number]).read_bytes(), self.size, random)
        return torch.from_numpy(pixels.transpose(2, 0, 1)), number


_random: np.random.Generator | None = None


def _generator() -> np.random.Generator:
    """Return the random generator of this process."""
    global _random
    if _random is None:
        _random = np.random.default_rng(os.getpid())
    return _random


def _dataloader(settings: Settings, decoder: str) -> Iterator[int]:
    import cv2

    # A worker is one thread, as torch sets its own threads.
    cv2.setNumThreads(0)
    loader = _shuffled(FilesDataset(settings, decoder), settings)
    while True:
        for data, _ in loader:
            yield len(data)


def _shuffled(dataset: Any, settings: Settings) -> Any:
    """Return torch's DataLoader, with workers that persist from epoch to epoch."""
    from torch.utils.data import DataLoader

    workers = settings.num_threads
    return DataLoader(
        dataset, settings.batch, shuffle=True, num_workers=workers, persistent_workers=workers > 0
    )


def _webdataset(settings: Settings) -> Iterator[int]:
    import webdataset
    from torch.utils.data import DataLoader

    def decode(content: bytes) -> Any:
        import torch

        pixels = DECODERS["Pillow"](content, settings.size, _generator())
        return torch.from_numpy(pixels.transpose(2, 0, 1))

    shards = sorted(str(path) for path in (settings.path / TARS).glob("*.tar"))
    dataset = webdataset.WebDataset(
        shards, shardshuffle=False, workersplitter=webdataset.split_by_worker
    )
    pipeline = dataset.repeat().shuffle(500).to_tuple("jpg", "cls").map_tuple(decode, int)
    loader = DataLoader(
        pipeline,
        settings.batch,
        num_workers=settings.num_threads,
        persistent_workers=settings.num_threads > 0,
    )
    for data, _ in loader:
        yield len(data)


# tf.data


def _tfdata(settings: Settings) -> Iterator[int]:
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "2"
    import tensorflow as tf

    features = {
        "image": tf.io.FixedLenFeature([], tf.string),
        "label": tf.io.FixedLenFeature([], tf.int64),
    }

    def example(record: Any) -> Any:
        parsed = tf.io.parse_single_example(record, features)
        content = parsed["image"]
        begin, size, _ = tf.image.sample_distorted_bounding_box(
            tf.io.extract_jpeg_shape(content),
            tf.zeros([1, 0, 4]),
            aspect_ratio_range=(3 / 4, 4 / 3),
            area_range=(0.08, 1.0),
            max_attempts=10,
            use_image_if_no_bounding_boxes=True,
        )
        window = tf.stack([begin[0], begin[1], size[0], size[1]])
        pixels = tf.image.decode_and_crop_jpeg(content, window, channels=3)
        pixels = tf.image.resize(pixels, [settings.size, settings.size])
        return tf.cast(tf.image.random_flip_left_right(pixels), tf.uint8), parsed["label"]

    shards = sorted(str(path) for path in (settings.path / RECORDS).glob("*.tfrecord"))
    dataset = tf.data.TFRecordDataset(shards).shuffle(500).repeat()
    dataset = dataset.map(example, num_parallel_calls=tf.data.AUTOTUNE)
    return _numbers(dataset.batch(settings.batch).prefetch(tf.data.AUTOTUNE))


def _tfdata_small(settings: Settings) -> Iterator[int]:
    os.environ["TF_CPP_MIN_LOG_LEVEL"] = "2"
    import tensorflow as tf

    images = np.load(settings.path / ARRAYS)
    size, channels = settings.size, images.shape[-1]

    def augment(image: Any) -> Any:
        padded = tf.image.resize_with_crop_or_pad(image, size + 8, size + 8)
        return tf.image.random_flip_left_right(tf.image.random_crop(padded, (size, size, channels)))

    dataset = tf.data.Dataset.from_tensor_slices(images).shuffle(10_000).repeat()
    dataset = dataset.map(augment, num_parallel_calls=tf.data.AUTOTUNE)
    return _numbers(dataset.batch(settings.batch).prefetch(tf.data.AUTOTUNE))


def _numbers(dataset: Any) -> Iterator[int]:
    for batch in dataset:
        yield len(batch[0]) if isinstance(batch, tuple) else len(batch)


# DALI


def _dali(settings: Settings) -> Iterator[int]:
    from nvidia.dali import fn, pipeline_def, types

    sizes = {"batch_size": settings.batch, "num_threads": settings.num_threads}

    @pipeline_def(**sizes, device_id=None, seed=0)  # type: ignore[untyped-decorator]
    def pipeline() -> Any:
        content, label = fn.readers.file(
            file_root=settings.folder, dir_filters=[FILES], random_shuffle=True
        )
        pixels = fn.decoders.image_random_crop(
            content, random_area=(0.08, 1.0), random_aspect_ratio=(3 / 4, 4 / 3), num_attempts=10
        )
        pixels = fn.resize(
            pixels, size=(settings.size, settings.size), interp_type=types.INTERP_LINEAR
        )
        return fn.flip(pixels, horizontal=fn.random.coin_flip()), label

    built = pipeline()
    built.build()
    while True:
        built.run()
        yield settings.batch


class ArraysDataset:
    """Small images in memory, cropped and flipped one by one."""

    def __init__(self, settings: Settings) -> None:
        self.images = np.load(settings.path / ARRAYS, mmap_mode="r")
        self.size = settings.size

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, number: int) -> Any:
        import torch

        random = _generator()
        padded = np.pad(self.images[number], ((4, 4), (4, 4), (0, 0)))
        top, left = random.integers(9, size=2)
        crop = padded[top : top + self.size, left : left + self.size]
        crop = crop[:, ::-1] if random.random() < 0.5 else crop
        return torch.from_numpy(np.ascontiguousarray(crop.transpose(2, 0, 1)))


def _dataloader_small(settings: Settings) -> Iterator[int]:
    loader = _shuffled(ArraysDataset(settings), settings)
    while True:
        yield from (len(data) for data in loader)


PEERS: Mapping[str, Callable[[Settings], Iterator[int]]] = {
    "DataLoader, Pillow": lambda settings: _dataloader(settings, "Pillow"),
    "DataLoader, OpenCV": lambda settings: _dataloader(settings, "OpenCV"),
    "WebDataset, Pillow": _webdataset,
    "DALI": _dali,
    "tf.data": _tfdata,
}
SMALL_PEERS: Mapping[str, Callable[[Settings], Iterator[int]]] = {
    "DataLoader": _dataloader_small,
    "tf.data": _tfdata_small,
}
NEEDS: Mapping[str, str] = {
    "WebDataset, Pillow": "webdataset",
    "DALI": "nvidia.dali",
    "tf.data": "tensorflow",
}
"""Modules that each peer needs; without them it is missing from the table."""
