"""Not offered."""

raise ImportError(
    "allstep does not offer horovod.ray; `import horovod.torch` and `horovod.run` work"
)
