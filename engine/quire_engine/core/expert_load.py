"""ExpertLoadReport: makes statistics of the tokens that the ranks have counted by expert."""

import time
from collections.abc import Callable

import numpy as np

from quire_engine.config import ParallelConfig
from quire_engine.executor.base import Int64Array
from quire_engine.models.expert_placement import FloatArray, shares_of_ranks
from quire_engine.stats import ExpertLoadStats

__all__ = ["ExpertLoadReport", "imbalance"]

REPORT_SECONDS = 1.0
"""Between two reports: one of a large model has ten thousand numbers."""


def imbalance(load_LN: FloatArray, num_sharing: int) -> FloatArray:
    """The largest number of each row per its mean, 1 or more; rows of zeros are left out.

    Args:
        load_LN: at least 0.
        num_sharing: numbers of a row that could be more than 0.
    """
    load_LN = load_LN[load_LN.any(1)]
    ratios: FloatArray = load_LN.max(1) * num_sharing / load_LN.sum(1)
    return ratios


class ExpertLoadReport:
    """The growth of what the ranks count, from report to report.

    Args:
        parallel: how the experts are divided among the ranks.
        clock: seconds.
        shares: [layers, experts, ranks], how they are divided now; unset: as when they were loaded.
    """

    def __init__(
        self,
        parallel: ParallelConfig,
        clock: Callable[[], float] = time.monotonic,
        shares: Callable[[], FloatArray] | None = None,
    ) -> None:
        self._parallel = parallel
        self._shares = shares
        self._clock = clock
        self._reported_at = -REPORT_SECONDS
        self._tokens: Int64Array | None = None
        self._num_replicas = parallel.data_parallel_size if parallel.is_lockstep else 1
        """Engines that share the experts: this one's tokens are computed by the ranks of all."""
        self._rank_tokens = np.zeros(self._num_replicas * parallel.world_size)

    def make(self, read: Callable[[], Int64Array | None], is_idle: bool) -> ExpertLoadStats | None:
        """The numbers since the last time, if they are due and there are any.

        Args:
            read: the totals, [layers, experts]; see `Executor.expert_tokens`.
            is_idle: whether no step follows soon.
        """
        now = self._clock()
        if not is_idle and now < self._reported_at + REPORT_SECONDS:
            return None
        tokens = read()
        if tokens is None:
            return None
        before = np.zeros_like(tokens) if self._tokens is None else self._tokens
        if (tokens < before).any():  # the model was loaded again, or its cache allocated again
            before = np.zeros_like(tokens)
        grown = (tokens - before).astype(np.float64)
        if not grown.any():
            return None
        self._reported_at, self._tokens = now, tokens
        parallel = self._parallel
        if self._shares is not None:
            shares = self._shares()
        else:
            shares = shares_of_ranks(
                (grown.shape[0], grown.shape[1]), parallel.tensor_parallel_size, parallel.pipeline_parallel_size,
                parallel.enable_expert_parallel, self._num_replicas,
            )  # fmt: skip
        by_rank = np.einsum("lx,lxr->lr", grown, shares)
        self._rank_tokens += by_rank.sum(0)
        over_ranks = imbalance(by_rank, self._num_replicas * parallel.tensor_parallel_size)
        over_experts = imbalance(grown, tokens.shape[1])
        return ExpertLoadStats(
            tokens=[row.tolist() if row.any() else [] for row in tokens],
            rank_tokens=[round(number) for number in self._rank_tokens],
            mean_over_ranks=float(over_ranks.mean()),
            max_over_ranks=float(over_ranks.max()),
            mean_over_experts=float(over_experts.mean()),
            max_over_experts=float(over_experts.max()),
        )
