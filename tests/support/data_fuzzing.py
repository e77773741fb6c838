"""Fuzzing of data files: real files are damaged at random and go through all that `allstep data`
and `train` do with them.

```
python -m support.data_fuzzing KIND SEED COUNT SECONDS FOLDER      cases SEED, SEED + 1, ... until COUNT cases or SECONDS are over
```

Every case is one seed: the file that is damaged, where and how all follow from it, so a failure is
repeated by `python -m support.data_fuzzing tar 17 1 60 /tmp/x` in tests/. The process may take 2 GB
of address space and 20 s a case; the number of the case is printed before it begins, so the parent knows which
one ended the process. A case may end well, in a `UserError`, or in bad samples; anything else is a
failure.

Checksums would keep most damage from what lies behind them. So half of the cases have the checksums
of TFRecords, tar headers and PNG chunks made right again.
"""

import contextlib
import faulthandler
import gzip
import io
import os
import random
import resource
import shutil
import struct
import sys
import tarfile
import time
import warnings
import zlib
from collections.abc import Callable
from pathlib import Path

# Each thread of OpenBLAS reserves address space that would count against the limit.
os.environ["OPENBLAS_NUM_THREADS"] = os.environ["OMP_NUM_THREADS"] = "1"

import numpy as np
from PIL import Image

from allstep.data.augment import CentreCrop, RandomResizedCrop
from allstep.data.augment.transform import Transform
from allstep.data.inspect.info import info
from allstep.data.inspect.verify import verify
from allstep.data.loading.fill import Recipe, fill
from allstep.data.opening import open_source
from allstep.data.packing.pack import pack
from allstep.data.packing.plan import Options
from allstep.data.sources import idx
from allstep.data.sources.tfrecord.example import encode
from allstep.data.sources.tfrecord.framing import FOOT, HEADER, frame, header
from allstep.errors import UserError
from support.image_folders import image

NBYTES, SECONDS = 2 << 30, 20
Content = bytearray
SIDES = ((8, 8), (24, 32), (33, 17))
FORMATS: tuple[tuple[str, str, dict[str, object]], ...] = (
    ("jpg", "JPEG", {}),
    ("jpg", "JPEG", {"progressive": True}),
    ("jpg", "JPEG", {"restart_marker_rows": 1}),
    ("png", "PNG", {}),
    ("webp", "WEBP", {"quality": 80}),
    ("webp", "WEBP", {"lossless": True}),
    ("gif", "GIF", {}),
    ("bmp", "BMP", {}),
    ("tif", "TIFF", {}),
    ("tif", "TIFF", {"compression": "tiff_adobe_deflate"}),
    ("tif", "TIFF", {"compression": "tiff_lzw"}),
    ("ppm", "PPM", {}),
)


def encoded(choose: random.Random) -> tuple[str, bytes]:
    """An image and the suffix of its file."""
    suffix, kind, options = choose.choice(FORMATS)
    mode = choose.choice(
        ("RGB", "RGB", "L", "CMYK" if kind == "JPEG" else "P" if kind in ("PNG", "GIF") else "RGB")
    )
    file = io.BytesIO()
    image(choose.randrange(100), *choose.choice(SIDES)).convert(mode).save(file, kind, **options)
    return suffix, file.getvalue()


# Files as they should be


def make_tar(choose: random.Random, folder: Path) -> Path:
    path = folder / choose.choice(("x.tar", "x.tar", "x.tar.gz"))
    form = choose.choice((tarfile.PAX_FORMAT, tarfile.GNU_FORMAT, tarfile.USTAR_FORMAT))
    made = io.BytesIO()
    labels = choose.choice(("cls", "json", "txt"))
    with tarfile.open(fileobj=made, mode="w", format=form) as tar:
        for row in range(choose.randrange(1, 8)):
            suffix, content = encoded(choose)
            name = f"{'d' * choose.choice((0, 5, 60))}/{'n' * choose.choice((1, 90))}{row}"
            label = b'{"label": %d, "text": "a"}' % row if labels == "json" else b"%d" % row
            for extension, data in ((suffix, content), (labels, label)):
                member = tarfile.TarInfo(f"{name}.{extension}")
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))
    path.write_bytes(made.getvalue())
    return path


