"""Horovod's `runner.common.util`; only `env` is provided."""
