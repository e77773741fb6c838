"""The loader and its parts: batch memory, threads, worker processes, list of bad samples."""
