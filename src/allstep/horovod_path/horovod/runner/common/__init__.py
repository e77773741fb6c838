"""Horovod's `runner.common`; only `util.env` is provided."""
