"""See `env`."""
