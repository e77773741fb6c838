"""The launcher's view: which faults the ranks have recorded in its store (`reports`)."""

import json
from collections.abc import Container, Mapping

from allstep import wire
from allstep.faults.missing import name_missing
from allstep.faults.reports import Occurred, from_json
from allstep.faults.spec import VARIABLE, parse_all
from allstep.wire import keys


def occurred(store: wire.Server) -> list[Occurred]:
    """Return the faults that have occurred so far, in this order."""
    # A key with more digits has the greater number.
    known = sorted(store.keys(keys.fault_record("")), key=lambda key: (len(key), key))
    return [found for key in known if (found := from_json(store.peek(key))) is not None]


def last_of(store: wire.Server, ranks: Container[int]) -> str:
    """Return the last fault of these ranks, as the user wrote it; "" without one."""
    return next((each.fault for each in reversed(occurred(store)) if each.rank in ranks), "")


def missing(store: wire.Server, env: Mapping[str, str]) -> list[str]:
    """Return a line for each fault of the environment, or of a worker, that did not occur."""
    given = [*map(str, parse_all(env.get(VARIABLE, ""))), *_given_by_workers(store)]
    return name_missing(given, {each.fault for each in occurred(store)})


def _given_by_workers(store: wire.Server) -> list[str]:
    try:
        found = json.loads(store.peek(keys.FAULTS_GIVEN) or b"[]")
    # RecursionError: thousands of opening brackets.
    except (ValueError, RecursionError):
        return []
    return [each for each in found if isinstance(each, str)] if isinstance(found, list) else []
