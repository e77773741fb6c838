"""Which worker requeues the Slurm job of a run, and how often."""

import pytest

from allstep.train.health import requeue
from allstep.train.health.requeue import JobRequeue

SLURM = {"SLURM_JOB_ID": "77"}
ELASTIC = {**SLURM, "ALLSTEP_TICKET": "x"}


@pytest.mark.parametrize(
    ("env", "rank", "is_first"),
    [
        (SLURM, 0, True),
        (SLURM, 1, False),
        ({**ELASTIC, "ALLSTEP_WORKER": "0"}, 0, True),
        # With -np 1 --max-np 4 all workers have rank 0 in their variables.
        ({**ELASTIC, "ALLSTEP_WORKER": "1"}, 0, False),
        ({**ELASTIC, "ALLSTEP_WORKER": "0", "ALLSTEP_JOINS": "1"}, 0, False),
    ],
)
def test_one_worker_represents_the_run_until_a_state_is_saved(
    env: dict[str, str], rank: int, is_first: bool
) -> None:
    assert JobRequeue(env, rank, None).is_mine is is_first


def test_the_job_is_requeued_at_most_once(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr(requeue, "why_not", lambda env, most: None)
    monkeypatch.setattr(requeue, "requeue", lambda env, most: calls.append(most) or "done")
    other = JobRequeue(SLURM, 1, 5)
    other()
    assert calls == []
    # It has saved the state as the last rank 0.
    other.is_mine = True
    other()
    other()
    assert calls == [5]


def test_without_the_option_nothing_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requeue, "requeue", lambda env, most: pytest.fail("called"))
    JobRequeue(SLURM, 0, None)()
