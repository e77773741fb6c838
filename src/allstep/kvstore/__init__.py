"""A key-value store with MXNet's API: parameter servers on one host, in shared memory."""
