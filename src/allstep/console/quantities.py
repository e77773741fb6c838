"""Numbers with units, formatted for messages and tables."""

_MINUTE, _HOUR, _DAY = 60, 3600, 86400
# Two neighboring units each: seconds and name of the larger, then of the smaller.
_UNITS = ((_DAY, "d", _HOUR, "h"), (_HOUR, "h", _MINUTE, "min"), (_MINUTE, "min", 1, "s"))


def count(value: float) -> str:
    """Return a count such as 1,234; below 100, fractions keep three significant digits."""
    return f"{value:,.0f}" if abs(value) >= 100 or value == int(value) else f"{value:.3g}"


def percent(share: float, digits: int = 1) -> str:
    """Return a share of 1 as percent: 0.973 as 97.3%."""
    return f"{100 * share:.{digits}f}%"


def figure(value: float) -> str:
    """Return a number with four significant digits, three beyond 1e6 and below 1e-4."""
    if value == 0 or 1e-4 <= abs(value) < 1e6:
        return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
    return f"{value:.3g}"


def seconds(value: float) -> str:
    """Return a duration in seconds as 0.55 s, 12 s, 1 min 15 s, 2 h 5 min or 3 d 4 h."""
    if value < 10:
        return f"{value:.2g} s"
    whole = round(value)
    if whole < _MINUTE:
        return f"{whole} s"
    for large, first, small, second in _UNITS:
        if whole >= large:
            rest = whole % large // small
            return f"{whole // large} {first}" + (f" {rest} {second}" if rest else "")
    return f"{whole} s"


def about(value: float) -> str:
    """Return an estimated duration in seconds as 0.5 s, 45 s, 12 min, 3 h 20 min or 2.5 days."""
    if value < 90:
        return f"{value:.2g} s" if value < 10 else f"{value:.0f} s"
    minutes = round(value / _MINUTE)
    if minutes < 90:
        return f"{minutes} min"
    hours, rest = divmod(minutes, 60)
    return f"{hours} h {rest:02} min" if hours < 48 else f"{hours / 24:.1f} days"


def nbytes(value: float) -> str:
    """Return a number of bytes with three digits: 54.8 kB, 1.2 MB, 1,230 GB."""
    for limit, unit in ((1e9, "GB"), (1e6, "MB"), (1e3, "kB")):
        # A value that would round to 1,000 of a unit is 1 of the next.
        if value >= 0.9995 * limit:
            scaled = value / limit
            return f"{scaled:,.0f} {unit}" if scaled >= 999.5 else f"{scaled:.3g} {unit}"
    return f"{value:.0f} bytes"


def milliseconds(value: float) -> str:
    """Return seconds as 0.55 ms, 12.3 ms or 1,234 ms."""
    return f"{1e3 * value:.3g} ms" if value < 1 else f"{1e3 * value:,.0f} ms"


def plural(number: int, noun: str) -> str:
    """Return a number with its noun, plural unless it is 1: 1 worker, 2 workers."""
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def times(number: int) -> str:
    """Return how often, as text: once, twice, 3 times."""
    return {1: "once", 2: "twice"}.get(number, f"{number:,} times")
