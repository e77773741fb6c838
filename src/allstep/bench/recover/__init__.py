"""`allstep bench recover`: how long a run pauses when a worker is killed, and when one joins.

| part | modules |
|---|---|
| kill, form | `measure` starts the runs and kills workers, `elastic_worker` is what they run |
| kill | `torchrun_peer` and `torchft_peer` are the same training under torchrun and torchft |
| join | `join`, `join_worker`; `broadcast_rank` broadcasts the state alone |
| quiet | `quiet`, `quiet_rank` |

`live_run` starts a contender and waits for the `notes` that its workers write; `result` and
`join_result` make the tables.
"""
