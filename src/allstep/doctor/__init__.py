"""`allstep doctor`: report what a machine has, what allstep will use, and what is wrong with it.

    facts (machine, programs, packages, torch in a separate process)   --.
    World.detect()                                                     --+-- checks --> findings
    a trial run of two ranks                                           --|     --> table or JSON
    with -H: a probe on every host, and a connection between each pair --'

`examine` runs all of this and returns a `Report`. In a world of several ranks, rank 0 calls it and
the others call `follow`. Problems are returned as findings, never raised. A finding is a problem (a
run would fail), a warning (it would be slow or fragile) or a note, with one line about what to do.
"""

from allstep.doctor.finding import Finding, Severity
from allstep.doctor.report import Asked, Report, examine, follow

__all__ = ["Asked", "Finding", "Report", "Severity", "examine", "follow"]
