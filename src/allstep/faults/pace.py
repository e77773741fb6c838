"""The pace of a slow rank: how long it sleeps so that its steps take a factor longer.

A step's own time is what the rank computes itself, without waiting for others:

```
        began            reduce begins      update begins    step ends
          |---- compute ------|---- wait ---------|--- update ---|
own time:      this one                             the last one
```

The sleep comes at the end of the compute part: (factor - 1) x own time. A busy machine wakes a
process late; the next sleep is shorter by what the last one was too long.
"""

from time import monotonic, sleep


class Pace:
    """The times of the current step, and the update of the last one, in seconds."""

    def __init__(self) -> None:
        self._began: float | None = None
        self._update_began: float | None = None
        self._update = 0.0
        self._overslept = 0.0

    def begin(self) -> None:
        """Record the start of the compute part."""
        self._began = monotonic()

    def sleep(self, factor: float) -> None:
        """Sleep at the end of the compute part; not at all if its start is unknown."""
        if self._began is None:
            return
        began = monotonic()
        due = (factor - 1) * (began - self._began + self._update) - self._overslept
        if due > 0:
            sleep(due)
        self._overslept = monotonic() - began - due

    def update_begins(self) -> None:
        """Record the start of the update."""
        self._update_began = monotonic()

    def end(self) -> None:
        """Record the end of the step; the next one begins, unless `begin` follows."""
        self._began = monotonic()
        if self._update_began is not None:
            self._update = self._began - self._update_began
            self._update_began = None