def make_tfrecord(choose: random.Random, folder: Path) -> Path:
    path = folder / choose.choice(("x.tfrecord", "x.tfrecord", "x.tfrecord.gz"))
    raw, text = choose.random() < 0.3, choose.random() < 0.3
    records = []
    for row in range(choose.randrange(1, 8)):
        label = (b"cat", b"dog", b"7")[row % 3] if text else row
        if raw:
            features = {"image/raw": choose.randbytes(48), "image/shape": [4, 4, 3], "label": label}
        else:
            features = {
                "image": encoded(choose)[1],
                "label": label,
                "box": [0.5, 1.5],
                "ids": list(range(row * 20)),
            }
        records.append(frame(encode(features)))
    path.write_bytes(b"".join(records))
    return path


def make_idx(choose: random.Random, folder: Path) -> Path:
    n, suffix = choose.choice((1, 3, 50)), choose.choice(("", "", ".gz"))
    random_numbers = np.random.default_rng(choose.randrange(100))
    dtype = choose.choice((np.uint8, np.uint8, np.int16, np.float32))
    images = random_numbers.integers(0, 120, (n, 8, 9, *choose.choice(((), (3,)))))
    idx.write(folder / "train-images-idx3-ubyte", images.astype(dtype))
    idx.write(folder / "train-labels-idx1-ubyte", random_numbers.integers(0, 9, n).astype(np.uint8))
    for path in list(folder.iterdir()):
        path.rename(f"{path}{suffix}")
    return (
        folder
        / f"train-{choose.choice(('images-idx3', 'images-idx3', 'labels-idx1'))}-ubyte{suffix}"
    )


def make_cifar(choose: random.Random, folder: Path) -> Path:
    rows = np.random.default_rng(choose.randrange(100)).integers(
        0, 256, (choose.randrange(1, 5), 3073), np.uint8
    )
    rows[:, 0] %= 10
    (folder / "data_batch_1.bin").write_bytes(rows.tobytes())
    (folder / "batches.meta.txt").write_text("\n".join("abcdefghij"))
    return folder / choose.choice(("data_batch_1.bin", "data_batch_1.bin", "batches.meta.txt"))


def make_images(choose: random.Random, folder: Path) -> Path:
    for name in ("cat", "dog"):
        (folder / name).mkdir()
        suffix, content = encoded(choose)
        path = folder / name / f"1.{suffix}"
        path.write_bytes(content)
    return path


# Damage


def numbers(choose: random.Random) -> bytes:
    """Numbers that programs fail at."""
    value = choose.choice(
        (0, 1, 0x7F, 0x80, 0xFF, 0xFFFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF, 1 << 40, 1 << 63, -1)
    )
    size, order = choose.choice((1, 2, 4, 8)), choose.choice(("big", "little"))
    plain = (value & ((1 << 8 * size) - 1)).to_bytes(size, order)  # type: ignore[arg-type]
    digits = b"9" * choose.choice((3, 20, 5000))
    return choose.choice((plain, plain, plain, digits, b"-1", b"%011o" % (value & 0x7FFFFFFF)))


def damage(choose: random.Random, content: Content) -> None:
    """One change at one place."""
    if not content:
        return
    # Headers are where most can go wrong: half of the places are near the beginning.
    reach = choose.choice((len(content), min(len(content), 64), min(len(content), 1024)))
    at = choose.randrange(reach)
    length = choose.choice((1, 2, 7, 100, 3000))
    match choose.randrange(8):
        case 0 | 1:
            content[at] ^= 1 << choose.randrange(8)
        case 2:
            new = numbers(choose)
            content[at : at + len(new)] = new
        case 3:
            content[at:at] = numbers(choose)
        case 4:
            content[at : at + length] = choose.randbytes(length)
        case 5:
            del content[at : at + length]
        case 6:
            content[at : at + length] = bytes(choose.choice((length, 100_000)))
        case _:
            del content[at:]


