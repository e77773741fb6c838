"""Not offered: raises ImportError."""

raise ImportError(
    "allstep does not offer horovod.ray; `import horovod.torch` and `horovod.run` work"
)
