"""What the Horovod front-ends share: exceptions, process sets, the calls around `init()`, elastic
states.

A front-end (`allstep.torch`, `allstep.keras`) adds the calls of its framework and re-exports the
rest; the objects are the same in all of them, as Horovod's are in `horovod.common`.

| module | contents |
|---|---|
| `exceptions` | HorovodInternalError and related exceptions |
| `requests`, `handles` | numbers of reductions, requests to the engine, results |
| `objects` | broadcast_object, allgather_object |
| `gradient_group` | the process group of the optimizers |
| `gradient_list` | the gradients of a step of another framework than torch |
| `place` | the running engine; rank(), size() and related calls |
| `process_sets` | ProcessSet, global_process_set, add_process_set, remove_process_set |
| `timeline` | start_timeline, stop_timeline |
| `frameworks` | which frameworks are installed |
| `basics` | init(), shutdown(), what is built and enabled |
| `elastic` | State, ObjectState, run_fn, notification_manager |
| `util` | the helpers of horovod.common.util |
"""

__all__: list[str] = []
