"""Not implemented yet: raises ImportError."""

raise ImportError(
    "allstep does not implement Horovod's Keras API yet; `import horovod.torch` works"
)
