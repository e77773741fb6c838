"""The callbacks of elastic training without a base of Keras; see `collective_callbacks`."""

from typing import Any

from allstep.hvd.elastic import State


class CommitState:
    """Commits a state after a number of batches, and at the end of each epoch.

    `state`: the state to commit. `batches_per_commit`: default: 1; more lose more work but cost
    less time.
    """

    def __init__(self, state: State, batches_per_commit: int = 1) -> None:
        super().__init__()
        self.state = state
        self.batches_per_commit = batches_per_commit
        self.batches_remaining = batches_per_commit

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Count from the beginning."""
        self.batches_remaining = self.batches_per_commit

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Commit, if it is time."""
        self.batches_remaining -= 1
        if self.batches_remaining == 0:
            self._commit()

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Commit."""
        self._commit()

    def _commit(self) -> None:
        self.batches_remaining = self.batches_per_commit
        self.state.commit()


class UpdateBatchState:
    """Keeps the number of the batch in `state.batch`, 0 at the end of an epoch.

    After a reset it lowers the number of steps that Keras shows for the first epoch by the batches
    that are done. Put it before the callback that commits.
    """

    params: Any

    def __init__(self, state: Any) -> None:
        super().__init__()
        self.state = state
        self.steps_per_epoch: int | None = None

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Take the number of steps of this training."""
        self.steps_per_epoch = None

    def on_epoch_begin(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Lower the number of steps by the batches that are done."""
        if not self.params.get("steps"):
            return
        if self.steps_per_epoch is None:
            self.steps_per_epoch = self.params["steps"]
        self.params["steps"] = self.steps_per_epoch - self.state.batch

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Keep the batch."""
        self.state.batch = batch

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Begin again at 0."""
        self.state.batch = 0


class UpdateEpochState:
    """Keeps the number of epochs that are done in `state.epoch`, over several trainings.

    Put it before the callback that commits.
    """

    def __init__(self, state: Any) -> None:
        super().__init__()
        self.state = state
        self.initial_epoch = 0

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Keep the number of epochs before this training."""
        self.initial_epoch = self.state.epoch

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Count this epoch."""
        self.state.epoch = self.initial_epoch + epoch + 1
