"""The callback that saves the best model."""

from typing import Any

from allstep.keras_shared.collective_callbacks import WithoutXLA


class BestCheckpoint(WithoutXLA):
    """Keras's ModelCheckpoint with `save_best_only`; set its `filepath` before training.

    It does not communicate: use it on one rank, and MetricAverageCallback before it. Arguments as
    in ModelCheckpoint, in the order of `horovod.tensorflow.keras`.
    """

    def __init__(
        self,
        monitor: str = "val_loss",
        verbose: int = 0,
        save_weights_only: Any = False,
        mode: str = "auto",
        save_freq: str | int = "epoch",
    ) -> None:
        if isinstance(save_weights_only, str):
            raise ValueError(
                f"save_weights_only={save_weights_only!r}: expected True or False. The third"
                " argument is a mode in horovod.keras and save_weights_only in"
                f" horovod.tensorflow.keras: write mode={save_weights_only!r}"
            )
        # Keras checks the ending of the name here; the caller's name replaces it.
        ending = ".weights.h5" if save_weights_only else ".keras"
        super().__init__(  # type: ignore[call-arg]
            filepath=f"best{ending}",
            monitor=monitor,
            verbose=verbose,
            save_best_only=True,
            save_weights_only=save_weights_only,
            mode=mode,
            save_freq=save_freq,
        )
        self.filepath: Any = None

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Raise ValueError unless a file was chosen."""
        if self.filepath is None:
            raise ValueError(
                "BestModelCheckpoint has no file: write checkpoint.filepath = 'best.keras'"
            )
        super().on_train_begin(logs)  # type: ignore[misc]
