"""A calibration for hardware that is not present, from the images/s of one worker there.

The bytes of the gradients and the shape of a step (which part is forward, when which gradient is
ready) are those of a calibration on this machine; the times are scaled to the given speeds. There
is no table of GPUs: the rate at which one computes differs between models by a factor of three.
"""

from collections.abc import Sequence
from dataclasses import replace

from allstep.errors import ConfigError
from allstep.plan.answers.question_text import Alone
from allstep.plan.calibration import Calibration, StepTimes
from allstep.plan.levels import JITTER


def with_speeds(calibration: Calibration, speeds: Sequence[Alone]) -> Calibration:
    """Return the calibration of one worker with these speeds, each at a known batch."""
    shape = max(calibration.steps, key=lambda each: each.batch)
    seconds = {each.batch: each.batch / each.speed for each in speeds if each.batch is not None}
    # The update has the same work with any number of samples.
    update = shape.update / shape.busy * min(seconds.values())
    steps = tuple(_scaled(shape, batch, taken, update) for batch, taken in seconds.items())
    # Of the machine that provided the shape nothing holds for the other one.
    facts = {
        key: value
        for key, value in calibration.facts.items()
        if key not in ("cpu", "cores", "time", "threads")
    }
    return replace(calibration, steps=steps, host=None, hosts=None, facts=facts)


def _scaled(shape: StepTimes, batch: int, seconds: float, update: float) -> StepTimes:
    factor = (seconds - update) / shape.compute
    ready = tuple(factor * each for each in shape.ready)
    forward, backward = factor * shape.forward, factor * shape.backward
    return StepTimes(batch, forward, backward, ready, update, 0.0, JITTER)


def batches_known(
    speeds: Sequence[Alone], batch: int | None, batch_per_worker: int | None
) -> list[Alone]:
    """Return the speeds with the batch of each; raise ConfigError if a batch is missing.

    A plan with the same batch for each worker needs the speed at that batch, a plan with a global
    batch at two: small shares are slower per sample, by how much one speed does not show.
    """
    found = [each._replace(batch=each.batch or batch_per_worker) for each in speeds]
    if batch_per_worker is not None:
        if batch_per_worker not in [each.batch for each in found]:
            known = ", ".join(str(each.batch) for each in found)
            raise ConfigError(
                f"--alone: was measured at batch {known}, the plan has {batch_per_worker} per"
                f" worker; measure one worker at {batch_per_worker} and give"
                f" --alone SPEED@{batch_per_worker}"
            )
        return found
    if len(found) < 2:
        at = found[0].batch or "BATCH"
        raise ConfigError(
            f"--alone {found[0].speed:g}: the recipe has a global batch of {batch}, so a worker's"
            " share becomes smaller with more workers; give the speed at two batches, such as"
            f" --alone SPEED@32,{found[0].speed:g}@{at}, or --batch-per-worker with the batch that"
            " it was measured at"
        )
    return found
