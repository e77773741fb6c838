"""Not there yet."""

raise ImportError(
    "allstep does not speak Horovod's TensorFlow API yet; `import horovod.torch` works"
)
