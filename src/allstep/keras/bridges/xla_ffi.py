"""XLA's foreign function interface, from Python alone: a handler made with ctypes.

The structures are those of `xla/ffi/api/c_api.h`, which jaxlib ships; API version 0.3. XLA calls
the handler once when it is registered, with an extension that asks for the version of the API, and
then in every execution::

    frame -> args -> buffers (address, shape, dtype)     the arguments
          -> rets -> buffers                             the results, where aliased the same memory

XLA promises to accept old versions for at least 12 months. `is_supported` compares the version with
that of the installed library.
"""

import ctypes
import re
from collections.abc import Callable, Sequence
from ctypes import POINTER, c_char_p, c_int, c_int64, c_size_t, c_uint32, c_void_p, cast
from functools import cache
from pathlib import Path
from typing import Any

VERSION = (0, 3)
_METADATA = 1
_EXECUTE = 3
_FAILED_PRECONDITION = 9


class _Extension(ctypes.Structure):
    _fields_ = (("size", c_size_t), ("type", c_int), ("next", c_void_p))


class _Version(ctypes.Structure):
    _fields_ = (("size", c_size_t), ("extension", c_void_p), ("major", c_int), ("minor", c_int))


class _Metadata(ctypes.Structure):
    _fields_ = (
        ("size", c_size_t),
        ("version", _Version),
        ("traits", c_uint32),
        ("state_type", c_int64),
    )


class _MetadataExtension(ctypes.Structure):
    _fields_ = (("base", _Extension), ("metadata", POINTER(_Metadata)))


class _Buffer(ctypes.Structure):
    _fields_ = (
        ("size", c_size_t),
        ("extension", c_void_p),
        ("dtype", c_int),
        ("data", c_void_p),
        ("rank", c_int64),
        ("dims", POINTER(c_int64)),
    )


class _Buffers(ctypes.Structure):
    """The arguments or the results of a call."""

    _fields_ = (
        ("size", c_size_t),
        ("extension", c_void_p),
        ("count", c_int64),
        ("types", POINTER(c_int)),
        ("buffers", POINTER(POINTER(_Buffer))),
    )


class _Attributes(ctypes.Structure):
    _fields_ = (
        ("size", c_size_t),
        ("extension", c_void_p),
        ("count", c_int64),
        ("types", c_void_p),
        ("names", c_void_p),
        ("values", c_void_p),
    )


class _ErrorArguments(ctypes.Structure):
    _fields_ = (
        ("size", c_size_t),
        ("extension", c_void_p),
        ("message", c_char_p),
        ("code", c_int),
    )


_CreateError = ctypes.CFUNCTYPE(c_void_p, POINTER(_ErrorArguments))


class _Api(ctypes.Structure):
    _fields_ = (
        ("size", c_size_t),
        ("extension", c_void_p),
        ("version", _Version),
        ("internal", c_void_p),
        ("create_error", _CreateError),
    )


class _Frame(ctypes.Structure):
    _fields_ = (
        ("size", c_size_t),
        ("extension", POINTER(_Extension)),
        ("api", POINTER(_Api)),
        ("context", c_void_p),
        ("stage", c_int),
        ("args", _Buffers),
        ("rets", _Buffers),
        ("attributes", _Attributes),
        ("future", c_void_p),
    )


_Handler = ctypes.CFUNCTYPE(c_void_p, POINTER(_Frame))
# XLA keeps the addresses of handlers for as long as the process lives.
_handlers: list[Any] = []

Call = Callable[[Sequence[int], Sequence[int]], None]


@cache
def is_supported() -> bool:
    """Return whether jaxlib has the interface that was read here."""
    import jax

    try:
        text = (Path(jax.ffi.include_dir()) / "xla/ffi/api/c_api.h").read_text()
    except (AttributeError, OSError):
        return False
    found = re.findall(r"#define XLA_FFI_API_(?:MAJOR|MINOR) (\d+)", text)
    return tuple(map(int, found)) == VERSION


def make_handler(call: Call) -> Any:
    """Return a PyCapsule for `jax.ffi.register_ffi_target`.

    `call`: gets the addresses of the arguments and of the results; what it raises is an error of
    the execution, with its text.
    """
    import jax

    def handle(pointer: Any) -> Any:
        frame = pointer.contents
        if frame.extension and frame.extension.contents.type == _METADATA:
            _report_version(frame.extension)
            return None
        if frame.stage != _EXECUTE:
            return None
        try:
            call(_addresses(frame.args), _addresses(frame.rets))
        except BaseException as error:
            return _error(frame, f"{type(error).__name__}: {error}")
        return None

    handler = _Handler(handle)
    _handlers.append(handler)
    make_capsule: Any = jax.ffi.pycapsule
    return make_capsule(cast(handler, c_void_p).value)


def _addresses(buffers: Any) -> list[int]:
    """Return where the data of each buffer is; 0 for an empty one."""
    pointers = buffers.buffers
    return [pointers[number].contents.data or 0 for number in range(buffers.count)]


def _report_version(extension: Any) -> None:
    metadata = cast(extension, POINTER(_MetadataExtension)).contents.metadata.contents
    metadata.version.major, metadata.version.minor = VERSION
    metadata.traits = 0


def _error(frame: Any, text: str) -> Any:
    """Return an error for XLA, which frees it."""
    arguments = _ErrorArguments(
        ctypes.sizeof(_ErrorArguments), None, text.encode(), _FAILED_PRECONDITION
    )
    return frame.api.contents.create_error(ctypes.byref(arguments))
