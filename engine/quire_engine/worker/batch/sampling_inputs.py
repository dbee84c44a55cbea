"""The sampler's inputs for the rows of a step."""

from functools import partial
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from quire_engine.device.transfer import upload, upload_tensors
from quire_engine.messages import GrammarBitmask
from quire_engine.sampling import DraftsToVerify, SamplingMetadata
from quire_engine.worker.batch.input_batch import NO_LOGPROBS, InputBatch
from quire_engine.worker.batch.step_inputs import SampledRows

SamplingArrays: TypeAlias = tuple[npt.NDArray[Any], ...]
"""Temperature, min-p, top-k, top-p, seed and position of rows, [R] each: what `quire_kernels.sample` takes."""


def sampling_arrays(
    batch: InputBatch, slots: npt.NDArray[np.int64], positions: npt.NDArray[np.int64]
) -> SamplingArrays:
    """The parameters of slots, [R], at these positions, [R]."""
    return (
        batch.temperature[slots], batch.min_p[slots], batch.top_k[slots], batch.top_p[slots],
        batch.seed[slots].view(np.int64), positions,
    )  # fmt: skip


def sampling_metadata(
    batch: InputBatch,
    sampled: SampledRows,
    bitmask: GrammarBitmask | None,
    device: torch.device,
    drafts_to_verify: DraftsToVerify | None = None,
) -> SamplingMetadata:
    """The sampling parameters of each row, as if the drafts before it were part of the output; the batch has them
    stored after its tokens. `bitmask` is of the requests with a grammar, `drafts_to_verify` those that are accepted by
    chance."""
    slots = sampled.slots
    grammar = None if bitmask is None else _grammar_rows(bitmask, sampled)
    num_tokens = batch.num_tokens[slots] + sampled.offsets
    early_rows = np.flatnonzero(num_tokens - batch.num_prompt_tokens[slots] < batch.min_tokens[slots]).tolist()
    constrained = set(grammar[0]) if grammar is not None else ()  # there the bitmask covers it
    num_logprobs = batch.num_logprobs[slots]
    rows_with_logprobs = np.flatnonzero(num_logprobs != NO_LOGPROBS)
    temperature, min_p, top_k, top_p, seeds, positions = upload(device, *sampling_arrays(batch, slots, num_tokens))
    # Only penalties look at the drafts before a row.
    drafts = batch.drafts(slots, sampled.offsets) if sampled.drafts and batch.penalties.is_used[slots].any() else {}
    tails = partial(_output_tail, batch, sampled)
    return SamplingMetadata(
        temperature=temperature, top_p=top_p, top_k=top_k, min_p=min_p, seeds=seeds, positions=positions,
        num_logprobs=dict(zip(rows_with_logprobs.tolist(), num_logprobs[rows_with_logprobs].tolist(), strict=True)),
        forbidden=[(row, batch.stop_token_ids[slots[row]]) for row in early_rows if row not in constrained],
        all_greedy=not batch.temperature[slots].any(),
        penalties=upload_tensors(device, batch.penalties.gather(slots, drafts)),
        token_constraints=upload_tensors(device, batch.token_constraints.gather(slots, tails)), grammar_bitmask=grammar,
        drafts_to_verify=drafts_to_verify,
    )  # fmt: skip


def _output_tail(batch: InputBatch, sampled: SampledRows, row: int, num_tokens: int) -> list[int]:
    return batch.output_tail(int(sampled.slots[row]), num_tokens, int(sampled.offsets[row]))


def _grammar_rows(bitmask: GrammarBitmask, sampled: SampledRows) -> tuple[list[int], npt.NDArray[np.int32]]:
    first_rows = dict(zip(sampled.request_ids, sampled.starts.tolist(), strict=True))
    rows: list[int] = []
    for request_id in bitmask.request_ids:
        first = first_rows[request_id]
        rows += range(first, first + 1 + len(sampled.drafts.get(request_id, ())))
    return rows, np.frombuffer(bytearray(bitmask.bitmask), dtype=np.int32).reshape(len(rows), -1)
