"""Studies and searches: many runs that answer one question together.

```
Study (study)      the trials to run, in an order that may depend on results, and a rule that
                   stops a trial early
  Trial (trial)      a command with its own run folder; Outcome: how the trial ended
  run (runner)       runs one trial per core at a time; resumes interrupted trials; reports progress
    StudyFolder (folder)   files of the study, and the lock that admits one process
    Child (child)          process of a trial; cannot outlive the runner
    Follower (tail)        reads a run record while it is written
    Forecast (forecast)    estimates the remaining time

batch              remedies by batch size: a grid of runs, its table and its plots
calibration        measurements of a model on this machine, for `allstep plan`
updates            updates to a goal by batch size, the best of a few learning rates each
data               error by number of training samples: the curve, and what a goal needs
sync               modes between synchronous and asynchronous: a grid of runs with several workers
scale              one recipe with several numbers of workers: speed, and where it is lost
recorded           the time of each worker of a recorded run, for `scale` and `report`
one_precision      one precision for all runs of a study when the recipe has precision=auto
```

The modules above the empty line know nothing of batches, learning rates or models: they read only
run records. The package does not import torch, except `calibration.rank`, which workers run.
"""

from allstep.study.folder import StudyFolder
from allstep.study.runner import run
from allstep.study.study import Study
from allstep.study.trial import Outcome, Trial

__all__ = ["Outcome", "Study", "StudyFolder", "Trial", "run"]
