"""Figures as people read them."""

_MINUTE, _HOUR, _DAY = 60, 3600, 86400


def count(value: float) -> str:
    """1,234; small ones keep a decimal."""
    return f"{value:,.0f}" if abs(value) >= 100 or value == int(value) else f"{value:.3g}"


def percent(share: float, digits: int = 1) -> str:
    """0.973 as 97.3%."""
    return f"{100 * share:.{digits}f}%"


def figure(value: float) -> str:
    """Four significant digits, no more zeros than needed."""
    if value == 0 or 1e-4 <= abs(value) < 1e6:
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return f"{value:.3g}"


def seconds(value: float) -> str:
    """0.55 s, 12 s, 1 min 15 s, 2 h 5 min, 3 d 4 h."""
    if value < 10:
        return f"{value:.2g} s"
    whole = round(value)
    if whole < _MINUTE:
        return f"{whole} s"
    for large, small, names in (
        (_DAY, _HOUR, "d h"),
        (_HOUR, _MINUTE, "h min"),
        (_MINUTE, 1, "min s"),
    ):
        if whole >= large:
            first, second = names.split()
            rest = whole % large // small
            return f"{whole // large} {first}" + (f" {rest} {second}" if rest else "")
    return f"{whole} s"


def about(value: float) -> str:
    """A time that is estimated: 0.5 s, 45 s, 12 min, 3 h 20 min, 2.5 days."""
    if value < 90:
        return f"{value:.2g} s" if value < 10 else f"{value:.0f} s"
    minutes = round(value / _MINUTE)
    if minutes < 90:
        return f"{minutes} min"
    hours, rest = divmod(minutes, 60)
    return f"{hours} h {rest:02} min" if hours < 48 else f"{hours / 24:.1f} days"


def nbytes(value: float) -> str:
    """Bytes with three digits: 54.8 kB, 1.2 MB, 1,230 GB."""
    for limit, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        # What would be rounded to 1,000 of a unit is 1 of the next.
        if value >= 0.9995 * limit:
            scaled = value / limit
            return f"{scaled:,.0f} {unit}" if scaled >= 999.5 else f"{scaled:.3g} {unit}"
    return f"{value:.0f} bytes"


def milliseconds(value: float) -> str:
    """Seconds as 0.55 ms, 12.3 ms, 1,234 ms."""
    return f"{1e3 * value:.3g} ms" if value < 1 else f"{1e3 * value:,.0f} ms"


def plural(number: int, noun: str) -> str:
    """1 worker, 2 workers."""
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def times(number: int) -> str:
    """once, twice, 3 times."""
    return {1: "once", 2: "twice"}.get(number, f"{number:,} times")