def damage_field(choose: random.Random, content: Content) -> None:
    """A field of a tar header, at a multiple of its block."""
    block = choose.randrange(max(1, len(content) // 512)) * 512
    start, size = choose.choice(((0, 100), (124, 12), (124, 12), (156, 1), (345, 155), (512, 40)))
    new = choose.choice(
        (numbers(choose), choose.randbytes(size), b"\xff" * size, b"\x80" + b"\xff" * (size - 1))
    )
    content[block + start : block + start + size] = (
        new.ljust(size, b"\0")[:size]
        if size > 1
        else choose.choice((b"x", b"L", b"g", b"K", b"5", b"0", b"S"))
    )


# Checksums made right again


def mend_tar(content: Content) -> None:
    for block in range(0, len(content) - 511, 512):
        if content[block + 257 : block + 262] == b"ustar":
            content[block + 148 : block + 156] = b" " * 8
            content[block + 148 : block + 156] = b"%06o\0 " % sum(content[block : block + 512])


def mend_tfrecord(content: Content) -> None:
    at = 0
    while at + HEADER + 4 <= len(content):
        length = min(int.from_bytes(content[at : at + 8], "little"), len(content) - at - HEADER - 4)
        content[at : at + HEADER] = header(length)
        data = bytes(content[at + HEADER : at + HEADER + length])
        content[at + HEADER + length : at + HEADER + length + 4] = frame(data)[-FOOT.size :]
        at += HEADER + length + 4


def mend_png(content: Content) -> None:
    at = 8
    while content.startswith(b"\x89PNG") and at + 12 <= len(content):
        end = at + 8 + min(struct.unpack_from(">I", content, at)[0], len(content) - at - 12)
        content[end : end + 4] = zlib.crc32(content[at + 4 : end]).to_bytes(4, "big")
        at = end + 4


KINDS: dict[str, tuple[Callable[[random.Random, Path], Path], Callable[[Content], None]]] = {
    "tar": (make_tar, mend_tar),
    "tfrecord": (make_tfrecord, mend_tfrecord),
    "idx": (make_idx, lambda content: None),
    "cifar": (make_cifar, lambda content: None),
    "images": (make_images, mend_png),
}


def make_case(kind: str, seed: int, folder: Path) -> None:
    """A dataset with one damaged file."""
    choose = random.Random(f"{kind} {seed}")
    make, mend = KINDS[kind]
    path = make(choose, folder)
    content = Content(path.read_bytes())
    for _ in range(choose.choice((1, 1, 1, 2, 5))):
        change = damage_field if kind == "tar" and choose.random() < 0.5 else damage
        change(choose, content)
    if choose.random() < 0.5:
        mend(content)
    if path.suffix == ".gz":
        content = Content(gzip.compress(content, 1))
        if choose.random() < 0.3:
            damage(choose, content)
    path.write_bytes(content)


def use(folder: Path, out: Path) -> None:
    """All that is done with a dataset; a step that ends in a UserError does not keep the others
    from being tried."""
    with contextlib.suppress(UserError):
        source = open_source(str(folder))
        steps: tuple[Callable[[], object], ...] = (
            lambda: info(source, "x"),
            lambda: verify(source, jobs=1),
            lambda: pack(source, "x", out / "packed", Options("p", format="png"), jobs=1),
            lambda: pack(source, "x", out / "tars", Options("t", to="tar", max_side=7), jobs=1),
            lambda: load(folder, Transform(RandomResizedCrop(8))),
            lambda: load(folder, Transform(CentreCrop(8), channels=1)),
        )
        for step in steps:
            with contextlib.suppress(UserError):
                step()
        source.close()


def load(folder: Path, transform: Transform) -> None:
    """What a worker of a loader does."""
    source = open_source(str(folder))
    numbers = np.arange(len(source))
    assert transform.shape is not None
    batch = np.zeros((len(numbers), *transform.shape), np.uint8)
    fill(Recipe(source, transform, blocks=True), numbers, batch, transform.draw(0, 0, numbers))
    source.close()


def main(kind: str, seed: int, count: int, seconds: float, folder: Path) -> None:
    warnings.simplefilter("error")
    # A plugin of Pillow's warns of odd metadata; that is for its own users.
    warnings.filterwarnings("ignore", module="PIL")
    Image.init()
    resource.setrlimit(resource.RLIMIT_AS, (NBYTES, NBYTES))
    end = time.monotonic() + seconds
    for number in range(seed, seed + count):
        if time.monotonic() > end:
            break
        print(number, flush=True)
        case = folder / f"{kind}-{number}"
        os.environ["ALLSTEP_CACHE"] = str(case / "cache")
        (case / "data").mkdir(parents=True)
        faulthandler.dump_traceback_later(SECONDS, exit=True)
        make_case(kind, number, case / "data")
        use(case / "data", case)
        faulthandler.cancel_dump_traceback_later()
        shutil.rmtree(case)
    print("end", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]), Path(sys.argv[5]))
