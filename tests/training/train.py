"""Trains tinypy, the demo model, from nothing, on the source of the Python standard library.

From this folder, with ``T=../../model_repository/tinypy/1``:

    python train.py --out $T/model

The steps, in order:

1. Collect the ``.py`` files of the running interpreter's standard library and set a few aside for validation.
2. Train a byte-level BPE tokenizer on the training files.
3. Pack all documents into one stream of tokens, each as ``<s> document </s>``.
4. Train a small Llama on random windows of the stream: short ones at first, which are cheaper, and at the end windows
   of the full context, so that every position the model offers has been trained.
5. Write a Hugging Face folder (bfloat16), every few minutes and at the end, and measure the loss of what was written.

What it deliberately does not do: it downloads nothing, uses no GPU, does not mask attention between the documents of a
window, and teaches the model no dialogue (the chat template only presents messages as comments of a Python file). It is
made for one small model and two CPU cores. Of an interrupted run it keeps the weights, not the optimizers' momenta.

The run is a function of the seed, the hyper-parameters and the interpreter's library. Kernels that sum in another
order, as other processors, versions of torch or numbers of threads do, change the last digits and with them the exact
weights.
"""

from __future__ import annotations

import argparse
import copy
import hashlib
import itertools
import json
import math
import os
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import nn
from torch.nn import functional
from tqdm import tqdm
from transformers import GenerationConfig, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils import logging

TokenIds = npt.NDArray[np.int64]

BOS_TOKEN, EOS_TOKEN = "<s>", "</s>"
BOS_TOKEN_ID, EOS_TOKEN_ID = 0, 1

# Tests outnumber the library itself; the others are tables of data, or not part of the library.
SKIPPED_FOLDERS = frozenset(
    {"__pycache__", "encodings", "idle_test", "pydoc_data", "site-packages", "test", "tests", "__phello__"}
)
SKIPPED_FILES = ("_sysconfigdata", "entities.py")

# Line breaks and indentation are pieces of their own, so a prompt tokenizes as the training text did
# whether it ends after the colon, after the line break or after the indentation.
PIECES = r" {2,}|\n| ?[\p{L}_]+| ?\p{N}| ?[^\s\p{L}\p{N}_]+|\s"

# What is asked becomes comments, what is answered is code.
CHAT_TEMPLATE = """\
{%- for message in messages -%}
{%- if message.role == 'assistant' -%}
{{ message.content + '\\n' }}
{%- else -%}
{%- for line in message.content.splitlines() -%}
{{ ('# ' + line).rstrip() + '\\n' }}
{%- endfor -%}
{%- endif -%}
{%- endfor -%}
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingConfig:
    """Everything that decides the outcome of a run, apart from the library it reads."""

    seed: int = 1991
    """Seed of the initial weights and of the order of the windows."""

    vocab_size: int = 4096
    """Entries of the tokenizer, the two special tokens included."""

    hidden_size: int = 256
    """Width of the residual stream."""

    intermediate_size: int = 704
    """Width of the gated MLP."""

    num_hidden_layers: int = 6
    """Number of decoder layers."""

    num_attention_heads: int = 8
    """Number of query heads."""

    num_key_value_heads: int = 4
    """Number of key and value heads, each shared by a group of query heads."""

    max_position_embeddings: int = 1024
    """Longest context."""

    window_stages: tuple[tuple[float, int], ...] = ((0.0, 256), (0.6, 512), (0.88, 1024))
    """Where each stage begins, as a part of all steps, and its window length. Attention is half of a step's time at 512
    tokens, so most of the learning is done on shorter windows."""

    tokens_per_step: int = 4096
    """Tokens per optimizer step, whatever the window length."""

    steps: int = 2800
    """Optimizer steps."""

    warmup_steps: int = 100
    """Steps over which the learning rate rises; from there it falls linearly to zero."""

    matrix_learning_rate: float = 5e-3
    """Peak learning rate of the matrices within the layers (Muon)."""

    other_learning_rate: float = 3e-3
    """Peak learning rate of the tied embedding and the norms (AdamW)."""

    weight_decay: float = 0.1
    """Decoupled weight decay of the matrices within the layers."""

    max_grad_norm: float = 1.0
    """Gradients with a larger global norm are scaled down to it."""

    def __post_init__(self) -> None:
        """Raises ValueError for values that cannot be trained with."""
        for _, length in self.window_stages:
            if self.tokens_per_step % length:
                allowed = f"a divisor of tokens_per_step={self.tokens_per_step}"
                raise ValueError(
                    f"window_stages={self.window_stages} has a window of {length}, which must be {allowed}"
                )
        if not 0 < self.warmup_steps < self.steps:
            raise ValueError(f"warmup_steps={self.warmup_steps} must be above 0 and below steps={self.steps}")

    def window_length(self, step: int) -> int:
        """Number of tokens that each window of this step predicts."""
        return max(length for begin, length in self.window_stages if step >= begin * self.steps)

    def learning_rate_factor(self, step: int) -> float:
        """Factor on the peak learning rates: a linear rise, then a linear fall to zero."""
        return min((step + 1) / self.warmup_steps, (self.steps - step) / (self.steps - self.warmup_steps))


@dataclass(frozen=True, kw_only=True, slots=True)
class Corpus:
    """Source files, split by file."""

    training: list[str]
    """Text of the files to learn from."""

    validation: list[str]
    """Text of the files that are only measured."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Quality:
    """How well a model predicts the validation files."""

    loss: float
    """Mean negative log-likelihood per token, in nats."""

    bits_per_byte: float
    """The same per byte of text, which can be compared across tokenizers."""

    @property
    def perplexity(self) -> float:
        """Exponential of the loss."""
        return math.exp(self.loss)


