"""How messages travel between ranks and the coordinator: a board, on one host or over several.

`board` is the interface; `shared_board` (through shared memory, with the rings and bells of
`byte_ring`) and `socket_board` implement it.
May import: everything below `engine`, and nothing else of the engine. Start with `board`.
"""
