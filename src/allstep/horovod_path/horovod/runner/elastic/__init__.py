"""See `worker`."""
