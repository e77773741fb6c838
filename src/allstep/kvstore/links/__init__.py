"""Links between workers and servers: a Gloo group of two for each worker and server (D16).

```
pair         one end of a link: messages, and what the kernel knows of the connection
all_links    a worker's links to all servers: requests, pipelined, and the loss of a server
talk         conversations with several servers, of which some may be lost meanwhile
server_loss  the error for a lost server of a store that continues
loss_log     the servers that count as lost, in one order for all workers
announced    how servers and workers find each other in the store of the ranks
own_server   the server process that the first worker of a host starts
```

A link belongs to two processes, so the death of a party ends no link of another one. May import:
`memory` for its waits, `rules`, and `comm`.
"""
