"""The callback that saves the best model."""

from typing import Any

import keras

from allstep.keras.before_training import without_xla


# Keras has no type annotations.
class BestModelCheckpoint(keras.callbacks.ModelCheckpoint):  # type: ignore[misc]
    """Keras's ModelCheckpoint with `save_best_only`; set its `filepath` before training.

    It does not communicate: use it on one rank, and MetricAverageCallback before it. Arguments as
    in ModelCheckpoint.
    """

    def __init__(
        self,
        monitor: str = "val_loss",
        verbose: int = 0,
        mode: str = "auto",
        save_freq: str | int = "epoch",
        save_weights_only: bool = False,
    ) -> None:
        # Keras checks the ending of the name here; the caller's name replaces it.
        ending = ".weights.h5" if save_weights_only else ".keras"
        super().__init__(
            filepath=f"best{ending}",
            monitor=monitor,
            verbose=verbose,
            save_best_only=True,
            save_weights_only=save_weights_only,
            mode=mode,
            save_freq=save_freq,
        )
        self.filepath: Any = None

    def set_model(self, model: Any) -> None:
        """Take the model of a `fit`."""
        super().set_model(model)
        without_xla(model)

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Raise ValueError unless a file was chosen."""
        if self.filepath is None:
            raise ValueError(
                "BestModelCheckpoint has no file: write checkpoint.filepath = 'best.keras'"
            )
        super().on_train_begin(logs)
