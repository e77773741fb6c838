"""The verbs of `allstep data`: pack, info, index, verify, show and get."""

import json as json_format
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from allstep.cli.data import options
from allstep.cli.data.source import absolute, check_outside, opened
from allstep.cli.output_file import STDOUT, check_output, write_text
from allstep.console.escape import print_line, print_notice
from allstep.console.progress_bar import file_bars
from allstep.console.quantities import nbytes
from allstep.data.image.limit import MAX_PIXELS

if TYPE_CHECKING:
    from allstep.data.packing.pack import Outcome

data = typer.Typer(
    name="data", help="Download, pack, inspect and check datasets.", no_args_is_help=True
)


@data.callback()
def _root() -> None:
    """Download, pack, inspect and check datasets."""


@data.command()
def pack(
    src: options.Src,
    dst: options.Dst,
    to: options.To = "tfrecord",
    shard_mb: options.ShardMb = 128.0,
    shard_samples: options.ShardSamples = None,
    shuffle: options.Shuffle = False,
    seed: options.ShuffleSeed = 0,
    max_side: options.MaxSide = None,
    quality: options.Quality = 90,
    raw: options.Raw = False,
    image_format: options.ImageFormat = "keep",
    name: options.ShardName = None,
    test: options.Test = False,
    jobs: options.Jobs = None,
    strict: options.Strict = False,
    overwrite: options.Overwrite = False,
    max_pixels: options.MaxPixels = MAX_PIXELS,
    labels_from: options.LabelsFrom = None,
) -> None:
    """Pack samples into a few large shards. After an interruption, the same command resumes."""
    from allstep.console.progress_bar import bar
    from allstep.data.packing.pack import pack as pack_all
    from allstep.data.packing.shard_plan import Options

    packing = Options(
        name or dst.absolute().name,
        to,
        shard_mb,
        shard_samples,
        seed if shuffle else None,
        max_side=max_side,
        quality=quality,
        raw=raw,
        format=image_format,
        max_pixels=max_pixels,
    )
    check_outside(src, dst)
    origin = f"{absolute(src)}{' (test)' if test else ''}"
    origin += "" if labels_from is None else f" (labels from {labels_from})"
    with _resume_hint(), opened(src, test, labels_from) as source, bar("packing") as shown:
        outcome = pack_all(
            source,
            origin,
            dst,
            packing,
            jobs=jobs,
            overwrite=overwrite,
            strict=strict,
            progress=lambda done, total: shown(done, total, ""),
        )
    _report_packed(outcome)


@contextmanager
def _resume_hint() -> Iterator[None]:
    """Print, on Ctrl-C, that the same command resumes the packing."""
    try:
        yield
    except KeyboardInterrupt:
        print_notice("stopped; run the same command again to resume")
        raise


def _report_packed(outcome: "Outcome") -> None:
    """Print the number of samples, shards and bytes, and where bad samples are listed."""
    before = f", {outcome.num_before} of them before" if outcome.num_before else ""
    shards = f"{outcome.num_shards} shard{'s' if outcome.num_shards > 1 else ''}{before}"
    size = f"{outcome.num_samples} samples in {shards}, {nbytes(outcome.nbytes)}"
    print_line(f"{outcome.folder}: {size}")
    if outcome.bad:
        where = outcome.folder / "quarantine.jsonl"
        print_notice(f"{len(outcome.bad)} bad samples left out: {where}")


@data.command()
def info(
    src: options.Src,
    test: options.Test = False,
    json: options.InfoJson = None,
    labels_from: options.LabelsFrom = None,
) -> None:
    """Show what a dataset has: samples, files, sizes of images, balance of the classes."""
    from allstep.cli.data.table import info_table
    from allstep.data.inspect.info import info as inspect

    check_output("--json", json, "JSON")
    with opened(src, test, labels_from) as source:
        found = inspect(source, src)
    info_table(found, stderr=str(json) == STDOUT)
    write_text("--json", json, json_format.dumps(found.to_json(), indent=2) + "\n")


