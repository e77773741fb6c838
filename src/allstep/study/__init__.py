"""Studies and searches: many runs, asked for together and judged together.

```
Study (study)      what is asked: trials, in an order that may depend on results, and a rule that stops one early
  Trial (trial)      a command with a run folder of its own; Outcome: how it ended
  run (runner)       one trial per core at a time; resumes where it was cut; reports progress
    StudyFolder (folder)   where all of it is stored, and which process may use it
    Child (child)          a process that cannot outlive us
    Follower (tail)        a run record, read while it is written
    Forecast (forecast)    how long the rest will take

batch              remedies by batch size: a grid of runs, its table and its plots
updates            updates to a goal by batch size, the best of a few learning rates each
one_precision      the same for all runs of a study, where the recipe leaves it to the machine
```

Everything above the gap knows nothing of batches, rates or models: it reads run records, nothing
else. No torch in here.
"""

from allstep.study.folder import StudyFolder
from allstep.study.runner import run
from allstep.study.study import Study
from allstep.study.trial import Outcome, Trial

__all__ = ["Outcome", "Study", "StudyFolder", "Trial", "run"]
