"""Batch growth: by epochs compared with a table, by noise on gradients of known noise scale."""

import json
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from allstep.optim.noise_scale import Running, from_workers
from allstep.train.config.run_config import GrowthConfig
from allstep.train.config.validate_keys import validated
from allstep.train.step.batch_growth import Growth, note

N = 1000


def growth(batch: int = 100, room: int = 0, **section: object) -> Growth:
    return Growth(GrowthConfig.model_validate(section), batch, N, room)


def measured(scale: float, steps: int, seed: int = 0) -> Running:
    """Return the noise scale measured on gradients in 50 dimensions with |G|^2 = 1 and tr(Sigma) =
    scale, on 8 workers with 64 samples each."""
    draw, running = np.random.default_rng(seed), Running()
    truth = np.eye(50)[0]
    for _ in range(steps):
        workers = truth + draw.normal(0, math.sqrt(scale / 50 / 64), (8, 50))
        mean = workers.mean(0)
        running.add(from_workers((workers**2).sum(1).tolist(), [64] * 8, float(mean @ mean)))
    return running


def test_without_growth_the_batch_stays() -> None:
    assert {growth().batch(samples) for samples in range(0, 10 * N, 77)} == {100}


@pytest.mark.parametrize(
    ("samples", "batch"),
    [
        (0, 100),
        (1999, 100),
        (2000, 300),
        (2499, 300),
        (2500, 900),
        (3999, 900),
        (4000, 1000),
        (9999, 1000),
    ],
)
def test_at_given_epochs(samples: int, batch: int) -> None:
    """The last growth would give 2700, but there are only 1000 samples."""
    assert growth(at=(2, 2.5, 4), factor=3).batch(samples) == batch


def test_never_above_the_most() -> None:
    assert growth(at=(1, 2, 3), max=350).batch(5 * N) == 350
    assert growth(batch=100, at=(1,), max=100).batch(5 * N) == 100


@given(st.lists(st.integers(0, 20 * N), min_size=1), st.integers(1, 4), st.integers(1, 5000))
def test_growth_by_epochs_knows_no_history(samples: list[int], factor: int, most: int) -> None:
    """So a resumed run has the same batches, and more samples never give a smaller batch."""
    asked = growth(at=(1, 3, 10), factor=factor, max=max(100, most))
    batches = [asked.batch(each) for each in samples]
    assert batches == [
        growth(at=(1, 3, 10), factor=factor, max=max(100, most)).batch(each) for each in samples
    ]
    by_samples = [batch for _, batch in sorted(zip(samples, batches, strict=True))]
    assert by_samples == sorted(by_samples)


def test_by_noise_it_grows_until_the_scale_is_reached() -> None:
    """Noise scale 500: batches of 100, 200 and 400 are surely below it, 800 is not."""
    noise = measured(scale=500, steps=200)
    low, high = noise.interval()
    assert 400 < low < 500 < high < 800
    asked = growth(by_noise=True)
    assert [asked.batch(samples, noise) for samples in range(0, 4 * N, 250)] == [
        100,
        100,
        200,
        200,
        400,
        400,
        *[800] * 10,
    ]


def test_by_noise_it_does_not_grow_when_unsure() -> None:
    few = measured(scale=500, steps=20)
    assert growth(by_noise=True).batch(5 * N, few) == 100
    assert growth(by_noise=True).batch(5 * N, None) == 100
    calm = measured(scale=20, steps=200)
    assert growth(by_noise=True).batch(5 * N, calm) == 100


def test_by_noise_it_stops_at_the_most() -> None:
    noise = measured(scale=5000, steps=200)
    asked = growth(by_noise=True, max=150)
    assert [asked.batch(samples, noise) for samples in (0, N, 2 * N, 3 * N)] == [100, 150, 150, 150]
    assert asked.state()["times"] == 1


