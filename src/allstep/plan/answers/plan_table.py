"""The plan of a recipe as a table, as text and as JSON, each with the error to expect (D22)."""

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from allstep.console.markdown_table import table
from allstep.console.quantities import about, count, milliseconds, percent, plural, seconds
from allstep.costs.speed import Speed
from allstep.plan.answers.what_ifs import WhatIf, best_changes, limits, losses, what_ifs
from allstep.plan.calibration import Calibration
from allstep.plan.knowledge import Knowledge
from allstep.plan.levels import ERRORS, NAMES
from allstep.plan.prediction import PARTS, Prediction, Question, checks, predict

HEAD = (
    "workers",
    "hosts",
    "batch each",
    "images/s",
    "epoch",
    "eff. of 1",
    "of a host",
    "step",
    *PARTS,
    "algorithm",
)
# Where the link was not measured.
_NOMINAL = (
    "within a factor of 2 where the link limits, since links do not deliver their nominal rate"
)
_BUSY_JITTER = 0.1


@dataclass(frozen=True)
class Plan:
    """The answer to a question: a prediction for each number of workers, and what would help."""

    title: str
    calibration: Calibration
    known: Knowledge
    question: Question
    rows: tuple[Prediction, ...]
    one: Prediction
    """A single worker."""
    host: Prediction
    """One full host."""
    what_ifs: tuple[WhatIf, ...]
    """Of the largest number of workers, best first."""
    asked: str = ""
    """A combination of changes that the user asked for."""
    changed: tuple[Prediction, ...] = ()
    """The rows with these changes."""
    is_assumed: bool = False
    """Whether the link is a default, neither measured nor given."""

    @property
    def scaling(self) -> str:
        """Whether the batch or the share of a worker stays the same."""
        if self.question.batch is not None:
            return f"strong scaling, batch {self.question.batch:,}"
        return f"weak scaling, {self.question.batch_per_worker:,} samples per worker"

    def of_one(self, row: Prediction) -> float:
        """Return the efficiency against as many times one worker."""
        return row.samples_per_second / (row.workers * self.one.samples_per_second)

    def of_host(self, row: Prediction) -> float | None:
        """Return the efficiency against as many full hosts; None within a host."""
        if row.workers < self.host.workers:
            return None
        speed = self.host.samples_per_second / self.host.workers
        return row.samples_per_second / (row.workers * speed)


def make_plan(
    title: str,
    calibration: Calibration,
    known: Knowledge,
    question: Question,
    workers: Sequence[int],
    changed: Question | None = None,
    asked: str = "",
    is_assumed: bool = False,
) -> Plan:
    """Return the plan for these numbers of workers."""

    def rows(question: Question) -> tuple[Prediction, ...]:
        return tuple(predict(calibration, known, question, each) for each in workers)

    # One full host may have more workers than the batch has samples.
    full = min(question.per_host, question.of_step(question.per_host))
    return Plan(
        title=title,
        calibration=calibration,
        known=known,
        question=question,
        rows=rows(question),
        one=predict(calibration, known, question, 1),
        host=predict(calibration, known, question, full),
        what_ifs=tuple(what_ifs(calibration, known, question, workers[-1])),
        asked=asked,
        changed=() if changed is None else rows(changed),
        is_assumed=is_assumed,
    )


# Text


def as_text(plan: Plan) -> str:
    """Return the header, the table, what limits the speed, and what would help."""
    parts = [
        "\n".join(header(plan)),
        table(HEAD, [_cells(plan, row) for row in plan.rows]),
        _legend(plan),
        "\n".join(
            ["What limits the speed:", *(f"- {each}" for each in limits(plan.rows, plan.one))]
        ),
        *([_combination(plan)] if plan.changed else []),
        _helps(plan),
    ]
    return "\n\n".join(parts) + "\n"


def header(plan: Plan) -> Iterator[str]:
    """Yield the lines of the header: what is known, and the error to expect from it."""
    known, facts = plan.known, plan.calibration.facts
    yield f"{plan.title}: {plan.scaling}"
    yield f"Known (level {known.level}): {NAMES[known.level]}{_measured_on(facts)}."
    yield f'Error to expect: {expectation(plan)}. Read a speed as "at most".'
    if plan.rows[-1].workers > known.checked:
        yield (
            f"Measured together were at most {plural(known.checked, 'worker')}; larger numbers are"
            " computed."
        )
    for each in checks(plan.calibration) if known.level else ():
        place = "one host" if each.hosts == 1 else f"{each.hosts} hosts"
        yield (
            f"Check: {plural(each.workers, 'worker')} of {place} together, predicted without that"
            f" measurement: {milliseconds(each.predicted)}, measured"
            f" {milliseconds(each.measured)} ({each.error:+.1%})."
        )
    if plan.rows[-1].hosts > 1:
        yield f"Between hosts: {_link(plan)}."
    if known.jitter > _BUSY_JITTER:
        yield (
            f"Step times spread by {known.jitter:.0%}: the machine was busy during the calibration;"
            " calibrate again when it is quiet."
        )


