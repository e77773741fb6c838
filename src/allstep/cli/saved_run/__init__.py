"""Commands about the folder of a run: `eval`, `landscape`, `predict` and `replay`."""
