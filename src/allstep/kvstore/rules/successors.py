"""Which server takes a part over when servers are lost.

The answer depends only on the part and on which servers are lost, not on the order in which they
were: workers notice losses at different times, and in different orders. A part moves only when its
server is lost, and the parts of a lost server are spread over all others.
"""

from collections.abc import Collection

# Knuth's multiplier: neighbouring numbers get successors that look random.
_MIX = 2654435761


def successor(number: int, home: int, num_servers: int, lost: Collection[int]) -> int | None:
    """Return the server of a part; None if all servers are lost.

    number: of the part. home: its server as it was placed first.
    """
    if home not in lost:
        return home
    others = [(home + 1 + step) % num_servers for step in range(num_servers - 1)]
    start = (number * _MIX % 2**32 >> 16) % max(1, len(others))
    in_order = others[start:] + others[:start]
    return next((server for server in in_order if server not in lost), None)
