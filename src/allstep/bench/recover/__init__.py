"""`allstep bench recover`: how long a run pauses when a worker is killed.

`measure` starts the runs and kills workers, `worker` is what they run, `torchrun_peer` the same
under torchrun, `notes` how they report to the bench, `result` the table.
"""
