"""Not offered: raises ImportError."""

raise ImportError(
    "allstep does not offer horovod.spark; `import horovod.torch` and `horovod.run` work"
)