def collect_corpus(library: Path) -> Corpus:
    """Reads the library's source. About one file in forty, chosen by a hash of its path, is kept for validation."""
    corpus = Corpus(training=[], validation=[])
    for path in sorted(library.rglob("*.py")):
        relative = path.relative_to(library)
        if SKIPPED_FOLDERS.intersection(relative.parts) or path.name.startswith(SKIPPED_FILES):
            continue
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            continue
        if not text.strip():
            continue
        held_out = hashlib.sha256(relative.as_posix().encode()).digest()[0] % 40 == 0
        (corpus.validation if held_out else corpus.training).append(text)
    return corpus


def train_tokenizer(documents: Sequence[str], config: TrainingConfig) -> PreTrainedTokenizerFast:
    """Trains a byte-level BPE tokenizer that decodes to exactly the text it encoded and adds no special tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=config.vocab_size,
        special_tokens=[BOS_TOKEN, EOS_TOKEN],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer)
    return PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer,
        bos_token=BOS_TOKEN,
        eos_token=EOS_TOKEN,
        pad_token=EOS_TOKEN,
        add_prefix_space=False,
        clean_up_tokenization_spaces=False,
        model_max_length=config.max_position_embeddings,
        chat_template=CHAT_TEMPLATE,
    )


def encode(documents: Sequence[str], tokenizer: PreTrainedTokenizerFast) -> TokenIds:
    """Joins the documents into one stream of token ids, shape [num_tokens]."""
    stream: list[int] = []
    for encoding in tokenizer.backend_tokenizer.encode_batch(list(documents), add_special_tokens=False):
        stream += [BOS_TOKEN_ID, *encoding.ids, EOS_TOKEN_ID]
    return np.array(stream, dtype=np.int64)


def build_model(config: TrainingConfig) -> LlamaForCausalLM:
    """A Llama with random float32 weights."""
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            intermediate_size=config.intermediate_size,
            num_hidden_layers=config.num_hidden_layers,
            num_attention_heads=config.num_attention_heads,
            num_key_value_heads=config.num_key_value_heads,
            max_position_embeddings=config.max_position_embeddings,
            rms_norm_eps=1e-5,
            tie_word_embeddings=True,
            bos_token_id=BOS_TOKEN_ID,
            eos_token_id=EOS_TOKEN_ID,
            pad_token_id=EOS_TOKEN_ID,
            use_cache=True,
        )
    )


def build_optimizers(model: nn.Module, layers: nn.Module, config: TrainingConfig) -> list[torch.optim.Optimizer]:
    """Muon for the matrices within the layers, a part of the model, and AdamW for the rest.

    Muon (Jordan et al., 2024) orthogonalizes the momentum of a matrix, which takes fewer tokens than AdamW to reach a
    loss; it is meant for hidden layers only. Its step is scaled to the size of AdamW's (Liu et al., 2025, "Muon is
    Scalable for LLM Training"), so that both learning rates are of one kind.
    """
    matrices = [parameter for parameter in layers.parameters() if parameter.ndim == 2]
    within = {id(parameter) for parameter in matrices}
    others = [parameter for parameter in model.parameters() if id(parameter) not in within]
    return [
        torch.optim.Muon(
            matrices,
            lr=config.matrix_learning_rate,
            weight_decay=config.weight_decay,
            adjust_lr_fn="match_rms_adamw",
        ),
        torch.optim.AdamW(others, lr=config.other_learning_rate, betas=(0.9, 0.95), weight_decay=0.0),
    ]


def batches(stream: TokenIds, config: TrainingConfig) -> Iterator[torch.Tensor]:
    """Yields one batch per step, shape [num_windows, window_length + 1].

    An epoch cuts the stream into windows at a random phase and visits them in random order; a change of window length
    starts a new epoch.
    """
    generator = np.random.default_rng(config.seed)
    queue: list[int] = []
    length = 0
    for step in range(config.steps):
        if length != config.window_length(step):
            length = config.window_length(step)
            queue = []
        num_windows = config.tokens_per_step // length
        while len(queue) < num_windows:
            starts = np.arange(generator.integers(length), len(stream) - length, length)
            queue += generator.permutation(starts).tolist()
        windows = [stream[start : start + length + 1] for start in queue[:num_windows]]
        del queue[:num_windows]
        yield torch.from_numpy(np.stack(windows))


def next_token_loss(model: LlamaForCausalLM, windows: torch.Tensor, reduction: str = "mean") -> torch.Tensor:
    """Cross-entropy of each window's tokens given those before them; windows has shape [num_windows, length + 1]."""
    logits = model(input_ids=windows[:, :-1], use_cache=False).logits
    return functional.cross_entropy(logits.flatten(0, 1).float(), windows[:, 1:].flatten(), reduction=reduction)


