"""Conversations with several servers at once, of which some may be lost meanwhile.

Each conversation has a thread of its own: Gloo may never wake a thread that waits for the rest of a
message from a server that died (`pair`). Such a thread is abandoned with its server; the others
finish, so that requests and answers on their links still match.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from allstep.comm.health.helper_thread import begin_call, reuse
from allstep.errors import AllstepError
from allstep.kvstore.links.pair import Pair

T = TypeVar("T")

_LOOK_SECONDS = 0.05
# Seconds for which a thread may still return after its connection was shut.
_GRACE_SECONDS = 0.2


def talk(
    acts: Mapping[int, Callable[[], T]], pairs: Sequence[Pair], check: Callable[[], None]
) -> tuple[dict[int, T], dict[int, str]]:
    """Run all conversations; return the results, and why servers are lost, by server.

    check: called now and then; what it raises ends the wait.
    """
    calls = {server: begin_call(act) for server, act in acts.items()}
    found: dict[int, T] = {}
    lost: dict[int, str] = {}
    while calls:
        for server, (thread, call) in list(calls.items()):
            is_done = call.wait(_LOOK_SECONDS / len(calls))
            if not is_done and (why := pairs[server].ended()) is not None:
                lost[server] = why
                pairs[server].shut()
                is_done = call.wait(_GRACE_SECONDS)
                del calls[server]
                if is_done:
                    reuse(thread)
            elif is_done:
                del calls[server]
                reuse(thread)
                _note(server, call, pairs[server], found, lost)
        check()
    return found, lost


def _note(server: int, call: Any, pair: Pair, found: dict[int, T], lost: dict[int, str]) -> None:
    try:
        found[server] = call.result()
    except AllstepError:
        raise
    # Gloo raises RuntimeError, BadHeader is a ValueError.
    except (RuntimeError, ValueError) as error:
        lost[server] = pair.ended() or str(error).partition("\n")[0]
