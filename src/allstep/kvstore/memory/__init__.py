"""Memory that the workers of a host share, and waiting in it.

```
robust_mutex   a lock in shared memory that the kernel frees when its holder dies
byte_locks     the same on the bytes of a file, where such a mutex is not available
slice_locks    which of the two a store uses
parties        the workers of a store: shared memory, barrier, which of them are lost
bounded_wait   one wait for another worker, with its limits and reports
key_memory     a key's value, slices, versions and contributions
row_batches    slices of a matrix in batches of whole rows
```

May import: `rules`. Start with `key_memory`.
"""
