"""Decides which workers are in the world of an elastic run; pure, without clock, socket or process.

```
roster                    `Roster`: events in, actions out; the stages of a run
roster_events, actions    what it takes and returns; `Plan`
elastic_policy            the options of an elastic run
elastic_state             the state, and changes that several rules need
on_event                  what each event changes
continuing                the variant that continues without lost workers and replaces none
over_time                 forming, announcing, starting, stopping: what state and time require
form_plan                 members, ranks and source of the next world: pure functions
slots                     the slots of all hosts, with back-off, give-up and blacklist
living_workers            the living workers, each in one phase
losses, conclusions       failures of a generation, errors of the program; how the run ends
stopping                  from the decision to end the run until all workers have ended
```

`launch.elastic` carries its actions out. Imports: `cause`, `run_events` and `run_state`. Start with
`roster`.
"""

from allstep.launch.roster.elastic_policy import MAX_FAILURES, Policy
from allstep.launch.roster.roster import Roster

__all__ = ["MAX_FAILURES", "Policy", "Roster"]