def _measured_on(facts: Any) -> str:
    cpu, cores, when = facts.get("cpu"), facts.get("cores"), facts.get("time")
    return f", measured on {cpu}, {cores} cores, {when}" if cpu and cores and when else ""


def expectation(plan: Plan) -> str:
    """Return the error to expect, by level and by how far the rows go."""
    known, crosses = plan.known, plan.rows[-1].hosts > 1
    is_nominal = plan.question.link is not None or known.link is None
    if known.level >= 2 and crosses and is_nominal:
        return f"about 5% on one host; {_NOMINAL}"
    if known.level >= 2 and not crosses:
        return "about 5%"
    return ERRORS[known.level]


def _link(plan: Plan) -> str:
    link = plan.question.link or plan.known.link
    assert link is not None
    source = "assumed; give it with --link" if plan.is_assumed else "as given"
    if plan.question.link is None:
        source = "measured"
    return f"{_rate(link)} and {1e6 * link.latency:.3g} us ({source})"


def _rate(link: Speed) -> str:
    bits = 8 * link.bandwidth
    return f"{bits / 1e9:.3g} Gbit/s" if bits >= 1e9 else f"{bits / 1e6:.3g} Mbit/s"


def _cells(plan: Plan, row: Prediction) -> list[str]:
    of_host = plan.of_host(row)
    return [
        f"{row.workers:,}",
        f"{row.hosts:,}",
        count(row.batch / row.workers),
        count(row.samples_per_second),
        seconds(row.epoch),
        percent(plan.of_one(row), 0),
        "" if of_host is None else percent(of_host, 0),
        milliseconds(row.seconds),
        *(_part(row, name) for name in PARTS),
        row.algorithm,
    ]


def _part(row: Prediction, name: str) -> str:
    share = row.parts[name] / row.seconds
    return "" if share < 0.0005 else percent(share, 0 if share >= 0.095 else 1)


def _legend(plan: Plan) -> str:
    return (
        "eff.: the efficiency against as many times one worker, and against as many full hosts of"
        f"\n{plural(plan.host.workers, 'worker')}. Parts of the step: compute of one worker alone;"
        " contention with the other workers\nof its host; imbalance: waiting for the slowest;"
        " exposed: communication that no computation hides."
    )


def _helps(plan: Plan) -> str:
    workers, epoch = plan.rows[-1].workers, plan.rows[-1].epoch
    lines = [
        f"What one change would save with {plural(workers, 'worker')}, of {about(epoch)} per epoch:"
    ]
    lines += [f"- {_saving(each)}" for each in best_changes(plan.what_ifs)]
    if any(each.change == "batch=2x" for each in plan.what_ifs):
        lines.append(
            "A larger batch makes an epoch faster, not each epoch as good: --goal weighs both."
        )
    return "\n".join(lines)


def _saving(each: WhatIf) -> str:
    share = each.saved / each.before
    if abs(share) < 0.0005:
        return f"{each.change}: nothing"
    verb = "costs" if share < 0 else "saves"
    return f"{each.change} {verb} {about(abs(each.saved))} ({abs(share):.1%})"


def _combination(plan: Plan) -> str:
    rows = [
        [
            f"{before.workers:,}",
            count(before.samples_per_second),
            count(after.samples_per_second),
            f"{(before.epoch - after.epoch) / before.epoch:+.1%}",
        ]
        for before, after in zip(plan.rows, plan.changed, strict=True)
    ]
    return f"With {plan.asked}:\n\n" + table(["workers", "images/s", "then", "epoch saved"], rows)


# JSON


def as_json(plan: Plan, goal: Mapping[str, Any] | None = None) -> str:
    """Return all figures as JSON, with those of a goal if there is one."""
    found = {
        "title": plan.title,
        "scaling": plan.scaling,
        "level": plan.known.level,
        "known": NAMES[plan.known.level],
        "error": expectation(plan),
        "checks": [{**vars(each), "error": each.error} for each in checks(plan.calibration)],
        "checked_workers": plan.known.checked,
        "facts": dict(plan.calibration.facts),
        "rows": [_plain(plan, row) for row in plan.rows],
        "limits": limits(plan.rows, plan.one),
        "what_ifs": [
            {"change": each.change, "epoch": each.after, "saved": each.saved}
            for each in plan.what_ifs
        ],
        "asked": plan.asked,
        "changed": [_plain(plan, row) for row in plan.changed],
        **({} if goal is None else {"goal": dict(goal)}),
    }
    return json.dumps(found, indent=2) + "\n"


def _plain(plan: Plan, row: Prediction) -> dict[str, Any]:
    return {
        "workers": row.workers,
        "hosts": row.hosts,
        "batch": row.batch,
        "images_per_second": row.samples_per_second,
        "epoch_seconds": row.epoch,
        "efficiency_of_one": plan.of_one(row),
        "efficiency_of_host": plan.of_host(row),
        "step_seconds": row.seconds,
        "parts": dict(row.parts),
        "losses": losses(row, plan.one),
        "algorithm": row.algorithm,
    }
