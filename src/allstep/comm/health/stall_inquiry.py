"""Find out which ranks are missing and what they do: questions and answers through the store.

```
claim/<question>            the rank that asks it: the first that wrote this key
questions                   how many questions were asked
question/<n>                the n-th question
answer/<question>/<rank>    the rank's own state: an `Answer`
```

A question is named after the operation that stalls, so all ranks that wait in it ask the same one
and read the same answers. Each rank checks for new questions every few seconds. A rank that is
stopped, or busy in native code that holds the interpreter lock, does not answer; the report then
states that.
"""

import json
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from torch._C._distributed_c10d import Store


class Answer(NamedTuple):
    """The state of a rank, as the rank itself reports it."""

    host: str
    begun: int
    """The number of collectives that it has called on this group."""
    doing: str
    """The operation that it waits in; empty if in none."""
    seconds: float
    """Seconds that it has waited, or seconds since it last waited."""
    lines: list[str]
    """The stack of its program, the innermost call last."""


class Questions:
    """Questions and answers of one group, in the store."""

    def __init__(self, store: Store, rank: int, size: int) -> None:
        self._store, self._rank, self._size = store, rank, size
        self._next = 1

    def answer(self, own_answer: Callable[[], Answer]) -> None:
        """Answer the questions that were asked since the last call."""
        while self._store.check([f"question/{self._next}"]):
            question = self._store.get(f"question/{self._next}").decode()
            self._next += 1
            self._store.set(f"answer/{question}/{self._rank}", json.dumps(own_answer()))

    def ask(self, question: str) -> bool:
        """Ask a question to all ranks, including this one; return False if another rank has."""
        if (
            self._store.compare_set(f"claim/{question}", "", str(self._rank))
            != str(self._rank).encode()
        ):
            return False
        self._store.set(f"question/{self._store.add('questions', 1)}", question)
        return True

    def answers(self, question: str) -> dict[int, Answer]:
        """Return the answers so far, by rank."""
        keys = {rank: f"answer/{question}/{rank}" for rank in range(self._size)}
        return {
            rank: Answer(*json.loads(self._store.get(key)))
            for rank, key in keys.items()
            if self._store.check([key])
        }


class Inquiry:
    """One question under way, from asking it to its answers."""

    def __init__(self, question: str, timeout: float) -> None:
        self.question = question
        self.claimed = False
        # Set when all ranks have answered, or when the time for answers is over.
        self.answers: Mapping[int, Answer] | None = None
        self._timeout = timeout
        self._until: float | None = None

    def advance(self, questions: Questions, size: int) -> Mapping[int, Answer] | None:
        """Ask the question once, and return the answers when complete. May block."""
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
    """Return the report as lines: the first names the missing ranks, the rest what they do.

    `rank` and the keys of `answers` are ranks of the group; `names` are the user's numbers for
    them.
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
    does = f"in {answer.doing} for" if answer.doing else "in no collective for"
    head = f"  {who} on {answer.host}: {does} {answer.seconds:.0f} s"
    return (
        [f"{head}; its stack:", *(f"    {line}" for line in answer.lines)]
        if answer.lines
        else [head]
    )


def absent(
    number: int, rank: int, answers: Mapping[int, Answer], size: int
) -> tuple[list[int], list[int]]:
    """Return the ranks that have not begun collective `number`, and those that do not answer."""
    others = _others(rank, size)
    missing = [other for other in others if other in answers and answers[other].begun < number]
    return missing, [other for other in others if other not in answers]


def rank_list(ranks: Sequence[int], names: Sequence[int]) -> str:
    """Return `rank 2`, or `ranks 2 and 3`."""
    numbers = [str(names[each]) for each in ranks]
    return (
        f"rank {numbers[0]}"
        if len(numbers) == 1
        else f"ranks {', '.join(numbers[:-1])} and {numbers[-1]}"
    )


def _others(rank: int, size: int) -> list[int]:
    return [other for other in range(size) if other != rank]
