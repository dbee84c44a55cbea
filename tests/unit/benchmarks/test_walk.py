"""Models that are taught a walk say it, with random weights everywhere else."""

import torch
from benchmarks.harness.walk import teach_walk
from transformers import LlamaConfig, LlamaForCausalLM

VOCAB_SIZE = 300


def say(order: list[int], first: int, num_tokens: int) -> list[int]:
    """What a small model says greedily, token after token."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE, hidden_size=256, intermediate_size=512, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=False,
    )  # fmt: skip
    model = LlamaForCausalLM(config).eval()
    teach_walk(model, order)
    token_ids = [first]
    with torch.inference_mode():
        for _ in range(num_tokens):
            logits = model(torch.tensor([token_ids])).logits
            token_ids.append(int(logits[0, -1].argmax()))
    return token_ids


ORDER = torch.randperm(VOCAB_SIZE - 50, generator=torch.Generator().manual_seed(1)).add(2).tolist()


def test_walk_goes_on_at_its_beginning() -> None:
    assert say(ORDER, ORDER[-10], 30) == ORDER[-10:] + ORDER[:21]
