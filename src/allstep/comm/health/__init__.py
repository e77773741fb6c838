"""How a rank detects that another rank has failed, stalls or has left, and reports it.

`guard` checks during waits, `failure` is the value that describes a failure, `stall_inquiry` finds
out which ranks are missing. May import: `comm.join`. Start with `guard`.
"""
