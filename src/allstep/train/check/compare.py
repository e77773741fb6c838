"""What `allstep verify` asks of each number of workers, and whether their answers agree. No torch
in here: the launching process does it.

```
Plan ──plan.json──> workers, once for each number of them ──answer-2.json──> Answer ──> table, verdict
```

The first number of workers is the reference. Whatever is random in a way that depends on the number
of workers is taken out by `made_exact`, and a line says so; the rest of the recipe stays: its model,
loss, optimizer, schedule, augmentation (which is drawn from the sample, whoever reads it),
accumulation and sharing of weights.

The arithmetic is float64, so rounding is about 1e-16 and a mistake is far above the limit of 1e-9.
A tensor's difference is relative to its own size (root of the mean square), or to a thousandth of
the size of all where that is more: the gradient of a bias before a norm is zero but for rounding,
and rounding agrees with nothing.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from allstep.errors import ConfigError, cut
from allstep.machine import MAX_TASKS
from allstep.train.config.run_config import ResolvedConfig, RunConfig

TOLERANCE = 1e-9
_EVALUATED = 500  # samples: enough for every worker to have several batches of its own


class _Plain(BaseModel):
    model_config = ConfigDict(frozen=True, ser_json_inf_nan="constants")


class Plan(_Plain):
    """What every number of workers does."""

    batches: tuple[int, ...]
    """Samples of each step, over all workers."""
    evaluated: int
    """Samples of the validation part."""
    tolerance: float = TOLERANCE


class Difference(_Plain):
    """One tensor against that of the reference."""

    tensor: str
    shape: tuple[int, ...]
    relative: float
    reference: float
    """Its size with the reference's number of workers: root of the mean square."""
    found: float

    def __str__(self) -> str:
        shape = "x".join(map(str, self.shape)) or "one number"
        return (
            f"{self.tensor} ({shape}) has the size {self.reference:.6g} in the reference and"
            f" {self.found:.6g} here, and differs by {self.relative:.2g} of it"
        )


class Compared(_Plain):
    """All tensors of a kind: how large they are together, and how they differ from the reference's,
    if this is not it."""

    size: float
    worst: Difference | None = None
    first: Difference | None = None
    """The first in the order of the model that is beyond the limit."""
    beyond: int = 0
    """How many are."""
    of: int = 0


class Step(_Plain):
    """One update."""

    loss: float
    gradient: Compared


class Answer(_Plain):
    """What came out with one number of workers."""

    workers: int
    steps: tuple[Step, ...]
    weights: Compared
    loss: float
    accuracy: float
    count: int
    alike: str = ""
    """How the weights of the ranks differ from each other after the last step; empty when they do
    not."""
    notes: tuple[str, ...] = ()


def parse_workers(text: str) -> tuple[int, ...]:
    """ "1,2,4" as numbers; at least two different ones."""
    try:
        numbers = tuple(dict.fromkeys(int(word) for word in text.split(",") if word.strip()))
    except ValueError:
        numbers = ()
    if len(numbers) < 2 or min(numbers) < 1 or max(numbers) > MAX_TASKS:
        raise ConfigError(
            f"--workers {cut(text)}: expected two or more numbers of workers to compare, such as "
            f"1,2,4, each from 1 to {MAX_TASKS}"
        )
    return numbers


def made_exact(config: RunConfig, workers: Sequence[int]) -> tuple[ResolvedConfig, list[str]]:
    """The run without what cannot agree, with its batch spelled out; and a line on each thing that
    was changed."""
    notes: list[str] = []
    config = _fixed_batch(config, max(workers), notes)
    changed = {"precision": "float64", "overfit": None, "noise_scale": False}
    if config.execution in ("auto", "compiled"):
        changed["execution"] = "channels-last"
    model, data = config.model, config.data
    if model.norm in ("batch", "ghost"):
        whose = "its own samples" if model.norm == "batch" else f"{model.ghost} of its own samples"
        notes.append(
            f"model.norm={model.norm}: each worker normalizes over {whose}, so N workers differ"
            " from one by nature; verified with model.norm=sync instead, which agrees"
        )
        model = model.model_copy(update={"norm": "sync"})
    if data.mix != "none":
        notes.append(
            f"data.mix={data.mix}: each worker mixes its own samples with each other; verified"
            " without"
        )
        data = data.model_copy(update={"mix": "none"})
    return config.model_copy(update={**changed, "model": model, "data": data}), notes


def _fixed_batch(config: RunConfig, most: int, notes: list[str]) -> ResolvedConfig:
    if config.batch_per_worker is not None:
        notes.append(
            f"batch_per_worker={config.batch_per_worker}: the batch would differ; verified with"
            f" that of {most} workers"
        )
    return config.resolved(most)


