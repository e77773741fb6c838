"""`dist_stale:S`: no gradient older than S rounds is applied (D17).

The *age* of a gradient is the number of updates that other parties applied between the read of the
weights and the gradient's own update. With N parties, S rounds are S x N updates.

**Barriers.** A party that waits in a barrier pushes nothing, so its gradient is not waited for, and
may become too old meanwhile. At the end of the barrier the rule holds again for those gradients
that can all be pushed in time (`in_time`); the others are refused when they are pushed.

**The rule.** Each party computes one gradient at a time, from weights of the version that it read
last. Let V be the present version, and let r_0 <= r_1 <= ... be the versions that the *other*
parties have read. If our update is applied, the version is V + 1; then the party with the oldest
read can push at once (its age is V + 1 - r_0), the next one after it (V + 2 - r_1), and so on. We
may push if all of these ages are within the bound.

It is not enough to check each party for itself: two parties with equal reads at the bound would
wait for each other, since each one's update makes the other's gradient too old. With this rule the
party with the oldest read may always push: when it pushes, V grows by one and every other party
moves up one place, so no age of the list changes. Hence some party can always continue, and a slow
party is waited for and never refused.
"""

from collections.abc import Mapping

NONE = -1
"""In place of a version: the party computes no gradient."""


def max_age(rounds: int, num_parties: int) -> int:
    """Return S rounds of N parties as a number of updates."""
    return rounds * num_parties


def blocker(version: int, reads: Mapping[int, int], bound: int) -> int | None:
    """Return a party for whose gradient an update has to wait; None if it may be applied now.

    version: the number of updates applied so far. reads: the versions that the other parties have
    read and not pushed a gradient for, by party. bound: see `max_age`.
    """
    oldest_first = sorted(reads, key=lambda party: (reads[party], party))
    for place, party in enumerate(oldest_first):
        if version + 1 + place - reads[party] > bound:
            return party
    return None


def in_time(version: int, reads: Mapping[int, int], bound: int) -> set[int]:
    """Return parties that can all push their gradients, the one with the oldest read first.

    reads: the versions that the parties have read; those with `NONE` are left out.
    """
    found: set[int] = set()
    for party in sorted(reads, key=lambda party: (reads[party], party)):
        if reads[party] != NONE and version + len(found) - reads[party] <= bound:
            found.add(party)
    return found
