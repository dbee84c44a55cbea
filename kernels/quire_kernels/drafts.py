"""The bookkeeping between two passes that draft a token each, as an op, so that a recording can contain it."""

from dataclasses import dataclass

import torch

from quire_kernels.cpu import check_tensor, launch, library, structure

_AdvanceCall = structure("AdvanceCall")


@dataclass(frozen=True, slots=True)
class DraftState:
    """What changes from one pass to the next, for at most R requests. All on the CPU; int64, but for probabilities."""

    next_token_ids: torch.Tensor
    """[R], the input of the next pass."""
    positions: torch.Tensor
    """[R], of these tokens."""
    draw_positions: torch.Tensor
    """[R], where the tokens drawn next will be: what their noise depends on."""
    seq_lens: torch.Tensor
    """[R], positions + 1."""
    slot_mapping: torch.Tensor
    """[R], cache slot of each position."""
    block_table: torch.Tensor
    """[R, M]"""
    place: torch.Tensor
    """[1], passes so far."""
    drawn_token_ids: torch.Tensor
    """[P, R], by pass."""
    drawn_probabilities: torch.Tensor
    """[P, R] float32."""


def advance_drafts(
    state: DraftState, token_ids_S: torch.Tensor, probabilities_S: torch.Tensor, block_size: int
) -> None:
    """Keep what a pass has drawn, and move on by one position; in place.

    Args:
        state: of at least S requests, the first ones.
        token_ids_S: int64, drawn.
        probabilities_S: float32, how likely they are.
        block_size: tokens per KV block.
    """
    rows = len(token_ids_S)
    check_tensor("token_ids_S", token_ids_S, torch.int64, rows)
    check_tensor("probabilities_S", probabilities_S, torch.float32, rows)
    handle = library()
    if handle is None:
        _advance_torch(state, token_ids_S, probabilities_S, block_size)
        return
    call = _AdvanceCall(
        token_ids_S.data_ptr(), probabilities_S.data_ptr(), state.next_token_ids.data_ptr(),
        state.drawn_token_ids.data_ptr(), state.drawn_probabilities.data_ptr(), state.place.data_ptr(),
        state.positions.data_ptr(), state.draw_positions.data_ptr(), state.seq_lens.data_ptr(),
        state.slot_mapping.data_ptr(), state.block_table.data_ptr(), state.block_table.shape[1], block_size,
        state.drawn_token_ids.shape[1], rows,
    )  # fmt: skip
    launch(handle.quire_advance_drafts, call)


def _advance_torch(
    state: DraftState, token_ids_S: torch.Tensor, probabilities_S: torch.Tensor, block_size: int
) -> None:
    rows, place = slice(len(token_ids_S)), int(state.place)
    state.place.add_(1)
    state.next_token_ids[rows] = state.drawn_token_ids[place, rows] = token_ids_S
    state.drawn_probabilities[place, rows] = probabilities_S
    state.positions[rows] += 1
    state.draw_positions[rows] += 1
    positions = state.positions[rows]
    state.seq_lens[rows] = positions + 1
    blocks = (positions // block_size).clamp(max=state.block_table.shape[1] - 1)
    block_ids = state.block_table[rows].gather(1, blocks[:, None])[:, 0]
    state.slot_mapping[rows] = block_ids * block_size + positions % block_size
