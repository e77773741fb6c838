"""Threads for collectives in the graph of a tf.compat.v1.Session.

A Session runs independent nodes at the same time, in an order that changes from run to run, on
its inter-op threads: by default as many as cores. A collective blocks its thread until the other
ranks have come to it. If all threads of two ranks block in different collectives, all wait for
ever. So each Session gets a pool with a thread for every collective of its graph, and with at
least NUM_THREADS; `tf.function` needs none of this, because it runs collectives one by one.

TensorFlow offers no place to set this after its first operation except the config of a Session, so
`Session.__init__` is replaced by a function that adds it: at `hvd.init()`, for Keras 2 when its
front-end is imported, or with the first collective in a graph if another one was initialized. A
config of the user keeps all its other values; a larger number of threads of the user stays.
"""

import functools
import warnings
from typing import Any

from tensorflow.core.protobuf import config_pb2
from tensorflow.python.client import session as session_module

NUM_THREADS = 128
"""The number of inter-op threads of a Session, at least. Threads that wait cost no time."""

_OP = "EagerPyFunc"


def provide_threads() -> None:
    """Give all Sessions that are made from now on enough threads; a second call is a no-op."""
    base: Any = getattr(session_module, "BaseSession", None)
    init = getattr(base, "__init__", None)
    if init is None or not hasattr(base, "list_devices"):
        warnings.warn(
            "this version of TensorFlow has no known Session class: set"
            f" TF_NUM_INTEROP_THREADS={NUM_THREADS} if a Session runs many collectives at once",
            stacklevel=2,
        )
        return
    if not hasattr(init, "_allstep"):
        base.__init__ = _with_threads(init)


def _with_threads(init: Any) -> Any:
    @functools.wraps(init)
    def wrapper(self: Any, target: Any = "", graph: Any = None, config: Any = None) -> None:
        # A remote server has threads of its own.
        init(self, target, graph, config if target else _config(config, graph))

    wrapper._allstep = True  # type: ignore[attr-defined]
    return wrapper


def _config(given: Any, graph: Any) -> Any:
    """Return a config with enough inter-op threads; the given one is not changed."""
    config = config_pb2.ConfigProto()
    if given is not None:
        config.CopyFrom(given)
    if len(config.session_inter_op_thread_pool):
        # The user has chosen pools by name; a pool of this Session alone would replace them.
        return config
    needed = max(NUM_THREADS, 2 * _num_collectives(graph))
    if config.inter_op_parallelism_threads < needed:
        config.inter_op_parallelism_threads = needed
    config.use_per_session_threads = True
    return config


def _num_collectives(graph: Any) -> int:
    from tensorflow.python.framework import ops

    nodes = (ops.get_default_graph() if graph is None else graph).get_operations()
    return sum(node.type == _OP for node in nodes)
