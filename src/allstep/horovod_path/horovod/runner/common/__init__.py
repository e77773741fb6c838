"""See `util.env`."""