@data.command()
def index(src: options.Src, checksum: options.Checksum = False, test: options.Test = False) -> None:
    """Write the indexes now instead of in the first run."""
    from allstep.console.progress_bar import bar
    from allstep.data.inspect.indexing import store_checksums

    with opened(src, test) as source, bar("checksums") as shown:
        checksums = ""
        if checksum:
            stored = store_checksums(
                source, src, lambda name, done, total: shown(done, total, Path(name).name)
            )
            checksums = "; with checksums" if stored else "; its records have checksums already"
        print_line(f"{src}: {len(source)} samples are indexed{checksums}")


@data.command()
def verify(
    src: options.Src,
    test: options.Test = False,
    jobs: options.Jobs = None,
    list_file: options.ListFile = None,
    max_pixels: options.MaxPixels = MAX_PIXELS,
    labels_from: options.LabelsFrom = None,
) -> None:
    """Check every checksum and decode every image. The exit status is 1 if a sample is bad."""
    from allstep.cli.data.table import bad_table
    from allstep.console.progress_bar import bar
    from allstep.data.inspect.verify import verify as check

    check_output("--list", list_file, "JSON")
    with opened(src, test, labels_from) as source, bar("checking") as shown:
        found = check(
            source,
            jobs=jobs,
            progress=lambda done, total, bad: shown(done, total, f"{bad} bad" if bad else ""),
            max_pixels=max_pixels,
        )
    lines = "".join(f"{json_format.dumps(bad.to_json())}\n" for bad in found.bad)
    write_text("--list", list_file, lines)
    if not found.bad:
        print_line(f"{src}: all {found.num_samples} samples are good")
        return
    bad_table(found.bad)
    print_line(f"{src}: {len(found.bad)} of {found.num_samples} samples are bad")
    raise typer.Exit(1)


@data.command()
def show(
    out: options.Out,
    src: options.ShownSrc = None,
    augment: options.Augment = None,
    recipe: options.Recipe = None,
    samples: options.Samples = 8,
    epochs: options.Epochs = 6,
    seed: options.RunSeed = None,
    test: options.Test = False,
    max_pixels: options.ShownMaxPixels = None,
    labels_from: options.LabelsFrom = None,
) -> None:
    """Draw samples next to their augmented versions."""
    from allstep.data.augment.parse import spelled
    from allstep.data.inspect.contact_sheet import save, sheet
    from allstep.data.packing.shard_plan import spread

    check_output("--out", out, "a drawing")
    if src is not None:
        check_outside(src, out)
    src, text, default_seed, default_max_pixels = _resolve_shown(src, augment, recipe)
    transform = spelled(text)
    transform.max_pixels = max_pixels or default_max_pixels
    seed = default_seed if seed is None else seed
    with opened(src, test, labels_from) as source:
        numbers = spread(len(source), samples)
        save(sheet(source, transform, numbers, columns=epochs, seed=seed), out)
    print_line(f"{out}: {len(numbers)} samples, {epochs} epochs of {transform.describe()}")


def _resolve_shown(
    src: str | None, augment: str | None, recipe: str | None
) -> tuple[str, str, int, int]:
    """Return dataset, augmentation, seed and maximum number of pixels for `show`.

    Raise ConfigError if both `augment` and `recipe` are given, or if no dataset is named.
    """
    from allstep.errors import ConfigError

    if augment is not None and recipe is not None:
        raise ConfigError(
            f"--augment {augment!r} and --recipe {recipe} both define the augmentation; give one"
            " of them"
        )
    if recipe is None:
        if src is None:
            raise ConfigError(
                "no dataset to show: give one (SRC), or a recipe that has one (--recipe NAME)"
            )
        return src, augment or "imagenet", 0, MAX_PIXELS
    from allstep.train.config.read_config import read_config

    config = read_config(recipe)
    section = config.data
    return src or section.train or section.name, section.augment, config.seed, section.max_pixels


@data.command()
def get(name: options.Name, origin: options.Origin = None, to: options.TargetFolder = None) -> None:
    """Download a named dataset and check the SHA-256 of every file."""
    from allstep.data.cache import cache_folder
    from allstep.data.sets.catalogue import named_set
    from allstep.data.sets.download import get as download

    wanted = named_set(name)
    folder = to or cache_folder() / wanted.name
    with file_bars() as progress:
        download(wanted, folder, origin, progress)
    print_line(f"{wanted.title} is in {folder}")
