"""One rank leaves in the middle; the others wait for it in a collective."""

import sys

import horovod.torch as hvd
import torch

hvd.init()
for step in range(10):
    hvd.allreduce(torch.ones(4), name="step")
    if hvd.rank() == 1 and step == 5:
        sys.exit(3)
