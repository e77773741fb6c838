"""Run folders with untrained weights, written without a training: config and checkpoint."""

from collections.abc import Sequence
from pathlib import Path

from torch import nn

from allstep.train import read_config
from allstep.train.checkpoint import write_and_read as checkpoint
from allstep.train.checkpoint.write_and_read import Snapshot
from allstep.train.step import build

SMALL = ("model.options.widths=[4]", "model.options.hidden=8", "model.norm=batch")


class _Digits:
    """What `build.build_model` asks of the data."""

    num_classes = 10
    shape = (1, 8, 8)


def save_digits_run(
    folder: Path, *arguments: str, seed: int = 0, mean: float = 4.0, keys: Sequence[str] = SMALL
) -> nn.Module:
    """Write the folder of a run of the recipe `digits` and return its model.

    Running variances differ from those of a new model.
    """
    folder.mkdir(parents=True)
    config = read_config("digits", [*keys, *arguments, f"seed={seed}"])
    (folder / "config.yaml").write_text(config.to_yaml())
    model = build.build_model(config, _Digits())
    for name, buffer in model.named_buffers():
        if name.endswith("running_var"):
            buffer.uniform_(0.5, 2)
    images = {
        "shape": [1, 8, 8],
        "mean": [mean],
        "std": [6.0],
        "prepare": "none",
        "classes": [str(number) for number in range(10)],
    }
    standing = {"samples": 100, "best": None, "best_samples": 0}
    state = {"standing": standing, "pictures": images}
    checkpoint.write(folder / "checkpoints", Snapshot(100, model.state_dict(), {}, state))
    return model.eval()
