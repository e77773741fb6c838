"""Errors as MXNet's users expect them: every error is an `MXNetError`.

A wrong argument is also a ValueError; a failure between ranks is also a HorovodInternalError, with
the details as its cause.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from allstep.errors import UserError
from allstep.hvd.exceptions import HorovodInternalError
from allstep.mxnet.framework import mx

MXNetError = mx.base.MXNetError


# The framework has no types, so its classes are Any for mypy.
class InvalidArgument(MXNetError, ValueError):  # type: ignore[misc, valid-type]
    """A wrong argument; no request was sent."""


class CollectiveError(MXNetError, HorovodInternalError):  # type: ignore[misc, valid-type]
    """A collective failed: a lost peer, different requests of the ranks, or a shutdown."""


@contextmanager
def mxnets_errors() -> Iterator[None]:
    """Raise the errors of the block as MXNet's errors."""
    try:
        yield
    except MXNetError:
        raise
    except HorovodInternalError as error:
        raise CollectiveError(str(error)) from (error.__cause__ or error)
    except (ValueError, TypeError, UserError) as error:
        raise InvalidArgument(str(error)) from error
