"""What few runs say: means, standard errors, differences, and the effect they could have shown."""

import dataclasses
import math
import statistics
from collections.abc import Sequence

from scipy import stats


def mean_and_error(values: Sequence[float]) -> tuple[float, float | None]:
    """Mean and standard error, the sample deviation / sqrt(n); None for one value."""
    if len(values) < 2:
        return statistics.fmean(values), None
    return statistics.fmean(values), statistics.stdev(values) / math.sqrt(len(values))


@dataclasses.dataclass(frozen=True)
class Difference:
    """Mean of one group of runs less that of another.

    Attributes:
        mean, error: the difference and its standard error.
        low, high: its 95% interval, Student's t with pooled variance.
        detectable: the smallest true difference that groups of this size and spread show at the 5%
            level four times in five.
    """

    mean: float
    error: float
    low: float
    high: float
    detectable: float


def difference(baseline: Sequence[float], values: Sequence[float]) -> Difference | None:
    """Two independent groups of equal variance; None if either has fewer than two values."""
    if min(len(baseline), len(values)) < 2:
        return None
    freedom = len(baseline) + len(values) - 2
    groups = (baseline, values)
    pooled = sum(statistics.variance(g) * (len(g) - 1) for g in groups) / freedom
    error = math.sqrt(pooled * sum(1 / len(group) for group in groups))
    mean = statistics.fmean(values) - statistics.fmean(baseline)
    half = float(stats.t.ppf(0.975, freedom)) * error
    power = float(stats.t.ppf(0.8, freedom)) * error
    return Difference(mean, error, mean - half, mean + half, half + power)
