"""A decoder of which some layers keep a state instead of keys and values, and the same in transformers' decoder."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from quire_engine.distributed import ParallelState
from quire_engine.kv_cache import STATE, RecurrentSpec
from quire_engine.models.checkpoints.config import CheckpointConfig
from quire_engine.models.decoder import Decoder
from quire_engine.models.loader import load_model
from quire_engine.models.step_context import StepContext
from quire_engine.worker import model_loader
from support.checkpoints import with_windows
from torch import nn

__all__ = ["IN_PROCESSES", "LAYERS", "SNAPSHOT_TOKENS", "PlainRecurrent", "install"]

LAYERS = (0, 2)
"""The recurrent ones, of three."""
SNAPSHOT_TOKENS = 12
"""How many tokens there are between snapshots of their states."""
IN_PROCESSES = """
import sys
if sys.orig_argv[-1] in ("quire_engine.core.core_process", "quire_engine.worker.worker_process"):
    from support.recurrent import install
    install(setattr)
"""
"""A `sitecustomize.py` with which engines in processes of their own have such layers."""


def decay_of(size: int) -> torch.Tensor:
    """How much of each feature of the state stays."""
    return torch.linspace(0.3, 0.97, size)


class Recurrent(nn.Module):
    """In the place of a decoder's attention: a decaying sum of each feature. A rank has some of the features.

    Args:
        size: of the hidden states.
        parallel: the rank.
    """

    def __init__(self, size: int, parallel: ParallelState) -> None:
        super().__init__()
        self.group, num_ranks = parallel.tensor_group, parallel.tensor_parallel_size
        width = size // num_ranks
        self.own = slice(parallel.tensor_rank * width, (parallel.tensor_rank + 1) * width)
        self.decay = decay_of(size)[self.own]
        self.spec = RecurrentSpec(((width,),), ((0, width),))

    def forward(
        self, hidden_TE: torch.Tensor, states_NF: torch.Tensor, ring_NRF: torch.Tensor, context: StepContext
    ) -> torch.Tensor:
        out_TE, size = torch.zeros_like(hidden_TE), ring_NRF.shape[1]
        assert context.states is not None
        for one in context.states.sequences():
            state = torch.zeros_like(self.decay) if one.source < 0 else states_NF[one.source].clone()
            replayed = [
                ring_NRF[one.source, position % size].clone()
                for position in range(one.first - one.num_replayed, one.first)
            ]
            rows = hidden_TE[one.start : one.end, self.own]
            for number, row in enumerate([*replayed, *rows], 1):
                state = state * self.decay + row
                if number > one.num_replayed:
                    out_TE[one.start + number - one.num_replayed - 1, self.own] = state
                for length, block in one.stores:
                    if length == number:
                        states_NF[block] = state
            if size:
                for position, row in list(enumerate(rows, one.first))[-size:]:
                    ring_NRF[one.target, position % size] = row
        return out_TE if self.group is None else self.group.all_reduce(out_TE)


class PlainRecurrent(nn.Module):
    """The same in transformers' decoder, over a whole text."""

    def forward(self, hidden_states: torch.Tensor, **_: Any) -> tuple[torch.Tensor, None]:
        out, decay = torch.zeros_like(hidden_states), decay_of(hidden_states.shape[-1])
        state = torch.zeros_like(decay)
        for row, own in enumerate(hidden_states[0]):
            out[0, row] = state = state * decay + own
        return out, None


def install(
    setattr: Callable[[Any, str, Any], None], layers: tuple[int, ...] = LAYERS, is_captured: bool = False
) -> None:
    """Make every decoder that is loaded one with such layers.

    Args:
        setattr: sets what is to be replaced.
        layers: their numbers.
        is_captured: whether steps may be captured, which no C++ kernel has to compute.
    """
    from_folder = CheckpointConfig.from_folder

    def with_states(folder: Path) -> CheckpointConfig:
        config = from_folder(folder)
        windows = tuple(STATE if number in layers else None for number in range(config.num_layers))
        return with_windows(config, windows)

    class Hybrid(Decoder):
        if not is_captured:
            recordable = None  # type: ignore[assignment]

    def load(*arguments: Any, **named: Any) -> Decoder:
        model = load_model(*arguments, **named)
        model.__class__ = Hybrid
        for number, layer in model.layers.items():
            if int(number) in layers:
                layer.self_attn = Recurrent(model.hidden_size, model.parallel)
        return model

    setattr(CheckpointConfig, "from_folder", with_states)
    setattr(CheckpointConfig, "state_tokens", SNAPSHOT_TOKENS)
    setattr(model_loader, "load_model", load)
