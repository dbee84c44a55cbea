"""A persistent batch with requests, and what stands in for a model that drafts."""

import itertools
from collections.abc import Sequence
from typing import Any
from weakref import ref

import numpy as np
import torch
from quire_engine.kv_cache import AttentionSpec
from quire_engine.messages import NewRequestData
from quire_engine.models.step_context import KVCaches, StepContext
from quire_engine.sampling_params import SamplingParams
from quire_engine.worker.batch.input_batch import InputBatch
from support.scheduling import VOCAB_SIZE, next_token

__all__ = ["BLOCK_SIZE", "MAX_MODEL_LEN", "TableModel", "add_request", "append_tokens", "context_of", "make_batch"]

BLOCK_SIZE, MAX_MODEL_LEN = 4, 96


def make_batch(max_num_seqs: int = 4) -> InputBatch:
    return InputBatch(max_num_seqs, MAX_MODEL_LEN, BLOCK_SIZE, VOCAB_SIZE)


def add_request(
    batch: InputBatch, request_id: str, token_ids: Sequence[int], block_ids: Sequence[int], **params: Any
) -> int:
    """Add a request whose tokens are all known; returns its slot."""
    new = NewRequestData(
        request_id, list(token_ids), len(token_ids), SamplingParams.from_mapping(params), [], list(block_ids), 0
    )
    batch.add(new)
    return batch.slots[request_id]


def append_tokens(batch: InputBatch, slot: int, token_ids: Sequence[int]) -> None:
    """Tokens that were sampled for a request."""
    batch.settle_lists(np.array([slot]), batch.num_known_tokens[[slot]], [token_ids])


def context_of(tables: list[list[int]], num_computed: list[int], num_tokens: list[int], block_size: int) -> StepContext:
    """Of sequences whose next tokens follow those that are computed, in these blocks."""
    sequences = list(zip(tables, num_computed, num_tokens, strict=True))
    positions = [range(first, first + number) for _, first, number in sequences]
    slots = [
        table[position // block_size] * block_size + position % block_size
        for table, each in zip(tables, positions, strict=True)
        for position in each
    ]
    starts = [sum(num_tokens[:i]) for i in range(len(num_tokens) + 1)]
    return StepContext(
        positions=torch.tensor([position for each in positions for position in each]),
        slot_mapping=torch.tensor(slots),
        block_table=torch.tensor(tables),
        query_start_loc=torch.tensor(starts),
        seq_lens=torch.tensor([first + number for _, first, number in sequences]),
        block_size=block_size,
        plans={},
    )


class TableModel:
    """A `ChainModel` that continues text like the stand-in model of `support.scheduling`.

    Its keys are token ids. It reads all tokens up to a position back through the block table before it says what comes
    next, so a missing or wrong key is a wrong token.

    Args:
        token_offset: see `ChainModel`. With 1 it does not know token 0.
    """

    input_widths: Sequence[int] = [1]
    dtype = torch.float64
    state_specs: Sequence[AttentionSpec] = [AttentionSpec(num_heads=1, num_kv_heads=1, head_size=1)]

    def __init__(self, token_offset: int = 0) -> None:
        self.token_offset = token_offset
        self.passes: list[list[int]] = []
        """The positions that each pass computed."""
        self.num_blocks = -1
        self.caches: list[ref[torch.Tensor]] = []
        """The keys of the present caches."""

    def allocate_caches(self, num_blocks: int) -> KVCaches:
        self.num_blocks = num_blocks
        keys, values = (torch.full((num_blocks, 1, BLOCK_SIZE, 1), -1.0, dtype=self.dtype) for _ in range(2))
        self.caches = [ref(keys)]
        return [(keys, values)]

    def known_inputs(self, token_ids_T: torch.Tensor, slot_mapping_T: torch.Tensor) -> list[torch.Tensor]:
        assert len(token_ids_T) == len(slot_mapping_T)
        return [token_ids_T[:, None].to(self.dtype)]

    def drafted_inputs(self, token_ids_T: torch.Tensor, out_TE: torch.Tensor) -> list[torch.Tensor]:
        assert len(token_ids_T) == len(out_TE)
        return [token_ids_T[:, None].to(self.dtype)]

    def layers(self, inputs: Sequence[torch.Tensor], context: StepContext, kv_caches: KVCaches) -> torch.Tensor:
        """[T, 1], the token after each position."""
        keys_N = kv_caches[0][0].view(-1)
        positions, starts = context.positions.tolist(), context.query_start_loc.tolist()
        self.passes.append(positions)
        keys_N[context.slot_mapping] = inputs[0][:, 0]
        out = []
        for row, (start, end) in enumerate(itertools.pairwise(starts)):
            seq_len = int(context.seq_lens[row])
            assert positions[start:end] == list(range(seq_len - (end - start), seq_len))
            places = torch.arange(seq_len)
            slots = context.block_table[row, places // BLOCK_SIZE] * BLOCK_SIZE + places % BLOCK_SIZE
            assert slots[positions[start:end]].tolist() == context.slot_mapping[start:end].tolist()
            token_ids = [int(token_id) for token_id in keys_N[slots]]
            out += [next_token(token_ids[: position + 1]) for position in positions[start:end]]
        return torch.tensor(out, dtype=self.dtype)[:, None]

    def logits(self, out_SE: torch.Tensor) -> torch.Tensor:
        logits_SV = torch.zeros(len(out_SE), VOCAB_SIZE)
        return logits_SV.scatter_(1, out_SE.long(), 100.0)
