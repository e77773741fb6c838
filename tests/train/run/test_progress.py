"""What is due depends only on the position, and intervals that divide an epoch end with it."""

from fractions import Fraction

from hypothesis import given
from hypothesis import strategies as st

from allstep.train.run.progress import crossed


@given(
    st.sampled_from(["0.01", "0.1", "0.2", "0.25", "0.3", "0.37", "0.7", "1", "2.5"]),
    st.integers(1, 2_000_000),
    st.data(),
)
def test_against_exact_arithmetic(every: str, num_train: int, data: st.DataObject) -> None:
    before = data.draw(st.integers(0, 100 * num_train))
    after = data.draw(st.integers(before + 1, before + num_train))
    exact = Fraction(every) * num_train
    expected = after // exact > before // exact
    near = any(
        0 < -place % exact < exact / 500_000 for place in (before, after)
    )  # a millionth is given away
    assert near or crossed(before, after, float(every) * num_train) == expected


def test_the_end_of_an_epoch_is_on_time() -> None:
    """0.1 * 1337 is above 133.7 as a float, so ten of them are above 1337."""
    assert 1337 / (0.1 * 1337) < 10
    assert crossed(1300, 1337, 0.1 * 1337)
    assert not crossed(1337, 1400, 0.1 * 1337)
    assert not crossed(0, 1337, None)
