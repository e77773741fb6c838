"""Horovod's API for TensorFlow: `import allstep.tensorflow as hvd`."""
