"""The ops between two passes that draft a token each, on every instruction set of this machine (see conftest.py)."""

import pytest
import torch
from quire_kernels import DraftState, advance_drafts, cpu, record, store_columns, token_probabilities

ROWS, PLACES, BLOCK_SIZE = 4, 3, 8


def randn(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize("vocab_size", [1, 7, 16, 33, 4096, 5001])
def test_a_token_is_as_likely_as_the_softmax_says(vocab_size: int, cpu_kernels: str) -> None:
    logits = randn(5, 2 * vocab_size)[:, :vocab_size] * 5
    logits[1, 1::2] = -float("inf")
    logits[2] += 1e4
    token_ids = torch.tensor([0, 0, vocab_size - 1, vocab_size // 2, vocab_size // 3])
    expected = logits.double().softmax(-1).gather(1, token_ids[:, None])[:, 0]
    got = token_probabilities(logits, token_ids)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), expected, rtol=2e-3, atol=1e-12)  # of numbers around 10,000


def test_a_masked_token_has_no_probability(cpu_kernels: str) -> None:
    logits = torch.tensor([[0.0, -float("inf"), 1.0]])
    assert token_probabilities(logits, torch.tensor([1])).item() == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_columns_are_stored_and_others_stay(dtype: torch.dtype, cpu_kernels: str) -> None:
    source, out = randn(3, 8)[:, :4].to(dtype), torch.full((3, 9), 7.0, dtype=dtype)
    columns = torch.tensor([8, 0, 3, 5])
    store_columns(source, columns, out)
    assert torch.equal(out[:, columns], source)
    assert torch.equal(out[:, [1, 2, 4, 6, 7]], torch.full((3, 5), 7.0, dtype=dtype))
    order = torch.tensor([2, 0, 3, 1])
    assert torch.equal(store_columns(source, order)[:, order], source)
    with pytest.raises(ValueError, match="out_SV has 3 rows; it must have 2"):
        store_columns(source[:2], columns, out)


def make_state() -> DraftState:
    positions = torch.tensor([6, 7, 15, 22])
    return DraftState(
        next_token_ids=torch.zeros(ROWS, dtype=torch.int64),
        positions=positions,
        draw_positions=positions + 100,
        seq_lens=torch.zeros(ROWS, dtype=torch.int64),
        slot_mapping=torch.zeros(ROWS, dtype=torch.int64),
        block_table=torch.tensor([[5, 2, 9], [1, 7, 0], [3, 4, 6], [8, 11, 10]]),
        place=torch.zeros(1, dtype=torch.int64),
        drawn_token_ids=torch.zeros(PLACES, ROWS, dtype=torch.int64),
        drawn_probabilities=torch.zeros(PLACES, ROWS),
    )


def test_drafts_are_kept_and_each_request_moves_on_by_one(cpu_kernels: str) -> None:
    """Over the end of a block, and beyond the last one, where there is nothing to be read."""
    state = make_state()
    advance_drafts(state, torch.tensor([50, 51, 52, 53]), torch.tensor([0.5, 0.25, 0.75, 1.0]), BLOCK_SIZE)
    assert state.next_token_ids.tolist() == [50, 51, 52, 53]
    assert state.positions.tolist() == [7, 8, 16, 23]
    assert state.draw_positions.tolist() == [107, 108, 116, 123]
    assert state.seq_lens.tolist() == [8, 9, 17, 24]
    assert state.slot_mapping.tolist() == [5 * 8 + 7, 7 * 8, 6 * 8, 10 * 8 + 7]
    advance_drafts(state, torch.tensor([60, 61]), torch.tensor([0.125, 0.0]), BLOCK_SIZE)
    assert state.next_token_ids.tolist() == [60, 61, 52, 53], "those of the first two"
    assert state.positions.tolist() == [8, 9, 16, 23]
    assert state.drawn_token_ids.tolist() == [[50, 51, 52, 53], [60, 61, 0, 0], [0, 0, 0, 0]]
    assert state.drawn_probabilities[:2].tolist() == [[0.5, 0.25, 0.75, 1.0], [0.125, 0.0, 0.0, 0.0]]
    assert state.place.item() == 2
    ones = torch.ones(ROWS)
    advance_drafts(state, torch.tensor([70, 71, 72, 73]), ones, BLOCK_SIZE)
    assert 0 <= state.slot_mapping[3] < 12 * BLOCK_SIZE, "position 24 has no block: any slot of the table"


def test_a_recording_moves_on_each_time_it_is_run() -> None:
    if cpu.library() is None:
        pytest.skip(cpu.status().reason)
    state, token_ids, probabilities = make_state(), torch.tensor([1, 2, 3, 4]), torch.ones(ROWS)
    with record(ROWS) as recording:
        advance_drafts(state, token_ids, probabilities, BLOCK_SIZE)
    assert state.place.item() == 0, "nothing was run"
    recording.run(4)
    token_ids += 10
    recording.run(2)
    assert state.drawn_token_ids.tolist() == [[1, 2, 3, 4], [11, 12, 0, 0], [0, 0, 0, 0]]
    assert state.positions.tolist() == [8, 9, 16, 23]
