"""MedusaDrafter draws place k of all drafts from head k's logits."""

import numpy as np
import pytest
import torch
from quire_engine.device.transfer import CPU
from quire_engine.worker.drafting.draft_sampling import DraftSampling
from quire_engine.worker.drafting.make import MedusaDrafter
from support.drafting import add_request, make_batch
from support.scheduling import VOCAB_SIZE


class Heads:
    """Head k puts token 10 k + x after the hidden state x."""

    num_heads = 3

    def logits(self, hidden_SE: torch.Tensor) -> torch.Tensor:
        token_ids_SH = hidden_SE.long() + 10 * torch.arange(self.num_heads)
        return torch.nn.functional.one_hot(token_ids_SH, VOCAB_SIZE).float() * 50


@pytest.mark.parametrize(
    ("counts", "expected"),
    [
        ([3, 2, 1], [[4, 14, 24], [5, 15], [6]]),
        ([1, 1, 1], [[4], [5], [6]]),
        ([7, 5, 3], [[4, 14, 24], [5, 15, 25], [6, 16, 26]]),  # no longer than there are heads
    ],
)
def test_each_head_drafts_a_place(counts: list[int], expected: list[list[int]]) -> None:
    batch = make_batch()
    slots = [add_request(batch, f"r{i}", [1] * (i + 2), [i], temperature=0) for i in range(3)]
    drafter = MedusaDrafter(Heads())  # type: ignore[arg-type]
    sampling = DraftSampling(batch, np.array(slots), np.array(counts), CPU)
    drafts = drafter.draft(np.array(slots), torch.tensor([[4.0], [5.0], [6.0]]), sampling)
    assert [own.token_ids for own in drafts] == expected
    assert [own.start for own in drafts] == [2, 3, 4]
    assert all(len(own.chances) == len(own.token_ids) for own in drafts)


def test_it_keeps_nothing_between_steps() -> None:
    drafter = MedusaDrafter(Heads())  # type: ignore[arg-type]
    drafter.initialize_cache(8)
    drafter.forget_blocks([1, 2])
    assert (drafter.bytes_per_block, drafter.needs_hidden) == (0, True)
