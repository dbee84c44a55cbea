"""Ops of recurrent layers, in odd sizes, and steps of sequences that go on from states in a cache."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from quire_kernels import StateRows, causal_conv, gated_delta_rule, rg_lru, selective_scan, state_space

__all__ = ["OPS", "Op", "Step", "make_op", "state_rows", "whole"]

NUM_BLOCKS, NUM_DRAFTS = 12, 4
Caches = tuple[torch.Tensor, torch.Tensor]


@dataclass(frozen=True)
class Step:
    """What a step computes of one sequence."""

    first: int
    num_rows: int
    source: int
    target: int
    stores: Sequence[tuple[int, int]]
    """(length, block)"""
    num_replayed: int = 0


def state_rows(steps: Sequence[Step], device: torch.device | None = None) -> StateRows:
    """Of these sequences, with room for one more that is not there."""

    def ints(numbers: Sequence[int]) -> torch.Tensor:
        return torch.tensor(numbers, dtype=torch.int64, device=device)

    def starts(lengths: list[int]) -> list[int]:
        return [sum(lengths[:i]) for i in range(len(lengths) + 1)]

    stores = [store for step in steps for store in step.stores]
    return StateRows(
        positions=ints([step.first + row for step in steps for row in range(step.num_rows)]),
        query_start_loc=ints([*starts([step.num_rows for step in steps]), 1]),
        sources=ints([*(step.source for step in steps), 99]),
        num_replayed=ints([*(step.num_replayed for step in steps), 99]),
        targets=ints([*(step.target for step in steps), 99]),
        store_start_loc=ints([*starts([len(step.stores) for step in steps]), 0]),
        store_lens=ints([length for length, _ in stores]),
        store_blocks=ints([block for _, block in stores]),
    )


@dataclass(frozen=True)
class Op:
    """An op with its parameters: the inputs of a token are parts of one row."""

    widths: Sequence[int]
    state_shape: Sequence[int]
    ring_shape: Sequence[int]
    compute: Callable[..., torch.Tensor]

    def tokens(
        self, num_tokens: int, seed: int, dtype: torch.dtype, device: torch.device | None = None
    ) -> torch.Tensor:
        """Rows of random inputs, with other numbers around these."""
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(num_tokens, sum(self.widths) + 5, generator=generator).to(device, dtype)

    def caches(self, device: torch.device | None = None) -> Caches:
        """States and rings, with what others have left in them, and gaps between the blocks."""
        generator = torch.Generator().manual_seed(99)
        state, ring = (
            torch.randn(NUM_BLOCKS, 2, *shape, generator=generator).to(device)[:, 1]
            for shape in (self.state_shape, self.ring_shape)
        )
        return state, ring

    def __call__(self, tokens: torch.Tensor, caches: Caches, steps: Sequence[Step]) -> torch.Tensor:
        """The outputs of the rows, which are the tokens of the steps one after the other."""
        return self.run(tokens, caches, state_rows(steps, tokens.device))

    def run(self, tokens: torch.Tensor, caches: Caches, rows: StateRows) -> torch.Tensor:
        parts = tokens[:, 3:-2].split(list(self.widths), 1)
        return self.compute(parts, *caches, rows)


def make_op(name: str, device: torch.device | None = None) -> Op:
    """One of `OPS`."""
    generator = torch.Generator().manual_seed(7)

    def randn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(device)

    def heads(parts: Sequence[torch.Tensor], *sizes: int) -> list[torch.Tensor]:
        return [part.unflatten(1, (-1, size)) if size else part for part, size in zip(parts, sizes, strict=True)]

    kind, *sizes = OPS[name]
    if kind == "conv":
        channels, width, activation = sizes
        weight, bias = randn(channels, width), randn(channels) if activation == "silu" else None
        return Op(
            [channels], [0], [NUM_DRAFTS + width - 1, channels],
            lambda parts, _, ring, rows: causal_conv(parts[0], weight, bias, ring, rows, activation),
        )  # fmt: skip
    if kind == "delta":
        groups, count, size, width, gate_width = sizes
        decay, bias = randn(count).exp(), randn(count, gate_width)
        widths = [groups * size, groups * size, count * width, count * gate_width, count]
        return Op(
            widths, [count, size, width], [NUM_DRAFTS, sum(widths[1:])],
            lambda parts, state, ring, rows: gated_delta_rule(
                *heads(parts, size, size, width, gate_width, 0), decay, bias, state, ring, rows, 1.5
            ),
        )  # fmt: skip
    if kind == "space":
        groups, count, channels, size = sizes
        skip = randn(count) if groups > 1 else None
        decay, bias = randn(count).exp(), randn(count)
        widths = [count * channels, count, groups * size, groups * size]
        return Op(
            widths, [count, channels, size], [NUM_DRAFTS, sum(widths[:3])],
            lambda parts, state, ring, rows: state_space(
                *heads(parts, channels, 0, size, size), decay, skip, bias, state, ring, rows, (0.1, 2.0)
            ),
        )  # fmt: skip
    if kind == "lru":
        count, size = sizes
        channels, bias = count * size, randn(count, 2 * size)
        decay = randn(channels).exp()
        return Op(
            [channels, 2 * channels], [channels], [NUM_DRAFTS, 3 * channels],
            lambda parts, state, ring, rows: rg_lru(
                parts[0], parts[1].unflatten(1, (count, -1)), bias, decay, state, ring, rows
            ),
        )  # fmt: skip
    channels, size = sizes
    parameters = (randn(channels, size).exp(), randn(channels), randn(channels))
    widths = [channels, channels, size, size]
    return Op(
        widths, [channels, size], [NUM_DRAFTS, sum(widths[:3])],
        lambda parts, state, ring, rows: selective_scan(*parts, *parameters, state, ring, rows),
    )  # fmt: skip


OPS: dict[str, tuple[Any, ...]] = {
    "conv of 4": ("conv", 37, 4, "silu"),
    "conv of 2": ("conv", 130, 2, "none"),
    "delta": ("delta", 1, 3, 24, 40, 1),
    "delta of wide heads": ("delta", 2, 4, 64, 96, 1),
    "delta by channel": ("delta", 2, 2, 18, 33, 18),
    "space": ("space", 3, 6, 20, 24),
    "space of wide heads": ("space", 1, 2, 48, 130),
    "mamba": ("mamba", 37, 16),
    "mamba of few numbers": ("mamba", 70, 5),
    "lru": ("lru", 3, 13),
    "lru of wide heads": ("lru", 2, 147),
}


def whole(op: Op, tokens: torch.Tensor, block: int = 0) -> tuple[torch.Tensor, Caches]:
    """The outputs of a sequence in one step, and the caches, with its state in `block`."""
    caches, length = op.caches(tokens.device), len(tokens)
    return op(tokens, caches, [Step(0, length, -1, block, [(length, block)])]), caches
