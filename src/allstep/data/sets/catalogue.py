"""Datasets known by name: their files, their web addresses, and the SHA-256 of each file's content.

| layout | files | read by |
|---|---|---|
| idx | images and labels of the training split, then of the test split; plain or `.gz` | `idx` |
| cifar | five files of training rows, one of test rows | `cifar` |

A dataset's web address (`home`) has either every file under its name, or one `archive` (a tar.gz)
that contains all of them.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from allstep.errors import ConfigError, did_you_mean

FILES = (
    "train-images-idx3-ubyte",
    "train-labels-idx1-ubyte",
    "t10k-images-idx3-ubyte",
    "t10k-labels-idx1-ubyte",
)
CIFAR_FILES = (*(f"data_batch_{number}.bin" for number in range(1, 6)), "test_batch.bin")
_FILES_OF: Mapping[str, tuple[str, ...]] = {"idx": FILES, "cifar": CIFAR_FILES}


@dataclass(frozen=True)
class Archive:
    """A tar.gz that contains all files of a dataset, in any of its folders."""

    name: str
    sha256: str
    nbytes: int | None = None
    """Size of the archive in bytes; None if not known."""


@dataclass(frozen=True)
class NamedSet:
    """What is known about a dataset before its files are found."""

    name: str
    """Name in configs and commands, such as "cifar10"."""
    title: str
    """Name in messages, such as "CIFAR-10"."""
    folders: tuple[Path, ...] = ()
    """Folders where the system or this package stores the dataset."""
    home: str | None = None
    """URL of the folder to download from; None if there is none."""
    sha256: Mapping[str, str] = field(default_factory=dict)
    """SHA-256 of the unpacked content of each file, by file name.

    The gzip files of Debian differ from the original ones, their content does not.
    """
    hint: str = ""
    """How to get the dataset another way, for the message of a failed download."""
    layout: str = "idx"
    """Format of the files: "idx" or "cifar"."""
    archive: Archive | None = None
    """The file at `home` that contains all files; None if `home` has them one by one."""
    classes: tuple[str, ...] = ()
    """Names of the classes, in label order."""
    nbytes: Mapping[str, int] = field(default_factory=dict)
    """Size of the unpacked content of each file; download and unpacking stop 1% above it."""

    @property
    def files(self) -> tuple[str, ...]:
        """Return the names of all files of the dataset, without `.gz`."""
        return _FILES_OF[self.layout]


NAMED: Mapping[str, NamedSet] = {
    "fashion-mnist": NamedSet(
        name="fashion-mnist",
        title="Fashion-MNIST",
        folders=(Path("/usr/share/datasets/fashion-mnist"),),
        home="http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/",
        sha256={
            "train-images-idx3-ubyte": (
                "c59f468a2f672dc815687fe0f83887768d799fd8a3f3276145d20f83aa44d888"
            ),
            "train-labels-idx1-ubyte": (
                "bad3541b69d912435c50bb6ba87bec294ff4f6a2e1246121d8633921760443d9"
            ),
            "t10k-images-idx3-ubyte": (
                "5b4141f0afbad91edebe8549f8fcffe087ea10ca49f1dbef5c9a5cd8815ce37b"
            ),
            "t10k-labels-idx1-ubyte": (
                "0402a96d92fd2663957122ceb108a494c5af83dab82d92729df917d7dec38c34"
            ),
        },
        nbytes=dict(zip(FILES, (47_040_016, 60_008, 7_840_016, 10_008), strict=True)),
        hint="on Debian: apt install dataset-fashion-mnist",
        classes=(
            *("T-shirt/top", "Trouser", "Pullover", "Dress", "Coat"),
            *("Sandal", "Shirt", "Sneaker", "Bag", "Ankle boot"),
        ),
    ),
    "cifar10": NamedSet(
        name="cifar10",
        title="CIFAR-10",
        home="https://www.cs.toronto.edu/~kriz/",
        sha256={
            "data_batch_1.bin": "cee916563c9f80d84e3cc88e17fdc0941787f1244f00a67874d45b261883ada5",
            "data_batch_2.bin": "a591ca11fa1708a91ee40f54b3da4784ccd871ecf2137de63f51ada8b3fa57ed",
            "data_batch_3.bin": "bbe8596564c0f86427f876058170b84dac6670ddf06d79402899d93ceea26f67",
            "data_batch_4.bin": "014e562d6e23c72197cc727519169a60359f5eccd8945ad5a09d710285ff4e48",
            "data_batch_5.bin": "755304fc0b379caeae8c14f0dac912fbc7d6cd469eb67a1029a08a39453a9add",
            "test_batch.bin": "8e2eb146ae340b09e24670f29cabc6326dba54da8789dab6768acf480273f65b",
        },
        nbytes=dict.fromkeys(CIFAR_FILES, 30_730_000),
        hint="allstep data get cifar10 --from FOLDER copies it from a folder",
        layout="cifar",
        archive=Archive(
            "cifar-10-binary.tar.gz",
            "c4a38c50a1bc5f3a1c5537f2155ab9d68f9f25eb1ed8d9ddda3db29a59bca1dd",
            170_052_171,
        ),
        classes=(
            *("airplane", "automobile", "bird", "cat", "deer"),
            *("dog", "frog", "horse", "ship", "truck"),
        ),
    ),
    "digits": NamedSet(
        name="digits",
        title="8x8 digits",
        folders=(Path(__file__).parent / "digits",),
        classes=tuple("0123456789"),
    ),
}


def named_set(name: str) -> NamedSet:
    """Return the dataset called `name`; raise ConfigError if there is none."""
    if name not in NAMED:
        raise ConfigError(f"no dataset is called {name!r}; {did_you_mean(name, NAMED)}")
    return NAMED[name]


def find_file(folder: Path, name: str) -> Path | None:
    """Return the path of the file `name` in `folder`, plain or as `.gz`; None if it is missing."""
    return next((path for path in (folder / name, folder / f"{name}.gz") if path.is_file()), None)


def is_whole(wanted: NamedSet, folder: Path) -> bool:
    """Return whether `folder` has every file of `wanted`."""
    return all(find_file(folder, name) for name in wanted.files)
