"""Calibration: the measurements of a model on this machine that `allstep plan` predicts from.

```
calibrate     starts `rank` on all workers of this host, or on several hosts, and reads its answer
rank          what each worker does: alone, independent, together, sums (imports torch)
step_watch    the times within a step: forward, every gradient, update (imports torch)
read_run      what the record of a run has of a calibration (--like)
facts         what was measured, and differences of two calibrations
```
"""
