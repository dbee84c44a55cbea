"""Histograms in the form of the text format: cumulative buckets, a sum and a count."""

from bisect import bisect_left
from collections.abc import Sequence
from itertools import accumulate


def cumulative_counts(buckets: Sequence[float], values: Sequence[float]) -> list[int]:
    """How many values are at most as large as each bound; the last entry is the number of all."""
    counts = [0] * (len(buckets) + 1)
    for value in values:
        counts[bisect_left(buckets, value)] += 1
    return list(accumulate(counts))


def bucket_bound(bound: float) -> str:
    """A bucket's upper bound as Triton writes it in the label `le`."""
    return "+Inf" if bound == float("inf") else f"{bound:.16g}"
