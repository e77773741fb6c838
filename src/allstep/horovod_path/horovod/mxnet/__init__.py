"""Not offered: raises ImportError."""

raise ImportError(
    "allstep does not offer horovod.mxnet; `import horovod.torch` and `horovod.run` work"
)
