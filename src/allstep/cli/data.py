"""`allstep data`: get, pack, look at and check sets of samples.

SRC is whatever `allstep.data.open_source` takes: a folder of classes, of TFRecord or tar shards or
of idx files, a single file, a pattern, a URL, made-up images (synthetic:1000x224x224); or the
name of a set that `get` knows.
"""

import json as json_format
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from allstep.cli.numbers import MOST, between
from allstep.cli.output_file import STDOUT, check_output, write_text
from allstep.console.escape import print_line, print_notice
from allstep.console.progress_bar import file_bars
from allstep.console.quantities import nbytes
from allstep.data.image.limit import MAX_PIXELS

if TYPE_CHECKING:
    from allstep.data.packing.pack import Outcome
    from allstep.data.sources.source import Source

data = typer.Typer(
    name="data", help="Get, pack, look at and check sets of samples.", no_args_is_help=True
)

Src = Annotated[
    str,
    typer.Argument(
        metavar="SRC",
        help="A folder of classes, shards or idx files; a file, pattern, URL or known name.",
    ),
]
Jobs = Annotated[
    int | None,
    typer.Option(
        "--jobs", "-j", callback=between("--jobs", 1, MOST), help="Threads; else one for each core."
    ),
]
MaxPixels = Annotated[
    int,
    typer.Option("--max-pixels", min=1, help="Larger images are bad samples, and not decoded."),
]
Test = Annotated[
    bool,
    typer.Option(
        "--test", help="The test part of a folder that has two, as MNIST's and CIFAR-10's do."
    ),
]


@data.callback()
def _root() -> None:
    """Get, pack, look at and check sets of samples."""


@data.command()
def pack(
    src: Src,
    dst: Annotated[
        Path, typer.Argument(metavar="DST", help="A new folder, or one that was packed in part.")
    ],
    to: Annotated[str, typer.Option("--to", help="tfrecord or tar.")] = "tfrecord",
    shard_mb: Annotated[float, typer.Option("--shard-mb", help="Size of a shard, about.")] = 128.0,
    shard_samples: Annotated[
        int | None, typer.Option("--shard-samples", help="At most so many samples a shard.")
    ] = None,
    shuffle: Annotated[bool, typer.Option("--shuffle", help="Mix all samples once.")] = False,
    seed: Annotated[int, typer.Option("--seed", help="Of the order that --shuffle makes.")] = 0,
    max_side: Annotated[
        int | None,
        typer.Option(
            "--max-side",
            metavar="PIXELS",
            help="Make larger images smaller; others keep their bytes.",
        ),
    ] = None,
    quality: Annotated[
        int, typer.Option("--quality", help="Of JPEG and WebP that are written anew.")
    ] = 90,
    raw: Annotated[
        bool, typer.Option("--raw", help="Store pixels: nothing is decoded in training.")
    ] = False,
    image_format: Annotated[
        str, typer.Option("--format", help="keep, jpeg, png or webp.")
    ] = "keep",
    name: Annotated[
        str | None, typer.Option("--name", help="How shards' names begin; else as DST is called.")
    ] = None,
    test: Test = False,
    jobs: Jobs = None,
    strict: Annotated[bool, typer.Option("--strict", help="Stop at the first bad sample.")] = False,
    overwrite: Annotated[
        bool, typer.Option("--overwrite", help="Begin anew where other things were packed.")
    ] = False,
    max_pixels: MaxPixels = MAX_PIXELS,
) -> None:
    """Pack samples into a few large shards. The same command again goes on where it was stopped."""
    from allstep.console.progress_bar import bar
    from allstep.data.packing.pack import pack as pack_all
    from allstep.data.packing.plan import Options

    options = Options(
        name or dst.absolute().name,
        to,
        shard_mb,
        shard_samples,
        seed if shuffle else None,
        max_side,
        quality,
        raw,
        image_format,
        max_pixels,
    )
    _check_apart(src, dst)
    with _goes_on(), _source(src, test) as source, bar("packing") as shown:
        outcome = pack_all(
            source,
            f"{_absolute(src)}{' (test)' if test else ''}",
            dst,
            options,
            jobs=jobs,
            overwrite=overwrite,
            strict=strict,
            progress=lambda done, total: shown(done, total, ""),
        )
    _tell_packed(outcome)


@contextmanager
def _goes_on() -> Iterator[None]:
    """Who stops a packing is told that nothing is lost."""
    try:
        yield
    except KeyboardInterrupt:
        print_notice("stopped; the same command goes on where it was")
        raise


