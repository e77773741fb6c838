"""The curve of a data study in tables and sentences: laws, extrapolation and self-check."""

import math
from collections.abc import Sequence

from allstep.console.markdown_table import table
from allstep.study.data.learning_curve import SEPARATED, Check, Curve, Range
from allstep.study.data.power_law import Fitted
from allstep.study.data.verdict import SAFE

_MULTIPLES = (1, 2, 4, SAFE)


def curve_sections(
    curve: Curve | None, refused: str, checks: Sequence[Check], whole: int
) -> list[str]:
    """Return the sections about the curve; `refused` is why there is none."""
    if curve is None:
        return ["## Curve", f"No curve is fitted and nothing is predicted: {refused}."]
    return [
        "## Curve",
        "The fit e(n) = c + a n^-b, each size weighted by 1 / variance:",
        _laws(curve),
        _which(curve),
        "## With more data",
        "Predicted validation error in %, with its 90% band. Twice the data is a safe step; ten"
        " times is a guess within the band.",
        _extrapolated(curve, whole),
        *_check_section(checks),
    ]


def _laws(curve: Curve) -> str:
    named = [("with floor", curve.with_floor), ("without", curve.without_floor)]
    rows = [_law_row(name, each) for name, each in named]
    return table(["fit", "c (%)", "a", "b", "chi-squared"], rows)


def _law_row(name: str, each: Fitted) -> list[str]:
    law = each.law
    figures = [f"{100 * law.floor[0]:.2f}", f"{law.factor[0]:.3g}", f"{law.exponent[0]:.3f}"]
    return [name, *figures, f"{each.chi2[0]:.2f}"]


def _which(curve: Curve) -> str:
    """Return which laws count, and what is known about the floor."""
    floor = curve.floor
    if curve.is_separated:
        return (
            f"The points need the floor (chi-squared is {curve.gain:.1f} smaller with it): it is"
            f" between {floor.low:.2%} and {floor.high:.2%} (90%), and only that fit counts."
        )
    return (
        f"The points do not separate the two (chi-squared differs by {curve.gain:.1f}, at most"
        f" {SEPARATED}): predictions are midway between them, and the band covers both. The floor"
        f" is unknown, between {max(0.0, floor.low):.2%} and {floor.high:.2%} (90%)."
    )


def _extrapolated(curve: Curve, whole: int) -> str:
    laws = ["with floor"] if curve.is_separated else ["with floor", "without"]
    rows = []
    for multiple in _MULTIPLES:
        found = curve.predict(multiple * whole)
        each = [f"{100 * value:.2f}" for value in found.by_law]
        rows.append([f"{multiple} x", f"{multiple * whole:,}", *_with_band(found), *each])
    return table(["data", "samples", "error", "band", *laws], rows)


def _with_band(found: Range) -> list[str]:
    return [f"{100 * found.value:.2f}", f"{100 * found.low:.2f} to {100 * found.high:.2f}"]


def _check_section(checks: Sequence[Check]) -> list[str]:
    """Return predictions of the largest size from smaller ones, next to what was measured."""
    if not checks:
        return ["Self-check: too few sizes without the largest one to predict it from them."]
    measured = checks[0].measured
    rows = [
        [
            f"{check.up_to:,.0f}",
            *_with_band(check.predicted),
            "-" if math.isnan(check.off) else f"{check.off:+.1%}",
            "yes" if check.is_inside else "no",
        ]
        for check in checks
    ]
    return [
        "## Self-check",
        "The error of the largest size, predicted without it from the sizes up to a smaller one."
        f" Measured: {measured:.2%}.",
        table(["sizes up to", "predicted", "band", "off by", "measured in band"], rows),
    ]
