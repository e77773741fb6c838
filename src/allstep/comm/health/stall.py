"""Who is missing, and what does it do instead? Questions and answers through the group's store.

```
claim/<question>            who asks it: the first that thought of it
questions                   how many were asked
question/<n>                the n-th question
answer/<question>/<rank>    what the rank says of itself: an `Answer`
```

A question is named after the operation that stalls, so that all ranks that wait in it ask the same
one and read the same answers. Each rank looks for new questions every few seconds. One that is busy
in native code without letting other threads run, or stopped, does not answer, and that is an
answer, too.
"""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from torch._C._distributed_c10d import Store


class Answer(NamedTuple):
    """What a rank says of itself."""

    host: str
    begun: int  # collectives on this group
    doing: str  # the operation that it waits in; empty when in none
    seconds: float  # how long it has been doing that, or nothing
    lines: list[str]  # where its program is


class Questions:
    """The letter-box of one group."""

    def __init__(self, store: Store, rank: int, size: int) -> None:
        self._store, self._rank, self._size = store, rank, size
        self._next = 1

    def answer(self, own_answer: Callable[[], Answer]) -> None:
        """Answer what was asked since the last time."""
        while self._store.check([f"question/{self._next}"]):
            question = self._store.get(f"question/{self._next}").decode()
            self._next += 1
            self._store.set(f"answer/{question}/{self._rank}", json.dumps(own_answer()))

    def ask(self, question: str) -> bool:
        """Put a question to all, ourselves included; False when somebody else has."""
        if (
            self._store.compare_set(f"claim/{question}", "", str(self._rank))
            != str(self._rank).encode()
        ):
            return False
        self._store.set(f"question/{self._store.add('questions', 1)}", question)
        return True

    def answers(self, question: str) -> dict[int, Answer]:
        """Those that have come, by rank."""
        keys = {rank: f"answer/{question}/{rank}" for rank in range(self._size)}
        return {
            rank: Answer(*json.loads(self._store.get(key)))
            for rank, key in keys.items()
            if self._store.check([key])
        }


class Inquiry:
    """One question on its way: asked, waiting for answers, told."""

    def __init__(self, question: str, timeout: float) -> None:
        self.question = question
        self.claimed = False
        self.answers: Mapping[int, Answer] | None = (
            None  # when all have come, or no more are waited for
        )
        self._timeout = timeout
        self._until: float | None = None

    def advance(self, questions: Questions, size: int) -> Mapping[int, Answer] | None:
        """The answers, when it is over. May hang, since the store may."""
        if self._until is None:
            self.claimed = questions.ask(self.question)
            self._until = time.monotonic() + self._timeout
        answers = questions.answers(self.question)
        if len(answers) == size or time.monotonic() > self._until:
            self.answers = answers
        return self.answers


def report(
    text: str,
    seconds: float,
    number: int,
    rank: int,
    answers: Mapping[int, Answer],
    names: Sequence[int],
) -> list[str]:
    """Lines for people: the first says who is missing, the rest what those do.

    Ranks of the group; `names` are the user's numbers.
    """
    missing, mute = absent(number, rank, answers, len(names))
    clauses = []
    if missing:
        clauses.append(
            f"{rank_list(missing, names)} of {len(names)} {'has' if len(missing) == 1 else 'have'}"
            " not called it"
        )
    if mute:
        clauses.append(f"{rank_list(mute, names)} {'does' if len(mute) == 1 else 'do'} not answer")
    otherwise = "all ranks have called it" if number else "the others"
    lines = [
        f"rank {names[rank]} has waited {seconds:.0f} s in {text};"
        f" {', '.join(clauses) or otherwise}"
    ]
    for other in sorted([*missing, *mute]) or _others(rank, len(names)):
        lines += _about(f"rank {names[other]}", answers.get(other))
    return lines


def _about(who: str, answer: Answer | None) -> list[str]:
    if answer is None:
        return [f"  {who}: does not answer (busy in native code, stopped or cut off)"]
    does = f"in {answer.doing} for" if answer.doing else "in no collective since"
    head = f"  {who} on {answer.host}: {does} {answer.seconds:.0f} s"
    return (
        [f"{head}; it is at", *(f"    {line}" for line in answer.lines)] if answer.lines else [head]
    )


def absent(
    number: int, rank: int, answers: Mapping[int, Answer], size: int
) -> tuple[list[int], list[int]]:
    """The ranks that have not begun the collective of that number, and those that do not answer."""
    others = _others(rank, size)
    missing = [other for other in others if other in answers and answers[other].begun < number]
    return missing, [other for other in others if other not in answers]


def rank_list(ranks: Sequence[int], names: Sequence[int]) -> str:
    """`rank 2`, `ranks 2 and 3`."""
    numbers = [str(names[each]) for each in ranks]
    return (
        f"rank {numbers[0]}"
        if len(numbers) == 1
        else f"ranks {', '.join(numbers[:-1])} and {numbers[-1]}"
    )


def _others(rank: int, size: int) -> list[int]:
    return [other for other in range(size) if other != rank]
