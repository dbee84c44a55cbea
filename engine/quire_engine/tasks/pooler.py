"""Pooler: hidden states of prompts → embeddings and scores, on the rank that returns them.

A prompt's hidden states come chunk by chunk. Its `Pool` keeps what it needs of each, so that the result does not depend
on the chunks. What follows is computed once per request, in float32::

    embeddings    pool ─► Dense ─► cut to `dimensions` ─► normalize
    scores        pool ─► head ─► softmax or sigmoid
"""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from quire_kernels import linear, pack_linear

from quire_engine.models.checkpoints import open_checkpoint
from quire_engine.models.checkpoints.config import CheckpointConfig, ServedCheckpoint
from quire_engine.models.loader import load_head, random_tensors, read_tensors
from quire_engine.models.options import HeadStep
from quire_engine.pooling import HEAD_TASKS, TOKEN_TASKS, PoolingParams
from quire_engine.tasks.reading import read_modules

Int64Array = npt.NDArray[np.int64]

FIXED_POINT = float(1 << 18)
"""Hidden states are rounded to multiples of its inverse before weighted ones are summed: sums of integers do not depend
on the order, and so not on the chunks. In float64 they are exact below 2^53."""


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


class MeanPool(Pool):
    """A mean over all tokens. It takes sums of hidden states, which are computed for all requests of a step at once."""

    _sum: torch.Tensor | None = None
    _weight = 0

    def add_sum(self, sum_E: torch.Tensor, weight: int) -> None:
        """Take the sum of the hidden states of the next positions, and how many they are."""
        self._sum = sum_E if self._sum is None else self._sum + sum_E
        self._weight += weight

    def result(self) -> torch.Tensor:
        assert self._sum is not None
        divisor = self._weight**0.5 if self.params.pooling_type == "MEAN_SQRT_LEN" else self._weight
        return (self._sum / divisor).float()


class WeightedPool(Pool):
    """A mean that weighs each token by its position, from 1."""

    def __init__(self, params: PoolingParams) -> None:
        super().__init__(params)
        self._mean = MeanPool(params)

    def add(self, hidden_TE: torch.Tensor, token_ids_T: Int64Array, start: int) -> None:
        end = start + len(hidden_TE)
        weights_T = torch.arange(start + 1, end + 1, dtype=torch.float64, device=hidden_TE.device)
        fixed_TE = (hidden_TE.double() * FIXED_POINT).round_() * weights_T.unsqueeze(-1)
        self._mean.add_sum(fixed_TE.sum(0) / FIXED_POINT, (end - start) * (start + end + 1) // 2)

    def result(self) -> torch.Tensor:
        return self._mean.result()


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
    "LAST": LastPool, "CLS": FirstPool, "MEAN": MeanPool, "MEAN_SQRT_LEN": MeanPool, "WEIGHTED_MEAN": WeightedPool,
    "MAX": MaxPool, "ALL": RowsPool, "STEP": RowsPool,
}  # fmt: skip
"""By `pooling_type`."""


def make_pool(params: PoolingParams) -> Pool:
    """The pool of a request, whose parameters are resolved."""
    assert params.pooling_type is not None
    return POOLS[params.pooling_type](params)


class Layers:
    """Linear layers in float32, each with its activation and norm. A row's result does not depend on the others.

    Args:
        steps: the layers.
        tensors: theirs by name, float32.
        device: where they compute.
    """

    def __init__(self, steps: Sequence[HeadStep], tensors: Mapping[str, torch.Tensor], device: torch.device) -> None:
        self._steps = steps
        there = {name: tensor.to(device) for name, tensor in tensors.items()}
        self._weights = [pack_linear(there[f"{one.name}.weight"], there.get(f"{one.name}.bias")) for one in steps]
        self._norms = [
            None if one.norm is None else (there[f"{one.norm}.weight"], there.get(f"{one.norm}.bias")) for one in steps
        ]

    def __call__(self, rows: torch.Tensor) -> torch.Tensor:
        """[…, in] -> […, out]."""
        shape, rows = rows.shape[:-1], rows.reshape(-1, rows.shape[-1])
        for step, weight, norm in zip(self._steps, self._weights, self._norms, strict=True):
            rows = ACTIVATIONS[step.activation](linear(rows.contiguous(), weight))
            if norm is not None:
                rows = F.layer_norm(rows, (step.size,), *norm, eps=step.norm_eps)
        return rows.view(*shape, rows.shape[-1])


ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "none": lambda rows: rows,
    "tanh": torch.tanh,
    "relu": F.relu,
    "gelu": F.gelu,
    "gelu_tanh": partial(F.gelu, approximate="tanh"),
    "silu": F.silu,
    "sigmoid": torch.sigmoid,
    "softmax": partial(torch.softmax, dim=-1),
}


class Pooler:
    """Makes results of what pools keep.

    Args:
        head: scores classes, if the checkpoint does.
        activation: makes probabilities of the scores.
        dense: layers of an embedding, if it has any.
        dense_of_tokens: they are also those of each token's.
    """

    def __init__(
        self,
        head: Layers | None = None,
        activation: str = "none",
        dense: Sequence[Layers] = (),
        dense_of_tokens: bool = False,
    ) -> None:
        self._head, self._activation, self._dense = head, activation, dense
        self._dense_of_tokens = dense_of_tokens

    @classmethod
    def load(cls, folder: Path, checkpoint: ServedCheckpoint, device: torch.device, *, is_dummy: bool) -> "Pooler":
        """The pooler of a checkpoint.

        Args:
            folder: the checkpoint, or its GGUF file.
            checkpoint: its configuration.
            device: where the hidden states are.
            is_dummy: the weights are random.

        Raises:
            CheckpointError: a tensor is missing, damaged or of the wrong shape.
        """
        head, size = checkpoint.head, checkpoint.hidden_size
        if head is not None:
            assert isinstance(checkpoint, CheckpointConfig)
            tensors = random_tensors(head.shapes(size)) if is_dummy else load_head(folder, checkpoint)
            return cls(Layers(head.steps, tensors, device), head.activation)
        modules = read_modules(folder, size) if folder.is_dir() else None
        if modules is None:
            return cls()
        dense = []
        for one in modules.dense:
            shapes = one.step.shapes(one.in_features)
            stored = {} if is_dummy else open_checkpoint(one.folder).tensors
            tensors = random_tensors(shapes) if is_dummy else read_tensors(one.folder, shapes, stored)
            dense.append(Layers([one.step], tensors, device))
        return cls(dense=dense, dense_of_tokens=modules.pooling_type is None)

    def finish(self, pool: Pool) -> torch.Tensor:
        """The result of a request whose prompt is computed, float32: [D], or [rows, D] of a task of tokens."""
        rows, params = pool.result(), pool.params
        if params.task in HEAD_TASKS:
            assert self._head is not None
            rows = self._head(rows)
            if params.returned_token_ids is not None:
                rows = rows[..., list(params.returned_token_ids)]
            if params.use_activation:
                rows = ACTIVATIONS[self._activation](rows)
        else:
            for layers in self._dense if self._dense_of_tokens or params.task not in TOKEN_TASKS else ():
                rows = layers(rows)
            if params.dimensions is not None:
                rows = rows[..., : params.dimensions]
            if params.normalize:
                rows = F.normalize(rows, dim=-1)
        return rows.contiguous()
