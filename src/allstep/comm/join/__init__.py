"""How ranks find each other: a store that all share, cards with their places, a barrier on it.

May import: nothing else in `comm`. Start with `rendezvous`: one way for each launcher.
"""
