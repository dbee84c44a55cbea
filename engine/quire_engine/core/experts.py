"""ExpertLoadReport: statistics of the tokens that the ranks have counted for each expert.

ExpertBalancer: moves experts between ranks, so that each rank computes about as many tokens.

::

    step            … 2999 3000 3001 3002 3003 …         step_interval = 3000, window_size = 1000
    load counted    ├─ 1000 ─┤
    layer 0                   decide, move, move          a few experts between two steps
    layer 1                                  decide …     one layer after the other

After each move the placement is complete, and requests are computed with it. It is not stored: an engine that is
started again begins with the first placement.
"""

import logging
import time
from collections import deque
from collections.abc import Callable

import numpy as np

from quire_engine.config import ParallelConfig
from quire_engine.errors import EngineDeadError
from quire_engine.executor import Executor
from quire_engine.executor.base import Int64Array
from quire_engine.messages import MoveExperts, PlaceExperts
from quire_engine.models.layers.expert_placement import (
    FloatArray,
    balanced,
    first_placement,
    next_moves,
    rank_shares,
    shares_of_ranks,
)
from quire_engine.stats import ExpertLoadStats

logger = logging.getLogger(__name__)

MOVED_BYTES = 32 << 20
"""Size of the weights that are moved between two steps, about; at least two experts, which may change places. Shared
memory takes some ten milliseconds for them."""
WORTH_IT = 0.95
"""A layer's experts move if its busiest rank then has at most this share of its present load."""
REPORT_SECONDS = 1.0
"""Interval between two reports: one of a large model has ten thousand numbers."""


class ExpertBalancer:
    """Call `after_step` after every step.

    Args:
        executor: its ranks have the experts.
        parallel: how the experts are divided, and the settings of the balancer.
        shape: numbers of layers and of experts in each.
        expert_bytes: size of an expert's weights, about.
    """

    def __init__(self, executor: Executor, parallel: ParallelConfig, shape: tuple[int, int], expert_bytes: int) -> None:
        self._executor, self._config = executor, parallel.eplb_config
        self._num_ranks, self._shape = parallel.tensor_parallel_size, shape
        self._limit = max(MOVED_BYTES // expert_bytes, 2)
        # Every expert of a layer is on all ranks of its stage, as far as this goes; the shares among these follow.
        stages = shares_of_ranks(shape, self._num_ranks, parallel.pipeline_parallel_size, enable_expert_parallel=False)
        self._stages = stages[:, 0].argmax(1) // self._num_ranks
        self.shares: FloatArray = np.zeros_like(stages)
        """[layers, experts, ranks], the share of an expert's tokens that each rank computes now."""
        self._num_steps = 0
        self._earlier: deque[tuple[int, Int64Array]] = deque()
        """Numbers of steps, and the totals after them, at the beginning of windows."""
        self.reset()

    def reset(self) -> None:
        """Begin with the first placement: the ranks have loaded their weights."""
        placement = first_placement(self._shape[1], self._config.num_redundant_experts)
        self.placements = [placement.copy() for _ in range(self._shape[0])]
        """By layer, as in `models/expert_placement.py`."""
        self._load: FloatArray = np.zeros(self._shape)
        self._waiting: deque[int] = deque()
        self._target: tuple[int, list[int]] | None = None
        for layer in range(self._shape[0]):
            self._set_shares(layer)

    @property
    def is_moving(self) -> bool:
        """Whether something has to move, or is to be decided."""
        return self._target is not None or bool(self._waiting)

    def after_step(self) -> None:
        """Note the step, and move some experts if it is time.

        Raises:
            EngineDeadError: a rank is lost.
        """
        self._num_steps += 1
        window, interval = self._config.window_size, self._config.step_interval
        if (self._num_steps + window) % interval == 0:
            self._earlier.append((self._num_steps, self._read()))
        if self._num_steps % interval == 0 and not self.is_moving:  # else this time is left out
            self._load = self._load_of_window(self._num_steps - window)
            self._waiting = deque(np.flatnonzero(self._load.any(1)).tolist())
        if self.is_moving:
            self._go_on()

    def _read(self) -> Int64Array:
        tokens = self._executor.expert_tokens()
        assert tokens is not None, "these ranks do not count tokens"
        return tokens

    def _load_of_window(self, start: int) -> FloatArray:
        """The tokens after step `start`, [layers, experts]."""
        while self._earlier and self._earlier[0][0] < start:
            self._earlier.popleft()
        tokens = self._read()
        if self._earlier and self._earlier[0][0] == start and (self._earlier[0][1] <= tokens).all():
            tokens = tokens - self._earlier[0][1]
        return tokens.astype(np.float64)

    def _go_on(self) -> None:
        """Make the next moves of a layer, or plan those of the next layer."""
        if self._target is None:
            layer = self._waiting.popleft()
            target = balanced(self._load[layer].tolist(), self.placements[layer], self._num_ranks)
            before, after = self._busiest(layer, self.placements[layer]), self._busiest(layer, target)
            if after <= WORTH_IT * before:
                logger.info("experts of layer %d: the busiest rank goes from %.0f to %.0f tokens", layer, before, after)
                self._target = layer, target
            return
        layer, target = self._target
        placement, moves = next_moves(self.placements[layer], target, self._num_ranks, self._limit)
        if not moves:
            self._target = None
            return
        try:
            self._executor.collective_rpc(MoveExperts([(layer, *move) for move in moves]))
        except EngineDeadError:
            raise
        except Exception as error:
            logger.warning("experts stay where they are until the next time: %s", error)
            self._waiting, self._target = deque(), None
            return
        try:
            self._executor.collective_rpc(PlaceExperts())
        except EngineDeadError:
            raise
        except Exception as error:  # the ranks may disagree now
            raise EngineDeadError(f"experts could not be moved: {error}") from error
        self.placements[layer] = placement
        self._set_shares(layer)

    def _busiest(self, layer: int, placement: list[int]) -> float:
        shares = rank_shares(placement, self._shape[1], self._num_ranks)
        return float((self._load[layer] @ shares).max())

    def _set_shares(self, layer: int) -> None:
        first = self._stages[layer] * self._num_ranks
        own = rank_shares(self.placements[layer], self._shape[1], self._num_ranks)
        self.shares[layer, :, first : first + self._num_ranks] = own


def imbalance(load_LN: FloatArray, num_sharing: int) -> FloatArray:
    """The largest number of each row divided by its mean, 1 or more; rows of zeros are left out.

    Args:
        load_LN: at least 0.
        num_sharing: how many numbers of a row may be more than 0.
    """
    load_LN = load_LN[load_LN.any(1)]
    ratios: FloatArray = load_LN.max(1) * num_sharing / load_LN.sum(1)
    return ratios


class ExpertLoadReport:
    """Reports the tokens that the ranks have counted since the last report.

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
            read: the totals, [layers, experts]: `Executor.expert_tokens`.
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
