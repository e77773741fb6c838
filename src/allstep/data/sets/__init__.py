"""Sets that are known by name: where they are found, how they are brought here, how they are read."""