@torch.no_grad()
def evaluate(model: LlamaForCausalLM, stream: TokenIds, num_bytes: int, length: int) -> Quality:
    """Measures the model on consecutive windows that cover the stream; every token but the first is predicted once."""
    model.eval()  # type: ignore[no-untyped-call]
    total = 0.0
    for start in range(0, len(stream) - 1, length):
        window = torch.from_numpy(stream[None, start : start + length + 1])
        total += next_token_loss(model, window, reduction="sum").item()
    model.train()
    return Quality(loss=total / (len(stream) - 1), bits_per_byte=total / math.log(2) / num_bytes)


@torch.no_grad()
def continue_greedily(model: LlamaForCausalLM, contexts: torch.Tensor, num_tokens: int) -> torch.Tensor:
    """The model's most likely next tokens, one after the other, after contexts of shape [N, L].

    Returns shape [N, num_tokens]; an end of file does not end it, as it does not end the stream.
    """
    tokens, cache = contexts, None
    continuation = []
    for _ in range(num_tokens):
        output = model(input_ids=tokens, cache=cache, use_cache=True, logits_to_keep=1)
        cache = output.cache
        tokens = output.logits.argmax(dim=-1)
        continuation.append(tokens)
    return torch.cat(continuation, dim=1)


@contextmanager
def replacing_files(out: Path) -> Iterator[Path]:
    """Yields an empty folder whose files then move to out, each at once, so a reader never sees half of one."""
    out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}-") as temporary:
        yield Path(temporary)
        for path in Path(temporary).iterdir():
            path.chmod(0o644)  # The server may run as another user.
            path.replace(out / path.name)


def save_checkpoint(model: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast, out: Path) -> None:
    """Writes the Hugging Face folder in bfloat16."""
    rounded = copy.deepcopy(model).bfloat16()
    rounded.generation_config = GenerationConfig(  # type: ignore[no-untyped-call]
        bos_token_id=BOS_TOKEN_ID, eos_token_id=EOS_TOKEN_ID, pad_token_id=EOS_TOKEN_ID
    )
    with replacing_files(out) as temporary:
        rounded.save_pretrained(temporary)
        tokenizer.save_pretrained(temporary)
        settings = temporary / "tokenizer_config.json"
        # The class goes by another name in transformers 5, which earlier releases would not find.
        named = json.loads(settings.read_text()) | {"tokenizer_class": "PreTrainedTokenizerFast"}
        settings.write_text(json.dumps(named, indent=2) + "\n")


