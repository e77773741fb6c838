"""`allstep doctor`: what this machine has, what allstep will use of it, and what is wrong, before a
run finds out.

    facts (machine, programs, packages, torch in a process of its own)  --. World.detect()
    --+-- checks --> findings --> a table or JSON a trial run of two ranks
    --| with -H: a probe on every host, and a connection between each pair  --'

`examine` puts it together and returns a `Report`; in a world of several ranks rank 0 does, and the
others `follow`. Nothing here raises for what it finds wrong. A finding is a problem (a run would
fail), a warning (it would be slow or fragile) or a note, with one line of what to do.
"""

from allstep.doctor.finding import Finding, Severity
from allstep.doctor.report import Asked, Report, examine, follow

__all__ = ["Asked", "Finding", "Report", "Severity", "examine", "follow"]
