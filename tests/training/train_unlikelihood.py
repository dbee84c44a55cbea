"""Teaches tinypy not to repeat itself: fine-tunes trained weights by sequence-level unlikelihood.

From this folder, with ``T=../../model_repository/tinypy/1``:

    python train_unlikelihood.py --target $T/model --out $T/model

A greedy continuation of a small model falls into loops, which it finds the more likely the longer they are.
Unlikelihood training (Welleck et al., 2020, "Neural Text Generation with Unlikelihood Training", section 5.2) lets the
model continue prefixes of the corpus greedily and takes probability from the tokens by which the continuation repeats
itself. Each step adds that loss to the ordinary one, of other windows, which keeps what the model has learnt.

At the end the script measures the loss on the validation files and how much greedy continuations of them repeat;
``--steps 0`` measures the weights that it would begin with.

What it deliberately does not do: it penalizes nothing that the model was not about to say itself, and no repetition of
the prefix, since code takes up the names before it. The run is a function of the seed and of the weights it begins
with, in the sense of ``train.py``.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import sysconfig
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch
from torch.nn import functional
from train import (
    TokenIds,
    TrainingConfig,
    collect_corpus,
    continue_greedily,
    encode,
    evaluate,
    next_token_loss,
    save_checkpoint,
    train,
)
from transformers import LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils import logging

PENALIZED_NGRAM = 4
"""A token is penalized as part of an n-gram of this size that the continuation has said before."""

PREFIX_LENGTHS = (2, 64)
"""Shortest and longest prefix, in tokens: from the first word of a line to a function."""

CONTINUATION_LENGTH = 64
"""Tokens that follow each prefix. Loops begin within some thirty."""


def repeated_ngrams(tokens: torch.Tensor, size: int) -> torch.Tensor:
    """Which n-grams of a row have occurred in it before; tokens of shape [N, L], result of shape [N, L - size + 1]."""
    ngrams = tokens.unfold(1, size, 1)
    same = (ngrams[:, :, None] == ngrams[:, None, :]).all(dim=-1)
    return same.tril(diagonal=-1).any(dim=-1)


def repeating_tokens(tokens: torch.Tensor, size: int) -> torch.Tensor:
    """Which tokens are part of an n-gram that has occurred before in their row; both of shape [N, L]."""
    repeated = repeated_ngrams(tokens, size)
    marked = torch.zeros_like(tokens, dtype=torch.bool)
    for offset in range(size):
        marked[:, offset : offset + repeated.shape[1]] |= repeated
    return marked


def sequence_unlikelihood(model: LlamaForCausalLM, prefixes: torch.Tensor) -> torch.Tensor:
    """The model's unlikelihood loss on its own greedy continuations of prefixes, shape [N, L] (the paper's equation 5).

    The mean over all continued tokens, those that repeat nothing counting zero: a continuation with few repetitions
    is left alone.
    """
    continuations = continue_greedily(model, prefixes, CONTINUATION_LENGTH)
    logits = model(input_ids=torch.cat([prefixes, continuations], dim=1)[:, :-1], use_cache=False).logits
    log_probs = functional.log_softmax(logits[:, prefixes.shape[1] - 1 :].float(), dim=-1)
    probs = log_probs.gather(-1, continuations[..., None])[..., 0].exp()
    penalties = -torch.log((1 - probs).clamp(min=1e-5))
    return (penalties * repeating_tokens(continuations, PENALIZED_NGRAM)).mean()


def line_starts(stream: TokenIds, line_break: int) -> TokenIds:
    """Where lines begin that leave room for the longest prefix: where prompts do."""
    starts: TokenIds = np.flatnonzero(stream[: -PREFIX_LENGTHS[1]] == line_break) + 1
    return starts


@torch.no_grad()
def sequence_repetition(
    model: LlamaForCausalLM, stream: TokenIds, *, stride: int = 256, prefix: int = 50, length: int = 100
) -> dict[str, float]:
    """seq-rep-4 (the paper's section 6.1): the mean share of 4-grams of a continuation that it has said before.

    Every stride tokens of the stream a prefix begins. Returns the model's, of its greedy continuations, and that of the
    text itself, which is not zero.
    """
    starts = range(0, len(stream) - prefix - length + 1, stride)
    windows = torch.from_numpy(np.stack([stream[start : start + prefix + length] for start in starts]))
    continuations = torch.cat([continue_greedily(model, batch, length) for batch in windows[:, :prefix].split(64)])
    return {
        "model": round(repeated_ngrams(continuations, 4).double().mean().item(), 3),
        "text": round(repeated_ngrams(windows[:, prefix:], 4).double().mean().item(), 3),
    }


def parse_arguments() -> argparse.Namespace:
    """The command line; the defaults are those of the published weights, and were not tuned."""
    parser = argparse.ArgumentParser(
        description="Fine-tune tinypy not to repeat itself.", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--target", type=Path, required=True, help="Hugging Face folder of the weights to begin with")
    parser.add_argument("--out", type=Path, required=True, help="folder for the Hugging Face checkpoint")
    parser.add_argument("--library", type=Path, default=Path(sysconfig.get_paths()["stdlib"]), help="source to learn")
    parser.add_argument("--steps", type=int, default=120, help="optimizer steps; 0 only measures")
    parser.add_argument("--weight", type=float, default=1.0, help="of the unlikelihood loss beside the ordinary one")
    parser.add_argument("--prefixes", type=int, default=8, help="prefixes that are continued in a step")
    parser.add_argument("--learning-rate", type=float, default=5e-4, help="AdamW's, at its peak")
    parser.add_argument("--seed", type=int, default=1991, help="seed of the windows and prefixes")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="threads that torch computes with")
    parser.add_argument("--save-seconds", type=float, default=120.0, help="time between checkpoints")
    return parser.parse_args()


def make_loss(
    model: LlamaForCausalLM, stream: TokenIds, line_break: int, arguments: argparse.Namespace
) -> Callable[[torch.Tensor], torch.Tensor]:
    """The loss of a step: of its windows, and of the continuations of prefixes drawn for it."""
    generator = np.random.default_rng(arguments.seed)
    starts = line_starts(stream, line_break)

    def loss_function(windows: torch.Tensor) -> torch.Tensor:
        # One length for all prefixes of a step, so that none needs padding.
        length = int(generator.integers(PREFIX_LENGTHS[0], PREFIX_LENGTHS[1] + 1))
        chosen = generator.choice(starts, arguments.prefixes, replace=False)
        prefixes = torch.from_numpy(np.stack([stream[start : start + length] for start in chosen]))
        # First: autocast keeps the weights that it has cast, and those cast for a continuation have no gradient.
        likelihood = next_token_loss(model, windows)
        return likelihood + arguments.weight * sequence_unlikelihood(model, prefixes)

    return loss_function


def main() -> None:
    """Trains, saves, measures; prints a summary as JSON."""
    arguments = parse_arguments()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(arguments.seed)
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    began = time.monotonic()

    tokenizer = PreTrainedTokenizerFast.from_pretrained(arguments.target)
    for key in ("is_local", "local_files_only"):
        tokenizer.init_kwargs.pop(key, None)  # How it was loaded is not to be saved with it.
    model = LlamaForCausalLM.from_pretrained(arguments.target, dtype=torch.float32)
    corpus = collect_corpus(arguments.library)
    training, validation = encode(corpus.training, tokenizer), encode(corpus.validation, tokenizer)
    if arguments.steps:
        config = TrainingConfig(
            seed=arguments.seed,
            steps=arguments.steps,
            warmup_steps=max(1, arguments.steps // 10),
            tokens_per_step=1024,
            window_stages=((0.0, 512),),
        )

        def save() -> None:
            save_checkpoint(model, tokenizer, arguments.out)

        (line_break,) = tokenizer.encode("\n", add_special_tokens=False)
        loss_function = make_loss(model, training, line_break, arguments)
        train(
            model,
            [torch.optim.AdamW(model.parameters(), lr=arguments.learning_rate, betas=(0.9, 0.95), weight_decay=0.0)],
            loss_function,
            training,
            config,
            save,
            arguments.save_seconds,
            compile_step=False,  # Each step's prefixes are of another length.
        )
        save()
        model = LlamaForCausalLM.from_pretrained(arguments.out, dtype=torch.float32)

    minutes = (time.monotonic() - began) / 60
    num_bytes = sum(len(text.encode()) for text in corpus.validation)
    quality = evaluate(model, validation, num_bytes=num_bytes, length=model.config.max_position_embeddings)
    summary = {
        "steps": arguments.steps,
        "validation_loss": round(quality.loss, 4),
        "validation_perplexity": round(quality.perplexity, 3),
        "validation_bits_per_byte": round(quality.bits_per_byte, 4),
        "seq_rep_4": sequence_repetition(model, validation),
        "minutes": round(minutes, 1),
        "python": sys.version.split()[0],
        "torch": torch.__version__,
    }
    print(json.dumps(summary, indent=2))


if __name__ == "__main__":
    main()
