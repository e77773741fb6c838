"""The contact sheet: its size, and that its cells contain the images of a training run."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image
from typer.testing import CliRunner

from allstep.cli.app import app
from allstep.data.augment.parse import PRESETS, spelled
from allstep.data.inspect.contact_sheet import BAND, GAP, sheet, sheet_size
from allstep.data.opening import open_source
from allstep.data.sources.arrays import ArraySource
from allstep.errors import ConfigError
from support.image_folders import make_folder


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ALLSTEP_CACHE", str(tmp_path / "cache"))


def test_its_places_hold_what_training_sees(tmp_path: Path) -> None:
    source = open_source(str(make_folder(tmp_path / "photos", height=200, width=180)))
    transform = spelled("RandomResizedCrop(112), Flip()")
    image = np.asarray(sheet(source, transform, [3, 20], columns=2, seed=5))
    assert image.shape == (*sheet_size((112, 112), 2, 2), 3)
    for row, number in enumerate((3, 20)):
        for epoch in (0, 1):
            out = np.zeros((112, 112, 3), np.uint8)
            transform.one(
                source.read(number).data, out, transform.draw(5, epoch, np.array([number])), 0
            )
            top, left = 2 * BAND + row * (BAND + 112 + GAP), GAP + (1 + epoch) * (112 + GAP)
            np.testing.assert_array_equal(image[top : top + 112, left : left + 112], out)


@pytest.mark.parametrize("shape", [(28, 28), (32, 32, 3)])
def test_small_arrays_are_magnified(shape: tuple[int, ...]) -> None:
    data = np.random.default_rng(0).integers(0, 256, (4, *shape), np.uint8)
    image = sheet(
        ArraySource(data, np.arange(4)),
        spelled(f"PadAndCrop({shape[0]}, pad=2), Flip()"),
        range(4),
        columns=3,
    )
    times = -(-96 // shape[0])
    assert (image.height, image.width) == sheet_size((shape[0] * times, shape[0] * times), 4, 3)


def test_a_bad_sample_has_its_reason_for_a_title(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "photos")
    (folder / "cat" / "000.jpg").write_bytes(b"no image")
    image = np.asarray(sheet(open_source(str(folder)), spelled("Resize(96)"), [0], columns=1))
    assert (image[2 * BAND :] == 255).all()
    assert (image[BAND : 2 * BAND] < 255).any()


@pytest.mark.parametrize("name", PRESETS)
def test_presets_can_be_made(name: str) -> None:
    assert spelled(name).shape is not None


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("Flop()", "no operation is called 'Flop'; did you mean 'Flip'"),
        ("Flip(", "expected operations such as"),
        ("Flip(colour=3)", "Flip"),
        ("__import__('os').system('true')", "is not an operation"),
        ("Flip(__import__('os'))", "Flip"),
        ("3", "is not an operation"),
    ],
)
def test_what_cannot_be_spelled(text: str, complaint: str) -> None:
    with pytest.raises(ConfigError, match=complaint):
        spelled(text)


class TestTheCommand:
    def test_it_writes_a_png(self, tmp_path: Path) -> None:
        folder = make_folder(tmp_path / "photos", height=130, width=120)
        arguments = [
            "data",
            "show",
            str(folder),
            "--out",
            str(tmp_path / "sheet.png"),
            "--augment",
            "RandomResizedCrop(96)",
        ]
        outcome = CliRunner().invoke(app, [*arguments, "--samples", "3", "--epochs", "4"])
        assert outcome.exit_code == 0, outcome.output
        with Image.open(tmp_path / "sheet.png") as image:
            assert (image.format, (image.height, image.width)) == (
                "PNG",
                sheet_size((96, 96), 3, 4),
            )

    @pytest.mark.parametrize("out", ["/no/such/folder/x.png", "{tmp}/sheet.xyz"])
    def test_where_it_cannot(self, tmp_path: Path, out: str) -> None:
        folder = make_folder(tmp_path / "photos")
        outcome = CliRunner().invoke(
            app, ["data", "show", str(folder), "--out", out.format(tmp=tmp_path)]
        )
        assert getattr(outcome.exception, "exit_code", None) == 2
        assert "\n" not in str(outcome.exception)

    def test_the_augmentation_of_a_recipe(self, tmp_path: Path) -> None:
        """Show the recipe's dataset, or a given one, with the same images as with its operations
        written out."""
        recipe, spelled_out, other = (
            str(tmp_path / f"{name}.png") for name in ("recipe", "spelled", "other")
        )
        mine = tmp_path / "mine.yaml"
        mine.write_text(
            "recipe: digits\nseed: 3\ndata: {augment: 'PadAndCrop(8, pad=2), Flip()'}\n"
        )
        for arguments in (
            ["--recipe", str(mine), "--out", recipe],
            [
                "digits",
                "--augment",
                "PadAndCrop(8, pad=2), Flip()",
                "--seed",
                "3",
                "--out",
                spelled_out,
            ],
            [
                str(make_folder(tmp_path / "photos", height=130, width=120)),
                "--recipe",
                "imagenet",
                "--out",
                other,
            ],
        ):
            outcome = CliRunner().invoke(
                app, ["data", "show", *arguments, "--samples", "2", "--epochs", "2"]
            )
            assert outcome.exit_code == 0, outcome.output
        assert Path(recipe).read_bytes() == Path(spelled_out).read_bytes()
        assert "RandomResizedCrop(size=(224, 224)" in outcome.output

    @pytest.mark.parametrize(
        "arguments",
        [[], ["digits", "--augment", "Flip()", "--recipe", "digits"], ["--recipe", "digit"]],
    )
    def test_wrong_options_are_errors(self, arguments: list[str], tmp_path: Path) -> None:
        outcome = CliRunner().invoke(
            app, ["data", "show", *arguments, "--out", str(tmp_path / "x.png")]
        )
        assert getattr(outcome.exception, "exit_code", None) == 2
        assert "\n" not in str(outcome.exception)
