"""Commands about the folder of a run: `eval`, `predict` and `replay`."""
