"""Not there yet."""

raise ImportError("allstep does not speak Horovod's Keras API yet; `import horovod.torch` works")
