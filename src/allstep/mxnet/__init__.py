"""Horovod's API for MXNet: `import allstep.mxnet as hvd`."""
