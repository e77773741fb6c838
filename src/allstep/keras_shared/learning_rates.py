"""Callbacks that change the learning rate during training.

Momentum correction (Goyal et al. 2017, arXiv 1706.02677, section 3): the velocity of SGD contains
the learning rates of past steps, so it is multiplied by new/old when the rate changes. Horovod
changes the optimizer's `momentum` for one batch instead, to the same effect, except for the
lookahead of Nesterov's variant in that batch. `momentum` is a constant of the compiled step in
Keras 3 (on TensorFlow and JAX) and in Keras 2; the velocity is a variable everywhere.
"""

from collections.abc import Callable
from typing import Any

from allstep.hvd.place import rank, size
from allstep.keras_shared.collective_callbacks import WithoutXLA


class LearningRateSchedule(WithoutXLA):
    """Sets the learning rate to `initial_lr * multiplier(epoch)` in a range of epochs.

    - `initial_lr`: the learning rate to multiply.
    - `multiplier`: a function of the epoch; or a number m, for m to the power of the epochs since
      `start_epoch`.
    - `start_epoch`, `end_epoch`: the range, without its end (default: all epochs).
    - `staircase`: True (default) sets it at the beginning of each epoch; False at each batch, with
      epoch + batch / steps_per_epoch.
    - `momentum_correction`: whether to scale the velocity of SGD and RMSprop (default: True).
    - `steps_per_epoch`: the number of batches of an epoch (default: that of `fit`).
    """

    def __init__(
        self,
        initial_lr: float,
        multiplier: float | Callable[[float], float],
        start_epoch: int = 0,
        end_epoch: int | None = None,
        staircase: bool = True,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
    ) -> None:
        super().__init__()
        if initial_lr is None:
            raise ValueError("initial_lr=None: give the learning rate to multiply, such as 0.1")
        self.initial_lr = initial_lr
        self.multiplier = _as_function(multiplier, start_epoch)
        self.start_epoch = start_epoch
        self.end_epoch = end_epoch
        # Powers of a number change only with the epoch.
        self.staircase = staircase or not callable(multiplier)
        self.momentum_correction = momentum_correction
        self.steps_per_epoch = steps_per_epoch
        self.current_epoch = 0

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Find the number of steps if it is needed."""
        if not self.staircase and not self.steps_per_epoch:
            self.steps_per_epoch = self._steps_of_fit()

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Keep the epoch."""
        self.current_epoch = epoch

    def on_train_batch_begin(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Set the learning rate, if this batch changes it."""
        if not self._is_active() or (self.staircase and batch > 0):
            return
        epoch = float(self.current_epoch)
        if not self.staircase:
            epoch += batch / (self.steps_per_epoch or 1)
        self._set(self.initial_lr * self.multiplier(epoch))

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Report the learning rate as `lr`."""
        if logs is not None:
            logs["lr"] = self._learning_rate()

    def _is_active(self) -> bool:
        is_over = self.end_epoch is not None and self.current_epoch >= self.end_epoch
        return self.current_epoch >= self.start_epoch and not is_over

    def _set(self, new: float) -> None:
        # On JAX access to `self.model` brings the values of all variables back from the step.
        optimizer = self.model.optimizer
        old = self._learning_rate()
        optimizer.learning_rate = new
        if self.momentum_correction and old > 0 and new != old:
            for velocity in self._keras.velocities(optimizer):
                self._keras.scale(velocity, new / old)

    def _learning_rate(self) -> float:
        return float(self._keras.to_array(self.model.optimizer.learning_rate))

    def _steps_of_fit(self) -> int:
        params = self.params or {}
        if params.get("steps"):
            return int(params["steps"])
        if params.get("samples") and params.get("batch_size"):
            return int(params["samples"]) // int(params["batch_size"])
        raise ValueError(
            f"{type(self).__name__}: could not detect the number of steps per epoch; give it as"
            " steps_per_epoch, since Keras does not know the length of this data"
        )


class LearningRateWarmup(LearningRateSchedule):
    """Raises the learning rate from `initial_lr / size` to `initial_lr` in the first epochs.

    - `initial_lr`: the learning rate for all workers, usually size times that of one worker.
    - `warmup_epochs`: the number of epochs (default: 5).
    - `momentum_correction`, `steps_per_epoch`: as in LearningRateScheduleCallback.
    - `verbose`: 1 prints a line when the warm-up is over (default: 0).
    """

    def __init__(
        self,
        initial_lr: float,
        warmup_epochs: int = 5,
        momentum_correction: bool = True,
        steps_per_epoch: int | None = None,
        verbose: int = 0,
    ) -> None:
        def multiplier(epoch: float) -> float:
            # The last batch of an epoch has the value of the whole epoch.
            done = epoch + 1.0 / (self.steps_per_epoch or 1)
            return (done * (size() - 1) / warmup_epochs + 1) / size()

        super().__init__(
            initial_lr,
            multiplier,
            start_epoch=0,
            end_epoch=warmup_epochs,
            staircase=False,
            momentum_correction=momentum_correction,
            steps_per_epoch=steps_per_epoch,
        )
        self.verbose = verbose

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Report the learning rate, and the end of the warm-up."""
        super().on_epoch_end(epoch, logs)
        if self.verbose > 0 and rank() == 0 and epoch + 1 == self.end_epoch:
            lr = self._learning_rate()
            print(f"\nEpoch {epoch + 1}: finished gradual learning rate warmup to {lr:g}.")


def _as_function(
    multiplier: float | Callable[[float], float], start_epoch: int
) -> Callable[[float], float]:
    if callable(multiplier):
        return multiplier
    factor = float(multiplier)
    return lambda epoch: factor ** (epoch - start_epoch)
