"""Weights that make a model's likeliest text a fixed walk over its vocabulary, at the cost of any other text.

The hidden state behind the last layer is the token's embedding plus what the layers add. With large embeddings the sum
still points along the embedding, whatever the layers add; so an output head with the embedding of token `a` in the row
of token `b` says `b` after `a`::

    logits = head · norm(embedding[a] + layers)         head[b] = embedding[a]         the largest is that of b

All weights but these two stay random, and every one of them is multiplied with as in any model of the shape.
"""

from collections.abc import Sequence
from typing import Any

import torch

__all__ = ["teach_prediction", "teach_walk"]

NOISE = 6.0
"""Of a prediction's input, relative to the token's embedding: four of five drafts are right."""


@torch.no_grad()
def teach_walk(model: Any, order: Sequence[int]) -> None:
    """Change a model in place.

    Args:
        model: a `LlamaForCausalLM` with random weights, whose output head is not tied to its embeddings.
        order: the walk: each token is followed by the next, the last by the first.
    """
    embeddings = model.get_input_embeddings().weight
    tokens = torch.tensor(order)
    head = embeddings.clone()
    head[tokens.roll(-1)] = embeddings[tokens]
    model.get_output_embeddings().weight.copy_(head)
    embeddings.div_(model.config.initializer_range)


@torch.no_grad()
def teach_prediction(projection: torch.nn.Linear) -> None:
    """Change a layer of multi-token prediction in place, so that it drafts the walk, too, with mistakes.

    It reads the norms of the hidden state h and of the next token's embedding e, and ends with the model's head. Beside
    e, which is enough for the walk, `projection` keeps h in a random direction, as noise::

        out = NOISE · R h + e        R: random, of the same norm
    """
    size = projection.out_features
    noise = torch.randn(size, size) * (NOISE / size**0.5)
    projection.weight.copy_(torch.cat([noise, torch.eye(size)], dim=1))
