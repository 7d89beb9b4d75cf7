import numpy as np

from worker.sampling.counter_random import child_seeds, stream_bits


def draws(seeds: object, positions: object) -> np.ndarray:
    """As numbers in [0, 1)."""
    bits = stream_bits(np.asarray(seeds, np.uint64), np.asarray(positions, np.int64))
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53


def test_numbers_are_fixed_forever() -> None:
    """A recorded (seed, position) must replay in later versions."""
    values = draws([0, 0, 1, 2**64 - 1], [0, 1, 0, 10**6])
    expected = [0.6524484863740322, 0.7012121095215252, 0.36818951565166946, 0.4611314684076886]
    np.testing.assert_allclose(values, expected, rtol=0, atol=0)


def test_numbers_are_in_range_and_uniform() -> None:
    """Behaviour 31: along positions and along seeds, without a trend between neighbours."""
    for values in (draws(np.full(100_000, 7), np.arange(100_000)), draws(np.arange(100_000), np.full(100_000, 3))):
        assert (values >= 0).all()
        assert (values < 1).all()
        counts = np.histogram(values, bins=100, range=(0, 1))[0]
        chi_square = ((counts - 1000) ** 2 / 1000).sum()
        assert chi_square < 161  # 99 degrees of freedom: above this once in 10,000
        assert abs(np.corrcoef(values[:-1], values[1:])[0, 1]) < 0.0125  # 4 standard deviations


def test_children_have_seeds_of_their_own_and_the_first_has_its_parents() -> None:
    """Behaviour 31: they follow from the request's seed, whatever it is; neighbouring seeds share none."""
    for seed in (0, 1, 2**63 - 1, 2**64 - 1):
        seeds = child_seeds(seed, 64)
        assert seeds[0] == seed
        assert seeds[:5] == child_seeds(seed, 5)
        assert len({*seeds, *child_seeds((seed + 1) % 2**64, 64)}) >= 127
        assert all(0 <= child < 2**64 for child in seeds)
    assert child_seeds(7, 1) == [7]


def test_seeds_and_positions_do_not_stand_in_for_each_other() -> None:
    grid = draws(np.repeat(np.arange(100), 100), np.tile(np.arange(100), 100))
    assert len(set(grid.tolist())) == 10_000
