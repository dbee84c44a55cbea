"""ExpertMoves: carries out, on a rank, what the engine core decides about the places of experts."""

from collections.abc import Sequence

import torch

from quire_engine.messages import ExpertMove
from quire_engine.models.decoder import Decoder
from quire_engine.models.layers.balanced_experts import BalancedExperts

__all__ = ["ExpertMoves"]


class ExpertMoves:
    """Experts in two steps: the first needs all ranks of a stage, and may fail on one of them; the second needs nobody.

    So all ranks have the same placement whatever happens: the core calls for the second only after the first has
    succeeded everywhere.

    Args:
        model: this rank's part.
    """

    def __init__(self, model: Decoder) -> None:
        mixtures = model.mixtures.items()
        self._mixtures = {number: one for number, one in mixtures if isinstance(one, BalancedExperts)}
        self._fetched: list[tuple[BalancedExperts, int, int, list[torch.Tensor] | None]] = []

    def fetch(self, moves: Sequence[ExpertMove]) -> None:
        """Exchange weights with the other ranks, and keep them aside; those of earlier calls are dropped.

        Args:
            moves: of all stages; the sources are those before any of these moves.
        """
        self._fetched.clear()
        for layer, physical, source in moves:
            mixture = self._mixtures.get(layer)
            if mixture is not None:
                weights = mixture.fetch(physical, source)
                self._fetched.append((mixture, physical, mixture.placement[source], weights))
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            torch.cuda.synchronize()  # what was sent may be overwritten next

    def place(self) -> None:
        """Have all that was fetched take its place."""
        for mixture, physical, logical, weights in self._fetched:
            mixture.place(physical, logical, weights)
        for mixture in {id(mixture): mixture for mixture, *_ in self._fetched}.values():
            mixture.update_tables()
        self._fetched.clear()
