"""Calibration: the measurements of a model on this machine that `allstep plan` predicts from.

```
calibrate     starts `rank` on all workers of this host, or on several hosts, and reads its answer
rank          what each worker does: alone, independent, together, sums (imports torch)
step_watch    the times within a step: forward, every gradient, update (imports torch)
read_run      what the record of a run has of a calibration (--like)
same_run      whether a calibration is of this model, batch and machine
progress_to_goal   updates to a goal, from a study or a noise scale
gain_of_run   what one change would gain in a run, for its report
plan_plot     the plot of a plan (matplotlib)
```
"""