def _tell_packed(outcome: "Outcome") -> None:
    before = f", {outcome.num_before} of them before" if outcome.num_before else ""
    shards = f"{outcome.num_shards} shard{'s' if outcome.num_shards > 1 else ''}{before}"
    size = f"{outcome.num_samples} samples in {shards}, {nbytes(outcome.nbytes)}"
    print_line(f"{outcome.folder}: {size}")
    if outcome.bad:
        where = outcome.folder / "quarantine.jsonl"
        print_notice(f"{len(outcome.bad)} bad samples left out: {where}")


@data.command()
def info(
    src: Src,
    test: Test = False,
    json: Annotated[
        Path | None,
        typer.Option("--json", metavar="FILE", help="Write all of it there; - is standard output."),
    ] = None,
) -> None:
    """Say what is in a set: samples, files, sizes of images, balance of the classes."""
    from allstep.cli.data_table import info_table
    from allstep.data.inspect.info import info as look

    check_output("--json", json, "JSON")
    with _source(src, test) as source:
        found = look(source, src)
    info_table(found, stderr=str(json) == STDOUT)
    write_text("--json", json, json_format.dumps(found.to_json(), indent=2) + "\n")


@data.command()
def index(
    src: Src,
    checksum: Annotated[
        bool,
        typer.Option(
            "--checksum", help="Store a CRC32C of each sample, where the format has none."
        ),
    ] = False,
    test: Test = False,
) -> None:
    """Write the indexes now that the first run would write."""
    from allstep.console.progress_bar import bar
    from allstep.data.inspect.indexing import store_checksums

    with _source(src, test) as source, bar("checksums") as shown:
        stored = checksum and store_checksums(
            source, src, lambda name, done, total: shown(done, total, Path(name).name)
        )
        with_checksums = (
            "; with checksums"
            if stored
            else "; its records have checksums already"
            if checksum
            else ""
        )
        print_line(f"{src}: {len(source)} samples are indexed{with_checksums}")


@data.command()
def verify(
    src: Src,
    test: Test = False,
    jobs: Jobs = None,
    list_file: Annotated[
        Path | None,
        typer.Option(
            "--list", metavar="FILE", help="Write the bad ones there, a line of JSON each."
        ),
    ] = None,
    max_pixels: MaxPixels = MAX_PIXELS,
) -> None:
    """Check every checksum and decode every image. The exit status is 1 when one is bad."""
    from allstep.cli.data_table import bad_table
    from allstep.console.progress_bar import bar
    from allstep.data.inspect.verify import verify as check

    check_output("--list", list_file, "JSON")
    with _source(src, test) as source, bar("checking") as shown:
        found = check(
            source,
            jobs=jobs,
            progress=lambda done, total, bad: shown(done, total, f"{bad} bad" if bad else ""),
            max_pixels=max_pixels,
        )
    if list_file is not None:
        write_text(
            "--list",
            list_file,
            "".join(f"{json_format.dumps(bad.to_json())}\n" for bad in found.bad),
        )
    if not found.bad:
        print_line(f"{src}: all {found.num_samples} samples are good")
        return
    bad_table(found.bad)
    print_line(f"{src}: {len(found.bad)} of {found.num_samples} samples are bad")
    raise typer.Exit(1)


@data.command()
def show(
    out: Annotated[
        Path, typer.Option("--out", "-o", metavar="FILE.png", help="The image to write.")
    ],
    src: Annotated[
        str | None,
        typer.Argument(metavar="SRC", help="As in the other commands; else the data of --recipe."),
    ] = None,
    augment: Annotated[
        str | None,
        typer.Option(
            "--augment",
            help=(
                '"RandomResizedCrop(224), Flip()", or imagenet (the default), cifar10,'
                " fashion-mnist."
            ),
        ),
    ] = None,
    recipe: Annotated[
        str | None,
        typer.Option(
            "--recipe", metavar="NAME", help="A recipe or config file, whose augmentation is shown."
        ),
    ] = None,
    samples: Annotated[
        int,
        typer.Option(
            "--samples",
            "-n",
            callback=between("--samples", 1, MOST),
            help="Rows: samples, spread over the set.",
        ),
    ] = 8,
    epochs: Annotated[
        int,
        typer.Option(
            "--epochs",
            callback=between("--epochs", 1, MOST),
            help="Columns: what each of these epochs sees.",
        ),
    ] = 6,
    seed: Annotated[
        int | None, typer.Option("--seed", help="Of the run whose images are shown.")
    ] = None,
    test: Test = False,
    max_pixels: Annotated[
        int | None,
        typer.Option(
            "--max-pixels", min=1, help="Show no larger images (default: as --recipe says)."
        ),
    ] = None,
) -> None:
    """Draw samples beside what augmentation makes of them."""
    from allstep.data.augment.parse import spelled
    from allstep.data.inspect.contact_sheet import save, sheet
    from allstep.data.packing.plan import spread

    check_output("--out", out, "a drawing")
    if src is not None:
        _check_apart(src, out)
    src, text, its_seed, its_max_pixels = _shown(src, augment, recipe)
    transform = spelled(text)
    transform.max_pixels = max_pixels or its_max_pixels
    with _source(src, test) as source:
        numbers = spread(len(source), samples)
        save(
            sheet(
                source, transform, numbers, columns=epochs, seed=its_seed if seed is None else seed
            ),
            out,
        )
    print_line(f"{out}: {len(numbers)} samples, {epochs} epochs of {transform.describe()}")


