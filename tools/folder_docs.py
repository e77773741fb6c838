"""Docstrings of the folders that `move_modules.py` makes: content, what it may import, where to start."""

FOLDERS = {
    "bench.comm": """`allstep bench comm`: collectives next to Gloo's and mpi4py's, in the same run.

May import: everything below `bench`. Start with `measure`; `rank` runs in each worker.""",
    "bench.data": """`allstep bench data`: the loader next to other loaders, and next to the same work without one.

May import: everything below `bench`. Start with `measure`; `peers` holds the other loaders, `ceiling`
what the workers could deliver.""",
    "bench.step": """`allstep bench step`: a training step next to plain PyTorch and DDP.

May import: everything below `bench`. Start with `measure`; `rank` runs in each worker.""",
    "cli.horovod": """`horovodrun`: Horovod's flags, translated to those of `allstep run`.

May import: `launch` and below. Start with `flags`; `flags_table` lists them all.""",
    "comm.group": """The process group `allstep`, put together from shared memory and the network.

`init` joins the ranks, `build` makes a group of them, `process_group` is what torch sees.
May import: everything in `comm`. Start with `process_group`, then `plan`: which way a call takes.""",
    "comm.health": """How a rank notices that another one failed, is stuck or left, and says so.

`guard` watches during waits, `failure` is the value that describes one, `stall` asks who is missing.
May import: `comm.join`. Start with `guard`.""",
    "comm.join": """How ranks find each other: a store that all share, cards with their places, a barrier on it.

May import: nothing else in `comm`. Start with `rendezvous`: one way for each launcher.""",
    "comm.memory": """Tensors in memory that the ranks of a host share.

`segment` maps it, `arena` divides it, `flags` waits in it, `copy` and `reduce` work on it.
May import: `comm.op`, `comm.timeline`, `comm.health`, `comm.join`. Start with `segment`.""",
    "comm.network": """Tensors between hosts: Gloo, and our own algorithms on its point-to-point messages.

May import: `comm.op`, `comm.timeline`, `comm.health`, `comm.join`. Start with `algorithms`.""",
    "comm.op": """What a collective operation is, whatever carries it: its arguments, its arithmetic, its handle.

May import: `comm.health`, `comm.join`. Start with `transport`, the protocol of all that carry tensors.""",
    "comm.timeline": """When each operation began and ended on each rank, as a trace for a browser.

May import: `comm.health`, `comm.join`. Start with `timeline`.""",
    "console": """Text for people: numbers with units, tables, progress, and foreign text made safe to print.

Standard library only. Imports only `errors`. Start with `quantities`.""",
    "data.inspect": """What `allstep data info|verify|index|show` look at.

May import: everything in `data`. Start with `info`.""",
    "data.random": """Random numbers that depend on seed, epoch and sample alone: the same for any number of workers.

May import: nothing else in `data`. Start with `keys`.""",
    "data.sources.tar": """Samples in tar files (WebDataset): members with one key are one sample.

May import: the other modules of `data.sources`. Start with `source`; `scan` walks through the headers.""",
    "data.sources.tfrecord": """Samples in TFRecord files, read without TensorFlow.

May import: the other modules of `data.sources`. Start with `source`; `scan` finds the records, `example`
reads their protocol buffers.""",
    "files": """Files that others may have written or may read: bounded reading, whole writing, locks.

Standard library only. Imports only `errors`. Start with `bounded` and `replace`.""",
    "launch.hosts": """Which hosts a run uses, at which addresses, and how a command is started there.

May import: `wire`, `machine` and below. Start with `parse`.""",
    "launch.output": """The output of all workers as one stream of lines, and as log files.

May import: `console`, `files` and below. Start with `writer`.""",
    "parallel": """How replicas train as one: gradients of all ranks become one mean, or one update by their owners.

```
gradients          buckets, reduced while autograd still works
owned_gradients    each rank gets the sums of the parameters that it owns
two_part_step      a step that waits for the sums, then updates
shared_weights     one copy of the weights for the ranks of a host
```

May import: `comm`, `engine`, `optim` and below; no front-end. Start with `gradients`.""",
    "process": """Other processes: whether they live, and how Python is started on a module of ours.

Standard library only. Imports only `errors`. Start with `liveness`.""",
    "study.batch": """`allstep study batch`: accuracy by batch and remedy, after the same number of epochs.

May import: the modules of `study`. Start with `study`.""",
    "study.updates": """`allstep study updates`: updates to a goal by batch, with the best of a few learning rates each.

May import: the modules of `study`. Start with `study`.""",
    "train.check": """Does it work at all: a dry run, a few samples learned by heart, N workers against one.

May import: everything in `train`. Start with `verify`.""",
    "train.checkpoint": """Checkpoints: whole or absent, tensors as safetensors, numbers as JSON, checksums last.

May import: `train.step` and below. Start with `format`.""",
    "train.config": """What a run is: its keys, where their values come from, and whether they fit together.

May import: nothing else in `train`. Start with `run_config`, then `read`.""",
    "train.folder": """The run folder: who may write into it, what is in it, and how it is read again.

May import: `train.config`. Start with `claim`.""",
    "train.health": """Is the run still sound: divergence, replicas that differ, a request to stop, a state that fits.

May import: `train.checkpoint` and below. Start with `divergence`.""",
    "train.input": """From a dataset to tensors: splits, classes, transforms, mean and std, loaders.

May import: `train.config`, `train.precision`. Start with `splits`.""",
    "train.precision": """In which number format a model computes: autocast, loss scaling, casts.

May import: `train.config`. Start with `precision`.""",
    "train.run": """A run from its start to its end.

`prepare` checks before anything starts, `worker` runs in each rank, `setup` builds the parts, `loop` runs
them, `finish` tests and reports.
May import: all of `train` but `check` and `use`. Start with `loop`.""",
    "train.score": """Loss and accuracy on a split, each sample counted once, and which samples are wrong.

May import: `train.input` and below. Start with `evaluate`.""",
    "train.step": """One update of a model: forward, backward, exchange, optimizer; and all that is decided once before.

May import: `train.score` and below. Start with `step`.""",
    "train.use": """What a finished run is good for: predict images, evaluate again.

May import: everything in `train` but `check`. Start with `load`.""",
    "train.watch": """What a run tells others while it runs: the terminal, `run.jsonl`, TensorBoard.

May import: `train.config`. Start with `events`.""",
}
