"""TensorFlow's errors for failures of a collective, each raised from the original.

| what failed | in eager mode | in tf.function and in a Session |
|---|---|---|
| ranks disagree; not initialized | FailedPreconditionError | UnknownError |
| a wrong argument | InvalidArgumentError | InvalidArgumentError |
| a rank was late | AbortedError | UnknownError |
| a rank was lost, the engine stopped | UnknownError | UnknownError |

A graph passes only the text of an error on, so the original is kept (`hvd.kept_errors`). What an
elastic training survives is a HorovodInternalError too.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import tensorflow as tf

from allstep.errors import CollectiveMismatch, CollectiveTimeout, CommError
from allstep.hvd import kept_errors
from allstep.hvd.exceptions import HorovodInternalError


class LostError(tf.errors.UnknownError, HorovodInternalError):  # type: ignore[misc]
    """A rank was lost, or the engine was shut down."""


class LateError(tf.errors.AbortedError, HorovodInternalError):  # type: ignore[misc]
    """A rank did not come to a collective in time."""


def as_of_contract(error: BaseException) -> Exception | None:
    """Return an error out of a graph with the type that it has in eager mode; None if not ours."""
    return kept_errors.original(error) if isinstance(error, tf.errors.OpError) else None


@contextmanager
def eager_errors() -> Iterator[None]:
    """Raise the errors of a collective as TensorFlow's."""
    try:
        yield
    except (HorovodInternalError, CommError, ValueError, TypeError) as error:
        if isinstance(error, tf.errors.OpError):
            raise
        raise _made_from(error) from error


@contextmanager
def graph_errors() -> Iterator[None]:
    """Keep the error of a collective inside a graph; wrong arguments are raised as ValueError."""
    try:
        yield
    except Exception as error:
        made = error if isinstance(error, tf.errors.OpError) else _made_from(error)
        kept_errors.keep(made, str(error))
        if _class_for(error) is tf.errors.InvalidArgumentError:
            raise error if isinstance(error, ValueError) else ValueError(str(error)) from error
        raise


def _made_from(error: Exception) -> Exception:
    """Return TensorFlow's error for one of ours."""
    made: Exception = _class_for(error)(None, None, str(error))
    made.__cause__ = error
    return made


def _class_for(error: Exception) -> Any:
    """Return TensorFlow's class for an error."""
    if not isinstance(error, (HorovodInternalError, CommError)):
        return tf.errors.InvalidArgumentError
    cause = error.__cause__ or error
    if isinstance(cause, CollectiveMismatch) or not isinstance(cause, CommError):
        return tf.errors.FailedPreconditionError
    if isinstance(cause, CollectiveTimeout):
        return LateError
    # A request that is refused before it is sent names its operation and no rank.
    is_refused = type(cause) is CommError and cause.op is not None and cause.rank is None
    return tf.errors.InvalidArgumentError if is_refused else LostError
