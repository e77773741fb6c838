"""Command-line options of `allstep data`, as named types for the signatures of the verbs."""

from pathlib import Path
from typing import Annotated

import typer

from allstep.cli.numbers import MOST, between

Src = Annotated[
    str,
    typer.Argument(
        metavar="SRC",
        help=(
            "Dataset to read: a folder of classes, shards or idx files; a file, pattern or URL; or"
            " a name that `allstep data get` knows."
        ),
    ),
]
LabelsFrom = Annotated[
    int | None,
    typer.Option(
        min=0,
        max=1,
        help="Smallest label of TFRecord files (default: 1 for image/class/label, else 0).",
    ),
]
Test = Annotated[
    bool,
    typer.Option(
        "--test",
        help="Use the test split of a folder that has two splits, such as MNIST or CIFAR-10.",
    ),
]
Jobs = Annotated[
    int | None,
    typer.Option(
        "--jobs",
        "-j",
        callback=between("--jobs", 1, MOST),
        help="Number of threads (default: one per core).",
    ),
]
MaxPixels = Annotated[
    int,
    typer.Option(
        "--max-pixels",
        min=1,
        help="Treat images with more pixels as bad samples, without decoding them.",
    ),
]

# pack

Dst = Annotated[
    Path,
    typer.Argument(
        metavar="DST", help="Folder for the shards: a new one, or one that is packed in part."
    ),
]
To = Annotated[str, typer.Option("--to", help="Shard format: tfrecord or tar.")]
ShardMb = Annotated[float, typer.Option("--shard-mb", help="Approximate size of a shard in MB.")]
ShardSamples = Annotated[
    int | None,
    typer.Option("--shard-samples", help="Maximum number of samples per shard (default: none)."),
]
Shuffle = Annotated[
    bool, typer.Option("--shuffle", help="Shuffle all samples once, before packing.")
]
ShuffleSeed = Annotated[int, typer.Option("--seed", help="Seed of the order that --shuffle makes.")]
MaxSide = Annotated[
    int | None,
    typer.Option(
        "--max-side",
        metavar="PIXELS",
        help="Downscale images with a longer side; the others keep their bytes.",
    ),
]
Quality = Annotated[
    int, typer.Option("--quality", help="Quality of JPEG and WebP images that are re-encoded.")
]
Raw = Annotated[
    bool, typer.Option("--raw", help="Store decoded pixels, so that training decodes nothing.")
]
ImageFormat = Annotated[
    str, typer.Option("--format", help="Format of stored images: keep, jpeg, png or webp.")
]
ShardName = Annotated[
    str | None,
    typer.Option("--name", help="Prefix of the shards' file names (default: the name of DST)."),
]
Strict = Annotated[bool, typer.Option("--strict", help="Stop at the first bad sample.")]
Overwrite = Annotated[
    bool,
    typer.Option(
        "--overwrite", help="Replace what was packed into DST from other data or options."
    ),
]

# info, index, verify

InfoJson = Annotated[
    Path | None,
    typer.Option("--json", metavar="FILE", help="Also write it as JSON; - is standard output."),
]
Checksum = Annotated[
    bool,
    typer.Option(
        "--checksum", help="Also store a CRC32C of each sample, if the format has no checksums."
    ),
]
ListFile = Annotated[
    Path | None,
    typer.Option(
        "--list", metavar="FILE", help="Write all bad samples to this file, one JSON object a line."
    ),
]

# show

Out = Annotated[Path, typer.Option("--out", "-o", metavar="FILE.png", help="Image file to write.")]
ShownSrc = Annotated[
    str | None,
    typer.Argument(
        metavar="SRC",
        help="Dataset, as in the other commands (default: the training data of --recipe).",
    ),
]
Augment = Annotated[
    str | None,
    typer.Option(
        "--augment",
        help=(
            'Augmentation: a chain such as "RandomResizedCrop(224), Flip()", or a preset: imagenet'
            " (the default), cifar10, fashion-mnist."
        ),
    ),
]
Recipe = Annotated[
    str | None,
    typer.Option(
        "--recipe", metavar="NAME", help="Recipe or config file whose augmentation is shown."
    ),
]
Samples = Annotated[
    int,
    typer.Option(
        "--samples",
        "-n",
        callback=between("--samples", 1, MOST),
        help="Number of rows: samples, spread over the dataset.",
    ),
]
Epochs = Annotated[
    int,
    typer.Option(
        "--epochs",
        callback=between("--epochs", 1, MOST),
        help="Number of columns: the sample as augmented in each of these epochs.",
    ),
]
RunSeed = Annotated[
    int | None,
    typer.Option("--seed", help="Seed of the augmentation (default: the recipe's seed, or 0)."),
]
ShownMaxPixels = Annotated[
    int | None,
    typer.Option(
        "--max-pixels",
        min=1,
        help="Do not show images with more pixels (default: data.max_pixels of --recipe).",
    ),
]

# get

Name = Annotated[str, typer.Argument(metavar="NAME", help="fashion-mnist or cifar10.")]
Origin = Annotated[
    str | None,
    typer.Option(
        "--from",
        metavar="FOLDER|URL",
        help="Folder or URL that has the files (default: the publisher's site).",
    ),
]
TargetFolder = Annotated[
    Path | None,
    typer.Option(
        "--to", metavar="DIR", help="Folder for the files (default: allstep's cache folder)."
    ),
]
