"""What a rank does with its experts besides computing them: it counts their tokens, and moves their weights."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

from quire_engine.messages import ExpertMove
from quire_engine.models.decoder import Decoder
from quire_engine.models.layers.balanced_experts import BalancedExperts

PUBLISHED_STEPS = 32
"""On a GPU the numbers are copied every so many steps: hundreds of kilobytes for a large model."""


class ExpertCounters:
    """Makes the layers of a model count the tokens that they send to each expert, in `tokens`, [layers, experts] of the
    board. The kernels that route tokens count them: on the CPU right on the board, and no step sends a message about
    it."""

    def __init__(self, tokens: npt.NDArray[np.int64], model: Decoder, device: torch.device) -> None:
        mixtures = model.mixtures
        self._numbers = list(mixtures)
        self._tokens = tokens
        self._steps = 0
        self._copied: torch.cuda.Event | None = None
        if device.type == "cpu":
            for number, mixture in mixtures.items():
                mixture.counts_X = torch.from_numpy(tokens[number])
            return
        shape = (len(mixtures), tokens.shape[1])
        self._on_device = torch.zeros(shape, dtype=torch.int64, device=device)
        self._on_host = torch.zeros(shape, dtype=torch.int64, pin_memory=True)
        self._copied = torch.cuda.Event()  # type: ignore[no-untyped-call]
        for mixture, counts_X in zip(mixtures.values(), self._on_device, strict=True):
            mixture.counts_X = counts_X

    def reset(self) -> None:
        self._tokens[self._numbers] = 0
        if self._copied is not None:
            self._on_device.zero_()
            self._on_host.zero_()

    def publish(self) -> None:
        """Call it after each step. On a GPU it starts a copy of the numbers now and then, and publishes the last."""
        if self._copied is None:
            return
        self._steps += 1
        if self._steps % PUBLISHED_STEPS == PUBLISHED_STEPS // 2 and self._copied.query():  # type: ignore[no-untyped-call]
            self._tokens[self._numbers] = self._on_host.numpy()
        if self._steps % PUBLISHED_STEPS == 0 and self._copied.query():  # type: ignore[no-untyped-call]
            self._on_host.copy_(self._on_device, non_blocking=True)
            self._copied.record()


class ExpertMoves:
    """Moves experts in two phases: the first needs all ranks of a stage and may fail; the second is local. So all ranks
    have the same placement in any case: the core calls for the second phase only after the first has succeeded on
    all ranks."""

    def __init__(self, model: Decoder) -> None:
        mixtures = model.mixtures.items()
        self._mixtures = {number: one for number, one in mixtures if isinstance(one, BalancedExperts)}
        self._fetched: list[tuple[BalancedExperts, int, int, list[torch.Tensor] | None]] = []

    def fetch(self, moves: Sequence[ExpertMove]) -> None:
        """Exchange weights with the other ranks, and keep them aside; those of earlier calls are dropped. The moves are
        of all stages, and their sources those before any of these moves."""
        self._fetched.clear()
        for layer, physical, source in moves:
            mixture = self._mixtures.get(layer)
            if mixture is not None:
                weights = mixture.fetch(physical, source)
                self._fetched.append((mixture, physical, mixture.placement[source], weights))
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.synchronize()  # what was sent may be overwritten next

    def place(self) -> None:
        """Put all that was fetched in its place."""
        for mixture, physical, logical, weights in self._fetched:
            mixture.place(physical, logical, weights)
        for mixture in {id(mixture): mixture for mixture, *_ in self._fetched}.values():
            mixture.update_tables()
        self._fetched.clear()
