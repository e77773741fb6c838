"""How a rank notices that another one failed, is stuck or left, and says so.

`guard` watches during waits, `failure` is the value that describes one, `stall` asks who is
missing. May import: `comm.join`. Start with `guard`.
"""
