"""Errors of collectives that a framework replaces by its own.

TensorFlow (a graph) and JAX (a compiled step) call us back, and raise an error of their own with
the text of ours: the class is lost, and with it what an elastic training decides by. So a bridge
keeps each error before it raises it, and `original` finds it again by its text.
"""


class _Kept:
    """The last error inside a framework. text: in the message of the error that replaces it."""

    text = ""
    error: Exception | None = None


_kept = _Kept()


def keep(error: Exception, text: str) -> None:
    """Keep an error that a framework will replace by one with this text in its message."""
    _kept.text, _kept.error = text, error


def original(error: BaseException) -> Exception | None:
    """Return the error that `error` of a framework stands for; None if it is none of ours."""
    is_found = _kept.text and _kept.error is not error and _kept.text in str(error)
    return _kept.error if is_found else None


def forget() -> None:
    """Forget the last error: it has been handled."""
    _kept.text, _kept.error = "", None