def train(
    model: nn.Module,
    optimizers: list[torch.optim.Optimizer],
    loss_function: Callable[[torch.Tensor], torch.Tensor],
    stream: TokenIds,
    config: TrainingConfig,
    save: Callable[[], None],
    save_seconds: float,
    compile_step: bool,
    first_step: int = 0,
) -> float:
    """Runs the steps from first_step on and returns the mean training loss of the last fifty.

    Args:
        model: whose parameters are trained.
        optimizers: of its parameters, with the learning rates' peaks.
        loss_function: the loss of windows of shape [num_windows, window_length + 1].
        stream: what to learn, shape [num_tokens].
        config: the hyper-parameters.
        save: writes the checkpoint.
        save_seconds: time between two calls of save.
        compile_step: whether torch.compile is to make the loss function faster.
        first_step: the step to begin with.
    """
    if compile_step:
        loss_function = torch.compile(loss_function, dynamic=False)
    peaks = [(group, group["lr"]) for optimizer in optimizers for group in optimizer.param_groups]
    # Without instructions for it, as with AVX2 alone, bfloat16 takes many times as long as float32.
    has_bfloat16 = torch.ops.mkldnn._is_mkldnn_bf16_supported()
    losses: list[float] = []
    began = saved = time.monotonic()
    terminal = sys.stderr.isatty()
    remaining = itertools.islice(batches(stream, config), first_step, None)
    progress = tqdm(remaining, initial=first_step, total=config.steps, unit="step", disable=not terminal)
    for step, windows in enumerate(progress, start=first_step):
        for group, peak in peaks:
            group["lr"] = peak * config.learning_rate_factor(step)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=has_bfloat16):
            loss = loss_function(windows)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), config.max_grad_norm)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
        now = time.monotonic()
        progress.set_postfix(loss=f"{losses[-1]:.3f}", refresh=False)
        if not terminal and (step + 1) % 20 == 0:
            rate = len(losses) * config.tokens_per_step / (now - began)
            recent = sum(losses[-20:]) / len(losses[-20:])
            print(f"step {step + 1}/{config.steps}  loss {recent:.4f}  {rate:.0f} tokens/s", flush=True)
        if now - saved > save_seconds:
            save()
            saved = time.monotonic()
    return sum(losses[-50:]) / len(losses[-50:])


def parse_arguments() -> argparse.Namespace:
    """The command line; the hyper-parameters' defaults are those of the published model."""
    default = TrainingConfig()
    parser = argparse.ArgumentParser(
        description="Train tinypy, the demo model, on the source of the Python standard library.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("--out", type=Path, required=True, help="folder for the Hugging Face checkpoint")
    parser.add_argument("--library", type=Path, default=Path(sysconfig.get_paths()["stdlib"]), help="source to learn")
    parser.add_argument("--steps", type=int, default=default.steps, help="optimizer steps")
    parser.add_argument("--seed", type=int, default=default.seed, help="seed of weights and data order")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="threads that torch computes with")
    parser.add_argument(
        "--compile",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="compile the forward and backward pass: about 1.7 times as fast, needs a C++ compiler",
    )
    parser.add_argument(
        "--resume-step",
        type=int,
        default=0,
        help="continue with this step from the checkpoint in --out; the optimizers' momenta start anew",
    )
    parser.add_argument("--save-seconds", type=float, default=120.0, help="time between checkpoints")
    return parser.parse_args()


def main() -> None:
    """Collects, trains, saves, measures; prints a summary as JSON."""
    arguments = parse_arguments()
    config = TrainingConfig(steps=arguments.steps, seed=arguments.seed)
    if not 0 <= arguments.resume_step < config.steps:
        raise ValueError(f"resume_step={arguments.resume_step} must be at least 0 and below steps={config.steps}")
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(config.seed)
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    began = time.monotonic()

    corpus = collect_corpus(arguments.library)
    tokenizer = train_tokenizer(corpus.training, config)
    training, validation = encode(corpus.training, tokenizer), encode(corpus.validation, tokenizer)
    model = build_model(config)
    if arguments.resume_step:
        model = LlamaForCausalLM.from_pretrained(arguments.out, dtype=torch.float32)
    print(
        f"{model.num_parameters():,} parameters; {len(corpus.training)} files, {len(training):,} tokens to learn; "
        f"{len(corpus.validation)} files, {len(validation):,} tokens to validate",
        flush=True,
    )

    def loss_function(windows: torch.Tensor) -> torch.Tensor:
        return next_token_loss(model, windows)

    def save() -> None:
        save_checkpoint(model, tokenizer, arguments.out)

    training_loss = train(
        model,
        build_optimizers(model, model.model.layers, config),
        loss_function,
        training,
        config,
        save,
        arguments.save_seconds,
        compile_step=arguments.compile,
        first_step=arguments.resume_step,
    )
    save()

    published = LlamaForCausalLM.from_pretrained(arguments.out, dtype=torch.float32)
    num_bytes = sum(len(text.encode()) for text in corpus.validation)
    quality = evaluate(published, validation, num_bytes=num_bytes, length=config.max_position_embeddings)
    summary = {
        "parameters": model.num_parameters(),
        "steps": config.steps,
        "tokens_seen": config.steps * config.tokens_per_step,
        "epochs": round(config.steps * config.tokens_per_step / len(training), 2),
        "training_loss": round(training_loss, 4),
        "validation_loss": round(quality.loss, 4),
        "validation_perplexity": round(quality.perplexity, 3),
        "validation_bits_per_byte": round(quality.bits_per_byte, 4),
        "minutes": round((time.monotonic() - began) / 60, 1),
        "python": sys.version.split()[0],
        "torch": torch.__version__,
    }
    print(json.dumps(summary, indent=2))


if __name__ == "__main__":
    main()
