"""Progress lines within a long round, without a common step: from figures in shared memory.

```
each party   after a step     its row: seconds of the phases, memory, samples claimed, tally
rank 0       every log_every  reads all rows as they are, and reports what is new since its last
             of its steps     line
```

No party waits. A row is written number by number and may be read in between, so that a line may be
off by one step of a party; the next line corrects it, and the event at the end of the round has the
exact rest (`progress_event.Reported`).
"""

import torch

from allstep.kvstore.memory.parties import Parties
from allstep.train.run.opening_event import memory_in_use
from allstep.train.run.progress_event import OwnWork, event_of
from allstep.train.run.rounds.round import Surroundings
from allstep.train.step.step import PHASES
from allstep.train.task.task import Tally

_NUMBERS = 64
# Where the numbers of a row are: seconds of the phases first, then these, then the tally.
_WORK, _MEMORY, _TALLY = len(PHASES), len(PHASES) + 3, len(PHASES) + 4
# Samples claimed, bytes sent and received.
_CLAIMED, _SENT = _WORK, _WORK + 1


class LiveLines:
    """The rows of all parties of this host, and the lines of rank 0. Made by all together."""

    def __init__(self, around: Surroundings) -> None:
        self._around, self._world = around, around.job.world
        self._parties = Parties("the figures of sync")
        count = self._world.size * _NUMBERS
        memory = self._parties.allocate(count * 8)
        rows = torch.frombuffer(memory, dtype=torch.float64, count=count)
        self._rows = rows.view(self._world.size, _NUMBERS)
        self._steps = 0
        self._own = OwnWork(around.job.trainer.optimizer.traffic)
        self._at_last = self._rows.clone()

    def start(self) -> None:
        """Begin a round; its tally and its claims count from zero.

        The phases count from the last event of all ranks, as those of the clock.
        """
        self._steps = 0
        self._own.restart()
        self._rows[self._world.rank].zero_()
        self._note_seconds()
        self._at_last.zero_()

    def note(self, tally: Tally, claimed: int) -> None:
        """Write the row of this party after a step; rank 0 reports progress if that is due."""
        row, sums = self._rows[self._world.rank], tally.sums()
        self._note_seconds()
        row[_CLAIMED] = claimed
        row[_SENT:_MEMORY] = torch.tensor(self._own.traffic, dtype=torch.float64)
        row[_TALLY : _TALLY + len(sums)] = torch.tensor(sums, dtype=torch.float64)
        self._steps += 1
        if self._steps % self._around.job.config.log_every == 0:
            row[_MEMORY] = memory_in_use()
            if self._world.rank == 0:
                self._report(tally)

    def _note_seconds(self) -> None:
        seconds = list(self._around.clock.seconds.values())
        row = self._rows[self._world.rank]
        row[:_WORK] = torch.tensor(seconds, dtype=torch.float64)

    def _report(self, like: Tally) -> None:
        """Send the callbacks what all parties did since the last line."""
        around, now = self._around, self._rows.clone()
        new = (now - self._at_last).clamp_(min=0)
        reported = around.reported
        tally = like.with_sums(new[:, _TALLY : _TALLY + len(like.sums())].sum(0).tolist())
        times = new[:, :_MEMORY].T.tolist()
        seconds = max(0.0, sum(around.clock.seconds.values()) - reported.seconds)
        if not tally.count:
            return
        position = around.job.progress.samples + int(now[:, _CLAIMED].sum())
        memory = now[:, _MEMORY].tolist()
        around.callbacks.progress(event_of(around.job, position, tally, times, memory, seconds))
        reported.add(tally, times, seconds)
        self._at_last = now

    def close(self) -> None:
        """Release the rows."""
        self._parties.close()
