"""Facts about runs as rows of a table: a name, and a value for each run."""

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from allstep.console.quantities import count, nbytes, percent, plural, seconds, times
from allstep.report.ending import last_time
from allstep.report.glance import glance
from allstep.report.run import Run
from allstep.runlog import number
from allstep.study.recorded.series import Clock, steps

_NOT_KNOWN = "–"
# bytes; a larger value is a damaged record
_LARGEST_MEMORY = 1 << 60


def facts(runs: Sequence[Run]) -> list[tuple[str, tuple[str, ...]]]:
    """Return the rows for which at least one run has a value."""
    table = [(name, tuple(fact(run) or _NOT_KNOWN for run in runs)) for name, fact in _ROWS]
    return [(name, values) for name, values in table if set(values) != {_NOT_KNOWN}]


def _section(run: Run, name: str) -> Mapping[str, Any]:
    section = run.record.starts[-1].get(name)
    return section if isinstance(section, Mapping) else {}


def _text(run: Run, section: str, key: str) -> str | None:
    value = _section(run, section).get(key)
    return None if value is None else str(value)


def _started(run: Run) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(run.record.start["time"]))


def _took(run: Run) -> str:
    spent = seconds(Clock(run.record)(last_time(run.record)))
    resumed = len(run.record.starts) - 1
    return spent + (f", resumed {times(resumed)}" if resumed else "")


def _workers(run: Run) -> str:
    hosts, threads = _section(run, "world").get("hosts"), run.num_threads
    parts = [str(run.num_workers)]
    if isinstance(hosts, list):
        parts.append(f"on {plural(len(set(map(str, hosts))), 'host')}")
    if threads:
        parts.append(f"with {plural(threads // run.num_workers, 'thread')} each")
    return " ".join(parts)


def _batch(run: Run) -> str | None:
    value = number(run.config, "batch")
    if value is None:
        return None
    last = [number(line, "batch") for line in steps(run.record)][-1:]
    grown = (
        f", grown to {count(last[0])}" if last and last[0] is not None and last[0] > value else ""
    )
    return f"{count(value)} over all workers{grown}"


def _early(run: Run) -> str | None:
    why = (run.record.end or {}).get("why")
    return str(why) if why else None


def _memory(run: Run) -> str | None:
    """Return the largest memory use of a worker among the step lines; None if unknown."""
    lists = [line["memory"] for line in run.record.steps if isinstance(line.get("memory"), list)]
    used = [
        each
        for line in lists
        for each in line
        if isinstance(each, int) and 0 < each < _LARGEST_MEMORY
    ]
    return f"at most {nbytes(max(used))} of a worker" if used else None


def _machine(run: Run) -> str | None:
    device, cores = (_text(run, "machine", key) for key in ("device", "cores"))
    return f"{device or ''}, {cores} cores".strip(", ") if cores else device


def _data(run: Run) -> str | None:
    parts = [
        (part, number(_section(run, "data"), part)) for part in ("train", "validation", "test")
    ]
    return ", ".join(f"{count(size)} {part}" for part, size in parts if size) or None


def _score(part: str) -> Callable[[Run], str | None]:
    def fact(run: Run) -> str | None:
        lines = [line for line in run.record.evals if line.get("part") == part]
        if not lines or (accuracy := number(lines[-1], "accuracy")) is None:
            return None
        top5 = number(lines[-1], "top5")
        of = f" of {count(size)}" if (size := number(lines[-1], "count")) else ""
        return f"{percent(accuracy, 2)}{of}" + (
            f", top 5 {percent(top5, 2)}" if top5 is not None else ""
        )

    return fact


def _model(run: Run) -> str | None:
    parameters, size = number(run.record.start, "parameters"), number(run.record.start, "bytes")
    if parameters is None:
        return None
    return f"{count(parameters)} parameters" + (
        f", {nbytes(size)} of gradients a step" if size else ""
    )


def _arithmetic(run: Run) -> str | None:
    flop, speed = number(run.record.start, "flop_per_sample"), glance(run.record).images_per_second
    return (
        f"{flop * speed / 1e9:,.3g} GFLOP/s ({flop / 1e6:,.3g} MFLOP a sample)"
        if flop and speed
        else None
    )


def _precision(run: Run) -> str | None:
    """Return the precision of the run; runs of older versions have it only in their config."""
    name = run.record.start.get("precision") or run.config.get("precision")
    why = run.record.start.get("precision_why")
    return f"{name} (auto: {why})" if name and why else str(name) if name else None


_ROWS: tuple[tuple[str, Callable[[Run], str | None]], ...] = (
    ("Started", _started),
    ("Took", _took),
    ("Ended early", _early),
    ("Test accuracy", _score("test")),
    ("Last validation", _score("validation")),
    ("Workers", _workers),
    ("Batch", _batch),
    ("Samples", _data),
    ("Model", _model),
    ("Precision", _precision),
    ("Arithmetic", _arithmetic),
    ("Memory", _memory),
    ("Machine", _machine),
    ("System", lambda run: _text(run, "machine", "system")),
    ("Python", lambda run: _text(run, "machine", "python")),
    (
        "allstep",
        lambda run: str(run.record.start["version"]) if run.record.start.get("version") else None,
    ),
)
