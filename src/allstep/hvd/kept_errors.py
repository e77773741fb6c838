"""Errors of collectives that a framework replaces by its own.

TensorFlow (a graph) and JAX (a compiled step) call us back, and raise an error of their own with
the text of ours: the class is lost, and with it what an elastic training decides by. So a bridge
keeps each error before it raises it, and `original` finds it again by its text.
"""


class _Kept:
    """The last error inside a framework."""

    error: Exception | None = None


_kept = _Kept()


def keep(error: Exception) -> None:
    """Keep an error that a framework will replace."""
    _kept.error = error


def original(error: BaseException) -> Exception | None:
    """Return the error of ours that made a framework raise `error`; None if there is none."""
    kept = _kept.error
    if kept is None or kept is error:
        return None
    return kept if str(kept) and str(kept) in str(error) else None


def forget() -> None:
    """Forget the last error: it has been handled."""
    _kept.error = None
