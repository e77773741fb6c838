"""The server: a process that is no rank, and holds parts of the values of stores (D16).

```
process          the process: waits for stores, until the run or its worker ends
link_thread      serves one link: a message, what it asks for, the answer
served_store     one store on one server: parts, parties, calls of all parties
served_part      one part: its value, its optimizer, rounds (sync) and ages (stale)
takeovers        parts of a lost server, from the freshest copy of a worker
party_calls      calls that all parties make together, such as barriers
```

Started by `allstep run --servers N`, or by the first worker of each host (`links.own_server`). May
import: `links`, `updates`, `memory`, `rules`; not `modes`, which is the workers' side.
"""
