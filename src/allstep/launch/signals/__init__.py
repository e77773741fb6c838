"""Signals to launcher and agents.

```
caught     a socket that receives the numbers of signals, for a loop
witness    whether a signal reached the workers of a host without the agent
by_host    whether agents on all hosts or on some have received a signal; pure
```

Imports: nothing else in `launch`. Start with `witness`.
"""

from allstep.launch.signals.caught import caught_signals, heeded

__all__ = ["caught_signals", "heeded"]
