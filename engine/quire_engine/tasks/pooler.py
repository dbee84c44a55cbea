"""Pooler: hidden states of prompts → embeddings and scores, on the rank that returns them.

A prompt's hidden states come chunk by chunk. Its `Pool` keeps what it needs of each, so that the result does not depend
on the chunks. What follows is computed once per request, in float32::

    hidden states ─► pool ─► cut to `dimensions` ─► normalize
"""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch

from quire_engine.pooling import TOKEN_TASKS, PoolingParams

Int64Array = npt.NDArray[np.int64]

FIXED_POINT, WEIGHTED_FIXED_POINT = float(1 << 26), float(1 << 18)
"""Hidden states are rounded to multiples of its inverse before they are summed: sums of integers do not depend on the
order, and so not on the chunks. In float64 they are exact below 2^53."""


class Pool:
    """Keeps what one prompt's result needs of its hidden states. A preempted request begins with a new one."""

    def __init__(self, params: PoolingParams) -> None:
        self.params = params

    def add(self, hidden_TE: torch.Tensor, token_ids_T: Int64Array, start: int) -> None:
        """Take the hidden states of the next positions, which are overwritten after the call; and their tokens."""
        raise NotImplementedError

    def result(self) -> torch.Tensor:
        """[E], or [rows, E] of a task of tokens, float32; once the prompt's last position was added."""
        raise NotImplementedError


class LastPool(Pool):
    """The hidden state of the last token."""

    def add(self, hidden_TE: torch.Tensor, token_ids_T: Int64Array, start: int) -> None:
        self._last_E = hidden_TE[-1].to(torch.float32, copy=True)

    def result(self) -> torch.Tensor:
        return self._last_E


class FirstPool(Pool):
    """The hidden state of the first token, `[CLS]`."""

    def add(self, hidden_TE: torch.Tensor, token_ids_T: Int64Array, start: int) -> None:
        if start == 0:
            self._first_E = hidden_TE[0].to(torch.float32, copy=True)

    def result(self) -> torch.Tensor:
        return self._first_E


class SumPool(Pool):
    """A mean over all tokens; `WEIGHTED_MEAN` weighs each by its position, from 1."""

    _sum: torch.Tensor | None = None
    _weight = 0

    def __init__(self, params: PoolingParams) -> None:
        super().__init__(params)
        self._is_weighted = params.pooling_type == "WEIGHTED_MEAN"
        self._scale = WEIGHTED_FIXED_POINT if self._is_weighted else FIXED_POINT

    def add(self, hidden_TE: torch.Tensor, token_ids_T: Int64Array, start: int) -> None:
        number = len(hidden_TE)
        fixed_TE = (hidden_TE.double() * self._scale).round_()
        if self._is_weighted:
            weights_T = torch.arange(start + 1, start + number + 1, dtype=torch.float64, device=hidden_TE.device)
            fixed_TE *= weights_T.unsqueeze(-1)
        self._weight += number * (2 * start + number + 1) // 2 if self._is_weighted else number
        new_E = fixed_TE.sum(0)
        self._sum = new_E if self._sum is None else self._sum + new_E

    def result(self) -> torch.Tensor:
        assert self._sum is not None
        divisor = self._weight**0.5 if self.params.pooling_type == "MEAN_SQRT_LEN" else self._weight
        return (self._sum / (divisor * self._scale)).float()


class MaxPool(Pool):
    """The greatest of each number over all tokens."""

    _max: torch.Tensor | None = None

    def add(self, hidden_TE: torch.Tensor, token_ids_T: Int64Array, start: int) -> None:
        new_E = hidden_TE.float().amax(0)
        self._max = new_E if self._max is None else torch.maximum(self._max, new_E)

    def result(self) -> torch.Tensor:
        assert self._max is not None
        return self._max


class RowsPool(Pool):
    """The hidden states of all tokens, or of those with the id `step_tag_id`."""

    def __init__(self, params: PoolingParams) -> None:
        super().__init__(params)
        self._chunks: list[torch.Tensor] = []

    def add(self, hidden_TE: torch.Tensor, token_ids_T: Int64Array, start: int) -> None:
        tag = self.params.step_tag_id
        if tag is not None:
            hidden_TE = hidden_TE[torch.from_numpy(np.flatnonzero(token_ids_T == tag)).to(hidden_TE.device)]
        self._chunks.append(hidden_TE.to(torch.float32, copy=True))

    def result(self) -> torch.Tensor:
        return torch.cat(self._chunks)


POOLS: dict[str, Callable[[PoolingParams], Pool]] = {
    "LAST": LastPool, "CLS": FirstPool, "MEAN": SumPool, "MEAN_SQRT_LEN": SumPool, "WEIGHTED_MEAN": SumPool,
    "MAX": MaxPool, "ALL": RowsPool, "STEP": RowsPool,
}  # fmt: skip
"""By `pooling_type`."""


def make_pool(params: PoolingParams) -> Pool:
    """The pool of a request, whose parameters are resolved."""
    assert params.pooling_type is not None
    return POOLS[params.pooling_type](params)


class Pooler:
    """Makes results of what pools keep."""

    def finish(self, pool: Pool) -> torch.Tensor:
        """The result of a request whose prompt is computed, float32: [D], or [rows, D] of a task of tokens."""
        rows_RE, params = pool.result(), pool.params
        is_one = params.task not in TOKEN_TASKS
        if is_one:
            rows_RE = rows_RE.unsqueeze(0)
        if params.dimensions is not None:
            rows_RE = rows_RE[:, : params.dimensions]
        if params.normalize:
            rows_RE = torch.nn.functional.normalize(rows_RE, dim=-1)
        return (rows_RE[0] if is_one else rows_RE).contiguous()
