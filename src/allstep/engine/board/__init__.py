"""How messages travel between the ranks and the coordinator, on one host or between hosts.

`board` is the interface. `shared_board` (shared memory, with the rings and bells of `byte_ring`)
and `socket_board` implement it.
May import: everything below `engine`, and nothing else of the engine. Start with `board`.
"""
