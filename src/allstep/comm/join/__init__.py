"""How ranks find each other: a store that all share, a card from each rank, and a barrier.

May import: nothing else in `comm`. Start with `rendezvous`: one method for each launcher.
"""
