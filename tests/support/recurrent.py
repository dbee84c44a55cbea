"""A decoder of which some layers keep a state instead of keys and values, and the same in transformers' decoder."""

from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from quire_engine.distributed import ParallelState
from quire_engine.kv_cache import STATE_WINDOW, RecurrentSpec
from quire_engine.models.checkpoints.config import CheckpointConfig
from quire_engine.models.decoder import Decoder
from quire_engine.models.loader import load_model
from quire_engine.models.step_context import StepContext
from quire_engine.worker import model_loader
from support.checkpoints import with_windows
from torch import nn

__all__ = ["IN_PROCESSES", "LAYERS", "PlainRecurrent", "install"]

LAYERS = (0, 2)
"""The recurrent ones, of three."""
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
        self.spec = RecurrentSpec(((width,),))

    def forward(self, hidden_TE: torch.Tensor, states_NRF: torch.Tensor, context: StepContext) -> torch.Tensor:
        out_TE = torch.zeros_like(hidden_TE)
        size, num_rows = context.block_size, states_NRF.shape[1]
        for request, (start, end) in enumerate(pairwise(context.query_start_loc.tolist())):
            blocks, first = context.block_table[request].tolist(), int(context.positions[start])
            state = torch.zeros_like(self.decay)
            if first:
                state = states_NRF[blocks[(first - 1) // size], (first - 1) % num_rows].clone()
            for row, position in enumerate(range(first, first + end - start), start):
                state = state * self.decay + hidden_TE[row, self.own]
                out_TE[row, self.own] = states_NRF[blocks[position // size], position % num_rows] = state
        return out_TE if self.group is None else self.group.all_reduce(out_TE)


class PlainRecurrent(nn.Module):
    """The same in transformers' decoder, over a whole text."""

    def forward(self, hidden_states: torch.Tensor, **_: Any) -> tuple[torch.Tensor, None]:
        out, decay = torch.zeros_like(hidden_states), decay_of(hidden_states.shape[-1])
        state = torch.zeros_like(decay)
        for row, own in enumerate(hidden_states[0]):
            out[0, row] = state = state * decay + own
        return out, None


def install(setattr: Callable[[Any, str, Any], None]) -> None:
    """Make every decoder that is loaded one with such layers."""
    from_folder = CheckpointConfig.from_folder

    def with_states(folder: Path) -> CheckpointConfig:
        config = from_folder(folder)
        windows = tuple(STATE_WINDOW if number in LAYERS else None for number in range(config.num_layers))
        return with_windows(config, windows)

    class Hybrid(Decoder):
        recordable = None  # type: ignore[assignment]

    def load(*arguments: Any, **named: Any) -> Decoder:
        model = load_model(*arguments, **named)
        model.__class__ = Hybrid
        for number, layer in model.layers.items():
            if int(number) in LAYERS:
                layer.self_attn = Recurrent(model.hidden_size, model.parallel)
        return model

    setattr(CheckpointConfig, "from_folder", with_states)
    setattr(model_loader, "load_model", load)
