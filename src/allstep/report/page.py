"""Writes one self-contained HTML file about runs; the page loads nothing else.

The template receives plain values (a `View` for each run, charts with coordinates, rows of tables)
and decides only how they look. jinja2 escapes every value. The page's Content-Security-Policy also
forbids it to load anything.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from allstep._version import __version__
from allstep.console import quantities as wording
from allstep.console.escape import escaped
from allstep.errors import ConfigError
from allstep.files.atomic import replace_file
from allstep.report import configs, curves
from allstep.report.charts import charts
from allstep.report.compare import compare, speed_up
from allstep.report.ending import Status, status
from allstep.report.facts import facts
from allstep.report.glance import Glance, glance
from allstep.report.heat import Heat, trust_heat
from allstep.report.judge import judge, one_change
from allstep.report.judgement import Judgement
from allstep.report.landscape import LandscapeView
from allstep.report.landscape import views as landscape_views
from allstep.report.run import Run, read_runs
from allstep.report.scores import COLUMNS, Scores, scores
from allstep.report.stragglers import COLUMNS as STRAGGLER_COLUMNS
from allstep.report.stragglers import Stragglers, stragglers
from allstep.report.sync import party_figures
from allstep.report.sync.party_figures import Parties, parties
from allstep.study.recorded.series import steps
from allstep.study.recorded.split import PHASES, Split, split

# workers whose time split is drawn; of more, the slowest and the fastest
_BARS = 16
# maximum classes of a matrix that is drawn
_MATRIX = 24
# maximum letters of names that are not rotated above the columns of the matrix
_SHORT = 3
_CONFUSIONS = 10
# maximum layers of trust ratios that are drawn with their names
_LAYERS = 24
# the page has this many colors
_MAX_RUNS = 8


@dataclass(frozen=True)
class View:
    """A run with all values that the template shows."""

    run: Run
    number: int
    status: Status
    glance: Glance
    speed_up: float | None
    judgements: Sequence[Judgement]
    scores: Scores | None
    split: Split | None
    shown_ranks: Sequence[int]
    trust: Heat | None
    stragglers: Stragglers | None
    parties: Parties | None
    landscape: LandscapeView | None


def write_report(
    folders: Sequence[Path], out: Path | None = None, now: float | None = None
) -> Path:
    """Write the page about the runs in `folders` and return its path.

    `out` is the file to write (default: `report.html` in the first folder). `now` is the time of
    the report in seconds since the epoch (default: the current time); it decides whether a run
    without an end is still going. Raise DataError for a folder without a run, ConfigError if the
    page cannot be written.
    """
    if not 1 <= len(folders) <= _MAX_RUNS:
        raise ConfigError(
            f"a report shows 1 to {_MAX_RUNS} runs, found {len(folders)}; give fewer run folders"
        )
    page = render(read_runs(list(folders)), time.time() if now is None else now)
    out = folders[0] / "report.html" if out is None else out
    try:
        replace_file(out, page.encode())
    except OSError as error:
        why = error.strerror or error
        raise ConfigError(
            f"{out}: cannot be written: {why}; give another file with --out"
        ) from error
    return out


def render(runs: Sequence[Run], now: float) -> str:
    """Return the page about `runs` as text."""
    landscapes = landscape_views(runs)
    views = [
        _view(run, number, runs[0], now, landscapes[number]) for number, run in enumerate(runs)
    ]
    rows = configs.rows([run.config for run in runs])
    drawn = [chart for chart in map(curves.draw, charts(runs)) if chart is not None]
    return (
        _environment()
        .get_template("page.html")
        .render(
            title=" against ".join(run.name for run in runs)
            if len(runs) < 3
            else f"{len(runs)} runs",
            version=__version__,
            made=time.strftime("%Y-%m-%d %H:%M", time.localtime(now)),
            views=views,
            comparisons=compare(list(runs)),
            charts=drawn,
            box=curves,
            phases=PHASES,
            score_columns=COLUMNS,
            straggler_columns=STRAGGLER_COLUMNS,
            party_columns=party_figures.COLUMNS,
            party_box=party_figures,
            facts=facts(runs),
            config=rows,
            changed=[row for row in rows if row.differs],
            matrix_limit=_MATRIX,
            short_name=_SHORT,
            num_confusions=_CONFUSIONS,
            layer_limit=_LAYERS,
        )
    )


def _view(run: Run, number: int, first: Run, now: float, landscape: LandscapeView | None) -> View:
    found, shown = split(run.record), glance(run.record)
    return View(
        run=run,
        number=number,
        status=status(run.record, now),
        glance=shown,
        speed_up=speed_up(glance(first.record), shown) if number else None,
        judgements=[*judge(run.record, now), *one_change(run)],
        scores=scores(run.record),
        split=found,
        shown_ranks=_shown_ranks(found) if found else (),
        trust=trust_heat(steps(run.record)),
        stragglers=stragglers(run.record),
        parties=parties(run.record),
        landscape=landscape,
    )


def _shown_ranks(found: Split) -> list[int]:
    """Return all workers, or, if many, those with the most and those with the least own work."""
    ranks = list(range(len(found.ranks)))
    if len(ranks) <= _BARS:
        return ranks
    by_work = sorted(ranks, key=found.own, reverse=True)
    return sorted(by_work[: _BARS * 3 // 4] + by_work[-_BARS // 4 :])


def _code(text: str) -> Markup:
    """Return `text` as HTML with the parts between backticks as code."""
    parts = enumerate(map(_shown, text.split("`")))
    return Markup("").join(
        Markup("<code>{}</code>" if i % 2 else "{}").format(part) for i, part in parts
    )


def _shown(value: object) -> object:
    """Escape control characters, bidi overrides and lone surrogates in a text."""
    return escaped(value, keep="\n\t") if type(value) is str else value


def _environment() -> Environment:
    environment = Environment(
        loader=PackageLoader("allstep.report"),
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
        finalize=_shown,
    )
    names = ("count", "percent", "figure", "seconds", "nbytes", "plural", "times")
    environment.filters |= {name: getattr(wording, name) for name in names} | {"code": _code}
    return environment
