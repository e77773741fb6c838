"""What `allstep plan --published` prints: Markdown, so that a page can have the same text."""

import json
from collections.abc import Sequence

from allstep.console.markdown_table import table
from allstep.plan.levels import LEVELS
from allstep.plan.published_table import (
    GUESS,
    HEAD,
    SUMMARY_HEAD,
    Point,
    expectations,
    rows_of,
    summary,
    summary_rows,
)


def as_text(points: Sequence[Point]) -> str:
    """Return the table of all points and that of the errors, with the meaning of the columns."""
    parts = [
        "\n".join(expectations()),
        "Errors are predicted / published - 1; eff. is the efficiency against one worker; fit: the"
        f"\nprediction was made from this point; {GUESS}: the guess that the efficiency of the"
        "\nsmallest run on several hosts stays.",
        table(HEAD, rows_of(points)),
        table(SUMMARY_HEAD, summary_rows(points)),
    ]
    return "\n\n".join(parts) + "\n"


def as_json(points: Sequence[Point]) -> str:
    """Return the figures as JSON."""
    found = {
        "points": [
            {
                "series": each.run.name,
                "source": each.run.source,
                "hosts": each.hosts,
                "workers": each.workers,
                "samples_per_second": each.published,
                "efficiency": each.efficiency,
                "errors": {_key(kind): error for kind, error in each.errors.items()},
                "is_fit": each.is_fit,
            }
            for each in points
        ],
        "summary": [vars(each) for each in summary(points)],
    }
    return json.dumps(found, indent=2) + "\n"


def _key(kind: int | str) -> str:
    return f"level {kind}" if kind in LEVELS else str(kind)
