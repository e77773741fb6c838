"""Horovod's `runner.elastic`; only `worker` is provided."""
