"""`allstep predict`: what the net of a run sees in pictures, as a table and as JSON."""

import json as json_format
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

if TYPE_CHECKING:
    from allstep.train.existing import Which
    from allstep.train.predict import Prediction

RunFolder = Annotated[
    Path, typer.Argument(metavar="RUN", help="A run folder, of a run that has ended or is under way.")
]
WhichWeights = Annotated[
    str | None, typer.Option("--which", metavar="last|best", help="Weights: else those that the run itself tests.")
]
Trust = Annotated[bool, typer.Option("--trust", help="Execute the model code that the run's config names.")]
Device = Annotated[str, typer.Option("--device", metavar="auto|cpu|cuda", help="Where to compute.")]
Json = Annotated[Path | None, typer.Option("--json", metavar="FILE", help="Write it there, too; - is standard output.")]


def predict(
    run: RunFolder,
    pictures: Annotated[
        list[str], typer.Argument(metavar="PICTURES...", help="Files, folders (all pictures below them) or patterns.")
    ],
    top: Annotated[int, typer.Option("--top", min=1, help="How many classes of each.")] = 5,
    which: WhichWeights = None,
    device: Device = "auto",
    json: Json = None,
    trust: Trust = False,
) -> None:
    """Name the likeliest classes of pictures. The exit status is 1 when one of them cannot be read."""
    from allstep.cli.bar import bar
    from allstep.cli.predict_table import show
    from allstep.train.existing import run_config

    chosen = checked_which(which)
    check_json(json)
    run_config(run, trust=trust)  # what is wrong with the folder is said before torch is fetched
    from allstep.train.predict import find_pictures, load_run
    from allstep.train.predict import predict as look_at

    trained = load_run(run, chosen, device, trust)
    tell(trained.notes)
    files, found = find_pictures(pictures), []
    with bar("predicting", "pictures") as shown:
        for prediction in look_at(trained, files, top):
            found.append(prediction)
            shown(len(found), len(files), "")
    show(found, stderr=str(json) == "-")
    write_json(json, [_as_json(each) for each in found])
    if any(each.problem is not None for each in found):
        raise typer.Exit(1)


def checked_which(which: str | None) -> "Which | None":
    """The word, if it is one of the two."""
    from allstep.errors import ConfigError

    if which not in ("last", "best", None):
        raise ConfigError(f"--which: expected last or best, found {which!r}")
    return cast("Which | None", which)


def tell(notes: Sequence[str]) -> None:
    """Lines beside the output."""
    for note in notes:
        print(f"allstep: {note}", file=sys.stderr)


def check_json(file: Path | None) -> None:
    """What would go wrong at the end goes wrong now."""
    from allstep.errors import ConfigError

    if file is None or str(file) == "-":
        return
    if file.is_dir():
        raise ConfigError(f"--json {file}: is a folder; expected a file to write")
    if not file.absolute().parent.is_dir():
        raise ConfigError(f"--json {file}: there is no folder {file.parent}")


def write_json(file: Path | None, content: Any) -> None:
    """To a file, to standard output (-) or nowhere."""
    from allstep.errors import ConfigError

    text = json_format.dumps(content, indent=2) + "\n"
    if str(file) == "-":
        sys.stdout.write(text)
    elif file is not None:
        try:
            file.write_text(text)
        except OSError as error:
            raise ConfigError(f"--json {file}: cannot be written: {error.strerror or error}") from error


def _as_json(prediction: "Prediction") -> dict[str, Any]:
    if prediction.problem is not None:
        return {"picture": prediction.picture, "problem": prediction.problem}
    classes = [{"class": name, "probability": probability} for name, probability in prediction.classes]
    return {"picture": prediction.picture, "classes": classes}
