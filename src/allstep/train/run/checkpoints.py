"""The checkpoints of a run under way: asked for here, written by rank 0's `Saver`, told to the
callbacks; the last one is a must.

```
_Run ── save ──> Checkpoints ──> Saver (a thread of rank 0) ──> checkpoints/NNN
                      ^── tell ──────┘ news
     ── finish ─> is the run, as it is now, on the disk?  yes: it may end (0) or pause (75)
                                                          no:  every rank ends with 1, and the last
                                                          line says where a resume begins
```

A checkpoint that cannot be written on the way costs nothing but itself. The last one is different:
a run that says "ended" or "saved" without it would lose what was trained. So it is tried again for
some seconds, and all ranks hear how that went.
"""

import time
from collections import deque
from functools import partial

from allstep.comm.group import agree
from allstep.errors import AllstepError
from allstep.train.checkpoint import files as checkpoint
from allstep.train.checkpoint.names import name_of
from allstep.train.checkpoint.writer_thread import Saved, Saver, first_not_finite
from allstep.train.health.checkpoint_state import check_resumed
from allstep.train.health.stop import Stopping
from allstep.train.run.capture import capture
from allstep.train.run.setup import Job
from allstep.train.watch.callback import Callback


class Checkpoints:
    """Of `job`.

    Ranks other than 0 write nothing, for all have the same; they hear in `finish` how it went.
    """

    def __init__(self, job: Job, callback: Callback, stopping: Stopping) -> None:
        self.job, self.callback, self.stopping = job, callback, stopping
        self.folder = job.out / "checkpoints"
        self._news: deque[Saved] = deque()
        self._last = time.monotonic()
        is_there = (
            job.standing.owes is None and (self.folder / name_of(job.standing.samples)).is_dir()
        )
        self._begun_from = job.standing.samples if is_there else None
        self._saver: Saver | None = None
        if job.world.rank == 0:
            find_broken = partial(first_not_finite, job.trainer.model)
            self._saver = Saver(self.folder, job.config.save.keep, self._news.append, find_broken)
            self._saver.best = job.standing.best_samples if job.standing.best else None

    def are_due(self) -> bool:
        """By the clock."""
        seconds = self.job.config.save.seconds
        return seconds is not None and time.monotonic() - self._last >= seconds

    def save(self, best: bool = False) -> None:
        """Rank 0 copies its tensors and goes on."""
        self._last = time.monotonic()
        if self._saver is not None:
            self._saver.save(capture(self.job), best)

    def tell(self) -> None:
        """What the writer has to say."""
        while self._news:
            saved = self._news.popleft()
            if saved.path is not None:
                self.stopping.note_cost("checkpoint", saved.seconds)
                self.callback.saved(saved.samples, saved.path)
            else:
                problem = (
                    f"checkpoint {saved.samples:012} was not written: {_in_words(saved.error)}"
                )
                kept = "what was saved before is kept, and the run goes on"
                self.callback.event(f"{problem}; {kept}", samples=saved.samples)

    def close(self) -> None:
        """Waits for what is being written."""
        if self._saver is not None:
            self._saver.close()
        self.tell()

    def finish(self, what: str) -> None:
        """Makes sure that the run as it is now is on the disk, else ends all ranks; `what`: that it
        did so far, for the message."""
        self.close()
        problem = agree.rank_0_decides(self.job.world, self._missing)
        self.tell()
        if problem:
            self.callback.event(
                f"the last checkpoint was not written: {problem}", samples=self.job.standing.samples
            )
            error = AllstepError(f"{what}, but that is not saved: {problem}; {self._way_on()}")
            raise error if self.job.world.rank == 0 else SystemExit(error.exit_code)

    def _missing(self) -> str:
        """Why the run as it is now is not on the disk; empty when it is."""
        assert self._saver is not None
        if self.job.standing.samples in (self._saver.last, self._begun_from):
            return ""
        saved = self._saver.write_or_retry(capture(self.job))
        return "" if saved.path is not None else _in_words(saved.error)

    def _way_on(self) -> str:
        """What a resume will do."""
        path = checkpoint.newest(self.folder, check_resumed).path
        where = f"from checkpoint {path.name}" if path else "anew, for it has no whole checkpoint"
        return f"when that is mended, --resume {self.job.out} goes on {where}"


def _in_words(error: Exception | None) -> str:
    return str(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
