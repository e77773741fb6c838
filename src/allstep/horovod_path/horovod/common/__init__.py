"""The modules that Horovod's front-ends share."""