def test_it_resumes_from_a_checkpoint() -> None:
    noise = measured(scale=5000, steps=200)
    whole = growth(by_noise=True)
    before = [whole.batch(samples, noise) for samples in (0, 600, 700)]
    resumed = growth(by_noise=True)
    resumed.load(json.loads(json.dumps(whole.state())))
    assert before == [100, 200, 200]
    assert [resumed.batch(samples, noise) for samples in (800, 1100)] == [200, 400]


def test_micro_batches_stay_as_large_as_they_were() -> None:
    assert [growth().num_micro_batches(batch, (1, 1), 1) for batch in (100, 200, 400, 450)] == [
        1,
        2,
        4,
        5,
    ]
    assert growth().num_micro_batches(400, (1, 1), 4) == 16
    assert growth().num_micro_batches(400, (3, 1), 4) == 16
    assert growth(room=150).num_micro_batches(400, (3, 1), 1) == 2, "300 samples of rank 0"
    assert growth(room=150).num_micro_batches(200, (3, 1), 1) == 1
    assert growth(room=10).num_micro_batches(100, (1, 1), 1) == 1, (
        "less room than a micro-batch has taken from the beginning"
    )


def test_where_there_is_room_micro_batches_are_larger_and_not_fewer_than_asked_for() -> None:
    """150 samples at once: a worker's share of 50, 100 or 150 is one micro-batch, 200 are two.

    With accumulation=2 there are always two.
    """
    assert [
        growth(room=150).num_micro_batches(batch, (1, 1), 1) for batch in (100, 200, 300, 400)
    ] == [
        1,
        1,
        1,
        2,
    ]
    assert [
        growth(room=150).num_micro_batches(batch, (1, 1), 2) for batch in (100, 200, 300, 400, 800)
    ] == [
        2,
        2,
        2,
        2,
        3,
    ]


@given(
    st.integers(1, 500),
    st.integers(1, 9),
    st.integers(1, 8),
    st.integers(1, 4),
    st.integers(0, 5000),
)
def test_no_micro_batch_is_larger_than_there_is_room_for(
    batch: int, size: int, base: int, times: int, room: int
) -> None:
    asked = Growth(GrowthConfig(), batch, 10**6, room)
    first_micro_batch = math.ceil(math.ceil(batch / size) / base)
    share = math.ceil(batch * 2**times / size)
    num_micro_batches = asked.num_micro_batches(batch * 2**times, (1,) * size, base)
    assert math.ceil(share / num_micro_batches) <= max(first_micro_batch, room)
    assert min(base, share) <= num_micro_batches <= share
    assert asked.num_micro_batches(batch, (1,) * size, base) <= base


def test_the_room_that_was_found_is_kept_in_a_checkpoint() -> None:
    """With any memory of the resuming machine; older checkpoints have no room."""
    resumed = growth(room=10**6)
    resumed.load(json.loads(json.dumps(growth(room=150).state())))
    assert resumed.num_micro_batches(400, (1, 1), 1) == 2
    resumed.load({"times": 0, "last": 0})
    assert resumed.num_micro_batches(400, (1, 1), 1) == 4


@pytest.mark.parametrize(
    ("section", "schedule", "is_noted"),
    [
        ({}, {}, False),
        ({"at": (1,)}, {}, True),
        ({"by_noise": True}, {"shape": "linear"}, True),
        ({"at": (1,)}, {"shape": "constant"}, False),
        ({"at": (1,)}, {"shape": "step"}, True),
        ({"at": (1,)}, {"shape": "step", "milestones": (3,)}, False),
    ],
)
def test_a_rate_that_falls_as_well_is_noted(
    section: dict[str, object], schedule: dict[str, object], is_noted: bool
) -> None:
    config = validated(
        {
            "recipe": "test",
            "data": {"name": "digits"},
            "epochs": 9,
            "growth": section,
            "schedule": schedule,
        }
    )
    assert (note(config) is not None) == is_noted
