"""Statistics of few runs against brute force and simulation."""

import itertools

import numpy as np
import pytest
from scipy import stats

from tf_teaforn.experiments.statistics import difference, mean_and_error


def test_mean_and_error():
    values = [27.1, 27.4, 26.9, 27.0, 27.3]
    mean, error = mean_and_error(values)
    assert mean == pytest.approx(27.14)
    # The sample variance is half the mean squared difference of two draws.
    pairs = [(a - b) ** 2 / 2 for a, b in itertools.combinations(values, 2)]
    assert error == pytest.approx((np.mean(pairs) / 5) ** 0.5)
    assert mean_and_error([3.0]) == (3.0, None)


def test_difference_is_the_t_test_s():
    a, b = [30.0, 30.4, 30.1], [30.7, 31.3, 30.8]
    found = difference(a, b)
    expected = stats.ttest_ind(b, a)
    assert found.mean / found.error == pytest.approx(expected.statistic)
    interval = expected.confidence_interval(0.95)
    assert (found.low, found.high) == pytest.approx((interval.low, interval.high))
    assert difference([1.0], [2.0, 3.0]) is None


def test_the_smallest_effect_is_found_four_times_in_five():
    """Three runs each, differing by what the unit deviation makes detectable."""
    rng = np.random.default_rng(0)
    unit = difference([-1.0, 0.0, 1.0], [-1.0, 0.0, 1.0])
    a = rng.normal(size=(20_000, 3))
    b = rng.normal(loc=unit.detectable, size=(20_000, 3))
    found = np.mean(stats.ttest_ind(b, a, axis=1).pvalue < 0.05)
    # The quantiles are the central t's, which is a little off for so few runs.
    assert found == pytest.approx(0.8, abs=0.04)