def _shown(src: str | None, augment: str | None, recipe: str | None) -> tuple[str, str, int, int]:
    """Whose images, what is done to them, the run's seed, its largest image."""
    from allstep.errors import ConfigError

    if augment is not None and recipe is not None:
        raise ConfigError(
            f"--augment {augment!r} and --recipe {recipe} both say what is done to images; give"
            " one of them"
        )
    if recipe is None:
        if src is None:
            raise ConfigError(
                "whose images? give a set (SRC), or a recipe that has one (--recipe NAME)"
            )
        return src, augment or "imagenet", 0, MAX_PIXELS
    from allstep.train.config.read import read_config

    config = read_config(recipe)
    section = config.data
    return src or section.train or section.name, section.augment, config.seed, section.max_pixels


@data.command()
def get(
    name: Annotated[str, typer.Argument(help="fashion-mnist or cifar10.")],
    origin: Annotated[
        str | None,
        typer.Option(
            "--from", metavar="FOLDER|URL", help="Who has the files; else their home on the web."
        ),
    ] = None,
    to: Annotated[
        Path | None, typer.Option("--to", metavar="DIR", help="Else allstep's cache folder.")
    ] = None,
) -> None:
    """Bring a named set here; every file's SHA-256 is checked."""
    from allstep.data.cache import cache_folder
    from allstep.data.sets.catalogue import named_set
    from allstep.data.sets.download import get as bring

    wanted = named_set(name)
    folder = to or cache_folder() / wanted.name
    with file_bars() as progress:
        bring(wanted, folder, origin, progress)
    print_line(f"{wanted.title} is in {folder}")


@contextmanager
def _source(src: str, test: bool = False) -> "Iterator[Source]":
    """The source, opened; its indexes are built now, with a bar.

    DataError when it has no samples.
    """
    from allstep.console.progress_bar import bar
    from allstep.data.opening import open_source
    from allstep.errors import DataError

    place, classes = _place(src)
    with bar("indexing", "bytes") as shown:
        source = open_source(
            place,
            train=not test,
            progress=lambda name, done, total: shown(done, total, Path(name).name),
        )
    source.classes = source.classes or classes
    try:
        if not len(source):
            raise DataError(f"{src}: is empty: expected samples, found none; give another place")
        for note in source.notes:
            print_notice(note)
        yield source
    finally:
        source.close()


def _place(src: str) -> tuple[str, tuple[str, ...]]:
    """Where `src` is, and names of its classes where it is known by name: a set like cifar10,
    unless a file is called so."""
    from allstep.data.sets.catalogue import NAMED
    from allstep.data.sets.load import find

    if src not in NAMED or Path(src).exists():
        return src, ()
    with file_bars() as progress:
        found = find(NAMED[src], progress=progress)
    return str(found.folder), found.classes


def _check_apart(src: str, dst: Path) -> None:
    """What is written inside a source would be part of it the next time, or takes the place of a
    sample."""
    from allstep.errors import ConfigError

    if (
        src
        and Path(src).is_dir()
        and dst.absolute().resolve().is_relative_to(Path(src).absolute().resolve())
    ):
        raise ConfigError(f"{dst} is inside {src}; write into another folder")


def _absolute(src: str) -> str:
    from allstep.data.sources.synthetic import is_synthetic

    place, _ = _place(src)
    return place if "://" in place or is_synthetic(place) else str(Path(place).absolute())
