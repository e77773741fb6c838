"""The roster: which workers are in an elastic world, generation by generation.

Events in (`roster_events`), actions out (`actions`). This package uses no clock, socket or process:
times are arguments, in seconds since the start of the run, and the launcher carries actions out.

```
              num_workers on standby            a member is lost, or leaves unasked
    STARTING ------------------------> RUNNING ------------------------------------> ENDED
                                       |  ^  ^                                       |  ^
      the first member leaves after a  |  |  |  all living members are ready, and    |  |
      notified change                  v  |  |  enough: Publish                      |  |
                                    CHANGING +---------------------------------------+  |
                                       |                                                |
                                       +-- a member is lost, or does not leave in time -+

    any of these:  a member exits with 0                                    -> FINISHING -> OVER
    any:  error of the program, no state left, timeout, signal, exit code 75 -> STOPPING -> OVER
```

Fencing: a worker is left out of a plan only when it can no longer act. It has exited, its host is
lost (its agent has killed it by then), or it is ready, which means that it only waits. A member
that does not leave an ended generation within 2 s + the time of its last step is killed, and the
next plan waits for its exit.

==========  ======================================================================================
stage       longest wait
==========  ======================================================================================
STARTING    `elastic_timeout` since the start, at least 600 s if enough workers were started; ends
            at once if slots are given up and the others are too few
RUNNING     none: the world works
CHANGING    the grace time of each member since the first one has left, then ENDED; also
            `join_timeout` for workers that were announced early
ENDED       `elastic_timeout` since the end; then a ready member saves, and the run stops
FINISHING   none: members run to their ends; `elastic_timeout` once one of them was lost
STOPPING    the grace time, then 10 s after SIGKILL
==========  ======================================================================================
"""

from allstep.launch.roster import on_event, over_time
from allstep.launch.roster.actions import Action, Plan
from allstep.launch.roster.elastic_policy import Policy
from allstep.launch.roster.elastic_state import ElasticState, Stage
from allstep.launch.roster.roster_events import Event, arrival_order


class Roster:
    """The decisions of one elastic run, from its first list of hosts to its exit code."""

    def __init__(self, policy: Policy) -> None:
        self._state = ElasticState(policy)
        self._now = 0.0
        self._new_events: list[Event] = []

    def take(self, event: Event) -> None:
        """Record an event for the next `decide`."""
        self._new_events.append(event)

    def decide(self, now: float) -> list[Action]:
        """Apply the events since the last call, and return what to do now."""
        self._now = now
        news, self._new_events = sorted(self._new_events, key=arrival_order), []
        if self.is_over:
            return []
        for event in news:
            on_event.apply(self._state, event)
        over_time.act(self._state, now)
        return self._state.take_actions()

    @property
    def deadline(self) -> float | None:
        """Return the time at which `decide` has something to do without an event; None: never."""
        if self.is_over:
            return None
        times = (at for at in over_time.timers(self._state, self._now) if at > self._now)
        earliest = min(times, default=float("inf"))
        return earliest if earliest < float("inf") else None

    @property
    def plan(self) -> Plan | None:
        """Return the plan of the current generation; None before the first."""
        return self._state.plan

    @property
    def stage(self) -> Stage:
        """Return the stage of the run."""
        return self._state.stage

    @property
    def reason(self) -> str:
        """Return why the current generation has ended, as far as it is known."""
        return self._state.reason

    @property
    def is_over(self) -> bool:
        """Return whether the run has ended."""
        return self._state.stage is Stage.OVER
