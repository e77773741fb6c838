"""`allstep predict`: classify images with the model of a run; the output is a table or JSON."""

import json as json_format
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from allstep.cli.output_file import check_output, write_text
from allstep.console.escape import print_notice

if TYPE_CHECKING:
    from allstep.train.folder.existing_run import Which
    from allstep.train.use.predict import Prediction

RunFolder = Annotated[
    Path,
    typer.Argument(metavar="RUN", help="Run folder of a run that has ended or is in progress."),
]
WhichWeights = Annotated[
    str | None,
    typer.Option(
        "--which",
        metavar="last|best",
        help="Weights to use (default: those that the run itself tests).",
    ),
]
Trust = Annotated[
    bool,
    typer.Option(
        "--trust",
        help="Execute the model code that the run's config names, even if another person wrote it.",
    ),
]
Device = Annotated[
    str, typer.Option("--device", metavar="auto|cpu|cuda", help="Device to compute on.")
]
Json = Annotated[
    Path | None,
    typer.Option(
        "--json", metavar="FILE", help="Also write the result as JSON; - is standard output."
    ),
]
MaxPixels = Annotated[
    int | None,
    typer.Option(
        "--max-pixels", min=1, help="Refuse larger images (default: the run's data.max_pixels)."
    ),
]


def predict(
    run: RunFolder,
    images: Annotated[
        list[str],
        typer.Argument(
            metavar="IMAGES...", help="Image files, folders (all images below them) or patterns."
        ),
    ],
    top: Annotated[
        int, typer.Option("--top", min=1, help="Number of classes to show per image.")
    ] = 5,
    which: WhichWeights = None,
    device: Device = "auto",
    json: Json = None,
    max_pixels: MaxPixels = None,
    trust: Trust = False,
) -> None:
    """Print the most probable classes of images.

    The exit status is 1 if an image cannot be read.
    """
    from allstep.cli.saved_run.predict_table import show
    from allstep.cli.torch_import import import_torch
    from allstep.console.progress_bar import bar
    from allstep.train.folder.existing_run import run_config

    chosen = checked_which(which)
    check_output("--json", json, "JSON")
    # Report errors in the run folder before torch is imported, which takes seconds.
    run_config(run, trust=trust)
    import_torch(optimizers=False)
    from allstep.data.sources.class_folders import left_out_notes
    from allstep.train.use.predict import find_images, load_run
    from allstep.train.use.predict import predict as predict_images

    trained = load_run(run, chosen, device, trust)
    if max_pixels is not None:
        trained.prepare.max_pixels = max_pixels
    print_notes(trained.notes)
    left_out: Counter[str] = Counter()
    files, found = find_images(images, left_out), []
    print_notes(list(left_out_notes(", ".join(images), left_out)))
    with bar("predicting", "images") as shown:
        for prediction in predict_images(trained, files, top):
            found.append(prediction)
            shown(len(found), len(files), "")
    show(found, stderr=str(json) == "-")
    write_json(json, [_as_json(each) for each in found])
    if any(each.problem is not None for each in found):
        raise typer.Exit(1)


def checked_which(which: str | None) -> "Which | None":
    """Return `which` if it is "last", "best" or None; otherwise raise ConfigError."""
    from allstep.errors import ConfigError

    if which not in ("last", "best", None):
        raise ConfigError(f"--which: expected last or best, found {which!r}")
    return cast("Which | None", which)


def print_notes(notes: Sequence[str]) -> None:
    """Print one line per note to standard error."""
    for note in notes:
        print_notice(note)


def write_json(file: Path | None, content: Any) -> None:
    """Write `content` as JSON to a file, to standard output (`-`) or nowhere (None)."""
    write_text("--json", file, json_format.dumps(content, indent=2) + "\n")


def _as_json(prediction: "Prediction") -> dict[str, Any]:
    """Return the entry of one image in the JSON output."""
    if prediction.problem is not None:
        return {"picture": prediction.image, "problem": prediction.problem}
    classes = [
        {"class": name, "probability": probability} for name, probability in prediction.classes
    ]
    return {"picture": prediction.image, "classes": classes}