def make_plan(config: ResolvedConfig, workers: Sequence[int], num_validation: int) -> Plan:
    """Five steps: whole batches, one that no number of workers divides, and one with too few
    samples for all workers."""
    batch, most = config.batch, max(workers)
    few = min(batch, most - 1 if most > 2 else 3)
    batches = (batch, batch, uneven(batch, workers), batch, few)
    return Plan(batches=batches, evaluated=uneven(min(num_validation, _EVALUATED), workers))


def uneven(most: int, workers: Sequence[int]) -> int:
    """The largest number up to `most` that none of the numbers of workers divides; `most` where
    there is none."""
    several = [number for number in workers if number > 1]
    return next((n for n in range(most, 0, -1) if all(n % number for number in several)), most)


def read_plan(folder: Path) -> Plan:
    """As `write_plan` left it."""
    return Plan.model_validate_json((folder / "plan.json").read_text())


def write_plan(folder: Path, plan: Plan) -> None:
    """For the workers."""
    (folder / "plan.json").write_text(plan.model_dump_json())


def read_answer(folder: Path, workers: int) -> Answer:
    """Of so many workers."""
    return Answer.model_validate_json((folder / f"answer-{workers}.json").read_text())


def write_answer(folder: Path, answer: Answer) -> None:
    """For the launching process."""
    (folder / f"answer-{answer.workers}.json").write_text(answer.model_dump_json())


# What came out


def table(plan: Plan, answers: Sequence[Answer]) -> Iterator[list[str]]:
    """Rows: what is compared, in how many samples, the reference's value, and how far each other
    number of workers is from it."""
    reference, others = answers[0], answers[1:]
    yield ["", "samples", named(reference.workers), *(named(each.workers) for each in others)]
    for i, step in enumerate(reference.steps):
        apart = [_number(relative(each.steps[i].loss, step.loss)) for each in others]
        yield [f"step {i + 1}: loss", str(plan.batches[i]), f"{step.loss:.9f}", *apart]
        yield [
            "gradient",
            "",
            _size(step.gradient),
            *(_worst(each.steps[i].gradient) for each in others),
        ]
    yield [
        "weights after it",
        "",
        _size(reference.weights),
        *(_worst(each.weights) for each in others),
    ]
    losses = [_number(relative(each.loss, reference.loss)) for each in others]
    yield ["validation: loss", str(reference.count), f"{reference.loss:.9f}", *losses]
    accuracies = [_number(relative(each.accuracy, reference.accuracy)) for each in others]
    yield ["accuracy", "", f"{reference.accuracy:.2%}", *accuracies]
    yield ["counted", "", str(reference.count), *(str(each.count) for each in others)]
    yield ["equal on all ranks", "", *("no" if each.alike else "yes" for each in answers)]


def _size(compared: Compared) -> str:
    return f"size {compared.size:.3g}"


def _worst(compared: Compared) -> str:
    worst = compared.worst
    return "" if worst is None else f"{_number(worst.relative)} {worst.tensor}"


def _number(value: float) -> str:
    return "equal" if value == 0 else f"{value:.1e}"


def named(workers: int) -> str:
    """1 worker, 2 workers."""
    return f"{workers} worker{'s' if workers > 1 else ''}"


def relative(found: float, reference: float) -> float:
    """How far apart two numbers are, relative to the second."""
    if found == reference:
        return 0.0
    return abs(found - reference) / max(abs(reference), 1e-300)


def partings(plan: Plan, answers: Sequence[Answer]) -> Iterator[str]:
    """Where each number of workers parts from the first, in words; nothing when all agree."""
    reference = answers[0]
    for answer in answers[1:]:
        if words := _parting(plan, reference, answer):
            yield f"{named(answer.workers)} part from {named(reference.workers)} {words}"
    for answer in answers:
        if answer.alike:
            yield (
                f"{named(answer.workers)} do not have the same weights after the last step:"
                f" {answer.alike}"
            )


def _parting(plan: Plan, reference: Answer, answer: Answer) -> str:
    """The first place, in the order in which a run comes by."""
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
    for name in ("loss", "accuracy"):
        there, here = getattr(reference, name), getattr(answer, name)
        if not relative(here, there) <= plan.tolerance:
            return f"in the evaluation: the {name} is {there:.9g} there and {here:.9g} here"
    return ""


def _before(step: int) -> str:
    return (
        ", before any update: they began with other weights or other samples"
        if step == 0
        else ", so the update before went wrong"
    )


def _first(kind: str, compared: Compared) -> str:
    more = (
        f"; {compared.beyond} of {compared.of} tensors differ, the worst is {compared.worst.tensor}"
        if compared.worst
        else ""
    )
    return f"the {kind} of {compared.first}{more}"
