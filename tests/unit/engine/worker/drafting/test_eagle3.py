"""HeadModel keeps the target's hidden states for as long as there are blocks."""

from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from quire_engine.kv_cache import AttentionSpec
from quire_engine.models.step_context import KVCaches
from quire_engine.worker.drafting.chain_models import HeadModel

SPEC = AttentionSpec(num_heads=1, num_kv_heads=1, head_size=4)


def make(target_ids: list[int], vocab_size: int) -> tuple[HeadModel, Any]:
    """A head that reads hidden states of 6 numbers at two layers; its logits are its input."""
    target = SimpleNamespace(
        hidden_size=6, dtype=torch.float32, norm=SimpleNamespace(weight=torch.ones(6)), feature_taps=None
    )
    head = SimpleNamespace(
        tapped_layers=[1, 3],
        hidden_size=5,
        dtype=torch.float32,
        state_specs=[SPEC],
        target_ids=torch.tensor(target_ids),
        embed=lambda token_ids_T: token_ids_T[:, None] * torch.ones(5),
        features=lambda states_T: states_T.sum(1, keepdim=True) * torch.ones(5),
        logits=lambda out_SE: out_SE.clone(),
    )

    def allocate(specs: Sequence[AttentionSpec], num_blocks: int) -> KVCaches:
        return [(torch.zeros(num_blocks), torch.zeros(num_blocks))]

    return HeadModel(head, target, vocab_size, 8, 4, allocate), target  # type: ignore[arg-type]


def test_the_target_stores_its_states_while_there_are_blocks() -> None:
    model, target = make([0, 1], 2)
    assert model.table_bytes_per_block == 4 * 2 * 6 * 4
    model.allocate_caches(3)
    assert target.feature_taps.table_NE.shape == (3 * 4, 2 * 6)
    target.feature_taps.table_NE[7] = 0.5
    tokens, states = model.known_inputs(torch.tensor([8, 9]), torch.tensor([7, 2]))
    assert (tokens[:, 0].tolist(), states[:, 0].tolist()) == ([8, 9], [6.0, 0.0])
    model.allocate_caches(0)
    assert target.feature_taps.table_NE.numel() == 0
    assert model.table_bytes_per_block == 4 * 2 * 6 * 4, "it is known before there are any"


@pytest.mark.parametrize(("target_ids", "vocab_size"), [([0, 1, 2], 3), ([4, 0, 2], 6)])
def test_tokens_outside_the_heads_vocabulary_are_never_drafted(target_ids: list[int], vocab_size: int) -> None:
    model, _ = make(target_ids, vocab_size)
    logits_SD = torch.tensor([[1.0, 2.0, 3.0], [6.0, 5.0, 4.0]])
    expected = torch.full((2, vocab_size), -float("inf"))
    expected[:, target_ids] = logits_SD
    assert torch.equal(model.logits(logits_SD), expected)
