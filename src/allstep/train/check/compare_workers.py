"""The plan of `allstep verify` for each number of workers, and the comparison of their answers.

This module needs no torch, because the launching process uses it.

```
Plan ──plan.json──> workers, once per number of workers ──answer-2.json──> Answer ──> table, verdict
```

The first number of workers is the reference. `made_exact` removes whatever is random in a way that
depends on the number of workers, and a note reports it. The rest of the recipe is kept: its model,
loss, optimizer, schedule, augmentation (which depends on the sample, not on the worker that reads
it), accumulation and sharing of weights.

The arithmetic is float64, so rounding errors are about 1e-16 and a mistake is far above the limit
of 1e-9. The difference of a tensor is relative to its own size (root of the mean square), or to a
thousandth of the size of all tensors if that is more: the gradient of a bias before a norm is zero
except for rounding errors, which never agree.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from allstep.errors import ConfigError, cut
from allstep.machine import MAX_TASKS
from allstep.train.config.run_config import ModelConfig, ResolvedConfig, RunConfig

TOLERANCE = 1e-9
_MAX_EVALUATED = 500
"""Number of validation samples, enough for several batches per worker."""


class _Plain(BaseModel):
    """Base of values that are stored as JSON; NaN and infinity are kept."""

    model_config = ConfigDict(frozen=True, ser_json_inf_nan="constants")


class Plan(_Plain):
    """Steps and evaluation that each number of workers computes."""

    batches: tuple[int, ...]
    """Samples of each step, over all workers."""
    evaluated: int
    """Number of samples of the validation split."""
    tolerance: float = TOLERANCE
    """Largest relative difference that counts as equal."""


class Difference(_Plain):
    """Difference of one tensor from that of the reference."""

    tensor: str
    shape: tuple[int, ...]
    relative: float
    """Size of the difference relative to the reference."""
    reference: float
    """Size (root of the mean square) in the reference."""
    found: float
    """Size (root of the mean square) with this number of workers."""

    def __str__(self) -> str:
        shape = "x".join(map(str, self.shape)) or "one number"
        return (
            f"{self.tensor} ({shape}) has the size {self.reference:.6g} in the reference and"
            f" {self.found:.6g} here, and differs by {self.relative:.2g} of it"
        )


class Compared(_Plain):
    """All tensors of a kind: their common size, and how they differ from the reference's.

    The reference itself has only the size.
    """

    size: float
    """Root of the mean square of all elements."""
    worst: Difference | None = None
    """Largest relative difference."""
    first: Difference | None = None
    """First difference beyond the tolerance, in the order of the model."""
    beyond: int = 0
    """Number of tensors beyond the tolerance."""
    of: int = 0
    """Number of tensors."""


class Step(_Plain):
    """Loss and gradient of one update."""

    loss: float
    gradient: Compared


class Answer(_Plain):
    """Result of one number of workers."""

    workers: int
    steps: tuple[Step, ...]
    weights: Compared
    """Weights after the last step."""
    loss: float
    """Loss of the evaluation."""
    metrics: dict[str, float]
    """Metrics of the evaluation."""
    percent: tuple[str, ...] = ()
    """Metrics that are shown as percent."""
    count: int
    """Number of samples that were evaluated."""
    alike: str = ""
    """How the weights of the ranks differ after the last step; "" if they do not."""
    notes: tuple[str, ...] = ()
    """Notes about what was changed for the comparison."""


def parse_workers(text: str) -> tuple[int, ...]:
    """Return the numbers of a text such as "1,2,4"; at least two different ones."""
    try:
        numbers = tuple(dict.fromkeys(int(number) for number in text.split(",") if number.strip()))
    except ValueError:
        numbers = ()
    if len(numbers) < 2 or min(numbers) < 1 or max(numbers) > MAX_TASKS:
        raise ConfigError(
            f"--workers {cut(text)}: expected two or more numbers of workers to compare, such as "
            f"1,2,4, each from 1 to {MAX_TASKS}"
        )
    return numbers


def made_exact(config: RunConfig, workers: Sequence[int]) -> tuple[ResolvedConfig, list[str]]:
    """Return the config without what depends on the number of workers, and a note on each change.

    The batch is resolved for the largest of `workers`.
    """
    notes: list[str] = []
    config = _fixed_batch(config, max(workers), notes)
    changed = {
        "precision": "float64",
        "overfit": None,
        "noise_scale": False,
        "shares": "even",
    }
    if config.execution in ("auto", "compiled"):
        changed["execution"] = "channels-last"
    model, data = config.model, config.data
    if model.norm in ("batch", "ghost"):
        notes.append(_norm_note(model))
        model = model.model_copy(update={"norm": "sync"})
    if config.shares != "even":
        notes.append(f"shares={config.shares}: verified with even shares, which agree")
    if data.mix != "none":
        own = "each worker mixes its own samples with each other"
        notes.append(f"data.mix={data.mix}: {own}; verified without")
        data = data.model_copy(update={"mix": "none"})
    return config.model_copy(update={**changed, "model": model, "data": data}), notes


def _norm_note(model: ModelConfig) -> str:
    """Return the note about a norm over the samples of one worker."""
    whose = "its own samples" if model.norm == "batch" else f"{model.ghost} of its own samples"
    return (
        f"model.norm={model.norm}: each worker normalizes over {whose}, so N workers differ"
        " from one by nature; verified with model.norm=sync instead, which agrees"
    )


def _fixed_batch(config: RunConfig, max_workers: int, notes: list[str]) -> ResolvedConfig:
    """Return the config with the batch of `max_workers`; add a note if that matters."""
    if config.batch_per_worker is not None:
        notes.append(
            f"batch_per_worker={config.batch_per_worker}: the batch would differ; verified with"
            f" that of {max_workers} workers"
        )
    return config.resolved(max_workers)


def make_plan(config: ResolvedConfig, workers: Sequence[int], num_validation: int) -> Plan:
    """Return the plan of five steps and an evaluation.

    There are whole batches, one that no number of workers divides, and one with too few samples for
    all workers.
    """
    batch, most = config.batch, max(workers)
    few = min(batch, most - 1 if most > 2 else 3)
    batches = (batch, batch, uneven(batch, workers), batch, few)
    return Plan(batches=batches, evaluated=uneven(min(num_validation, _MAX_EVALUATED), workers))


def uneven(most: int, workers: Sequence[int]) -> int:
    """Return the largest number up to `most` that none of the numbers of workers divides.

    Return `most` if there is none.
    """
    several = [number for number in workers if number > 1]
    return next((n for n in range(most, 0, -1) if all(n % number for number in several)), most)


def read_plan(folder: Path) -> Plan:
    """Return the plan that `write_plan` wrote."""
    return Plan.model_validate_json((folder / "plan.json").read_text())


def write_plan(folder: Path, plan: Plan) -> None:
    """Write the plan for the workers."""
    (folder / "plan.json").write_text(plan.model_dump_json())


def read_answer(folder: Path, workers: int) -> Answer:
    """Return the answer of this number of workers."""
    return Answer.model_validate_json((folder / f"answer-{workers}.json").read_text())


def write_answer(folder: Path, answer: Answer) -> None:
    """Write the answer for the launching process."""
    (folder / f"answer-{answer.workers}.json").write_text(answer.model_dump_json())


# Table and verdict


def table(plan: Plan, answers: Sequence[Answer]) -> Iterator[list[str]]:
    """Yield the rows of the table, the header first.

    The columns are: what is compared, in how many samples, the reference's value, and how far each
    other number of workers is from it.
    """
    reference, others = answers[0], answers[1:]
    yield ["", "samples", named(reference.workers), *(named(each.workers) for each in others)]
    for i, step in enumerate(reference.steps):
        apart = [_number(relative(each.steps[i].loss, step.loss)) for each in others]
        yield [f"step {i + 1}: loss", str(plan.batches[i]), f"{step.loss:.9f}", *apart]
        gradients = [_worst(each.steps[i].gradient) for each in others]
        yield ["gradient", "", _size(step.gradient), *gradients]
    weights = [_worst(each.weights) for each in others]
    yield ["weights after it", "", _size(reference.weights), *weights]
    yield from _evaluation_rows(reference, others)
    yield ["equal on all ranks", "", *("no" if each.alike else "yes" for each in answers)]


def _evaluation_rows(reference: Answer, others: Sequence[Answer]) -> Iterator[list[str]]:
    """Yield the rows of the table about the evaluation."""
    losses = [_number(relative(each.loss, reference.loss)) for each in others]
    yield ["validation: loss", str(reference.count), f"{reference.loss:.9f}", *losses]
    for name, value in reference.metrics.items():
        apart = [_number(relative(each.metrics[name], value)) for each in others]
        shown = f"{value:.2%}" if name in reference.percent else f"{value:.9g}"
        yield [name, "", shown, *apart]
    yield ["counted", "", str(reference.count), *(str(each.count) for each in others)]


def _size(compared: Compared) -> str:
    """Return the common size of tensors for the table."""
    return f"size {compared.size:.3g}"


def _worst(compared: Compared) -> str:
    """Return the worst difference and its tensor for the table."""
    worst = compared.worst
    return "" if worst is None else f"{_number(worst.relative)} {worst.tensor}"


def _number(value: float) -> str:
    """Return a relative difference for the table."""
    return "equal" if value == 0 else f"{value:.1e}"


def named(workers: int) -> str:
    """Return "1 worker" or "2 workers"."""
    return f"{workers} worker{'s' if workers > 1 else ''}"


def relative(found: float, reference: float) -> float:
    """Return the difference of two numbers relative to the second."""
    if found == reference:
        return 0.0
    return abs(found - reference) / max(abs(reference), 1e-300)


def differing_answers(plan: Plan, answers: Sequence[Answer]) -> Iterator[str]:
    """Yield a line per number of workers that differs from the first; nothing if all agree."""
    reference = answers[0]
    for answer in answers[1:]:
        if difference := _first_difference(plan, reference, answer):
            yield f"{named(answer.workers)} differ from {named(reference.workers)} {difference}"
    for answer in answers:
        if answer.alike:
            yield (
                f"{named(answer.workers)} do not have the same weights after the last step:"
                f" {answer.alike}"
            )


def _first_difference(plan: Plan, reference: Answer, answer: Answer) -> str:
    """Return where an answer first differs, in the order of the run; "" if it does not."""
    for i, (theirs, ours) in enumerate(zip(reference.steps, answer.steps, strict=True)):
        place = f"at step {i + 1} ({plan.batches[i]} samples)"
        if not relative(ours.loss, theirs.loss) <= plan.tolerance:
            return (
                f"{place}: the loss is {theirs.loss:.9g} there and {ours.loss:.9g} here{_before(i)}"
            )
        if ours.gradient.first is not None:
            return f"{place}: {_first('gradient', ours.gradient)}"
    if answer.weights.first is not None:
        return f"after the last step: {_first('weight', answer.weights)}"
    if answer.count != reference.count:
        return (
            f"in the evaluation: {reference.count} samples were counted there and {answer.count}"
            " here"
        )
    there_by_name = {"loss": reference.loss, **reference.metrics}
    here_by_name = {"loss": answer.loss, **answer.metrics}
    for name, there in there_by_name.items():
        here = here_by_name[name]
        if not relative(here, there) <= plan.tolerance:
            return f"in the evaluation: the {name} is {there:.9g} there and {here:.9g} here"
    return ""


def _before(step: int) -> str:
    """Return what a different loss at this step implies."""
    if step == 0:
        return ", before any update: the weights or the samples differ from the start"
    return ", so the update before it was wrong"


def _first(kind: str, compared: Compared) -> str:
    """Return a text about the first tensor that differs, and the worst."""
    more = (
        f"; {compared.beyond} of {compared.of} tensors differ, the worst is {compared.worst.tensor}"
        if compared.worst
        else ""
    )
    return f"the {kind} of {compared.first}{more}"
