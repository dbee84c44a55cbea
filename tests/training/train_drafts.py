"""Trains four ways to draft tokens for tinypy, each by distillation on the corpus that tinypy was trained on.

From this folder, with ``T=../../model_repository/tinypy/1``:

    python train_drafts.py eagle3 --target $T/model --out $T/eagle3
    python train_drafts.py medusa --target $T/model --out $T/medusa
    python train_drafts.py draft --target $T/model --out $T/draft
    python train_drafts.py mtp --target $T/model --out $T/mtp --own-contexts 2048 --own-text 256 768
    python train_drafts.py eagle3 --target $T/model --out $T/eagle3 --resume --own-contexts 1536 --steps 600

- ``draft``: a Llama of one narrow layer with tinypy's vocabulary.
- ``eagle3``: an EAGLE-3 head (Li et al., 2025, https://arxiv.org/abs/2503.01840), which reads hidden states of three
  layers of the target.
- ``medusa``: Medusa-1 heads (Cai et al., 2024, https://arxiv.org/abs/2401.10774), which read the
  target's last hidden state.
- ``mtp``: a layer of multi-token prediction (DeepSeek-V3, 2024, https://arxiv.org/abs/2412.19437, section 2.2), which
  reads the target's last hidden state and drafts further tokens from its own output. It is a part of the model's
  checkpoint, so a whole one is written, as MiMo's: the target's weights are a link to those of its folder.

The target is frozen; each step runs it on the windows of the batch and learns its distribution of the next token. At
the end the script reads back what it wrote and counts which of its greedy drafts the target would have accepted.

With `--own-contexts` it learns from tinypy's own continuations of the library's text, half of them greedy and half
drawn at a temperature of 0.7: what a server asks for drafts of is the model's own text, and not people's.

What it deliberately does not do: it trains on single chains of drafted tokens, not on trees.

Drafts are counted by rows and places. In the draft of row r the hidden state of position r is the last that is known,
and token r+1 has just been sampled; place s, from 0, drafts token r+2+s, which the target decides at position r+1+s.
Shapes: N windows, L positions, R rows, H heads, D their size, E the hidden size, V the vocabulary.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import os
import sys
import sysconfig
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn import functional
from train import (
    TokenIds,
    TrainingConfig,
    build_optimizers,
    collect_corpus,
    continue_greedily,
    encode,
    replacing_files,
    save_checkpoint,
    train,
)
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.models.llama.modeling_llama import (
    LlamaMLP,
    LlamaRMSNorm,
    LlamaRotaryEmbedding,
    apply_rotary_pos_emb,
)
from transformers.utils import logging

NUM_DRAFT_TOKENS = 4
"""Places of a draft: heads of Medusa, unrolled steps of EAGLE-3, and what the acceptance is measured on."""

PLACE_DECAY = 0.8
"""Each place's weight in the loss relative to the one before (the paper of Medusa, section 2.2.1)."""

ROW_STRIDE = 4
"""EAGLE-3's places after the first, and all of Medusa's, are trained on every so many rows only. A place of all rows
takes about half the arithmetic of running the target, which is better spent on more text."""


MIMO_KEYS = frozenset(
    {
        "bos_token_id", "eos_token_id", "hidden_act", "hidden_size", "initializer_range", "intermediate_size",
        "max_position_embeddings", "num_attention_heads", "num_hidden_layers", "num_key_value_heads", "pad_token_id",
        "rms_norm_eps", "tie_word_embeddings", "use_cache", "vocab_size",
    }
)  # fmt: skip
"""What MiMo's configuration has of Llama's."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TargetOutput:
    """What the target computed for a batch of windows."""

    layer_inputs: list[torch.Tensor]
    """The residual stream before each layer, shape [N, L, E] each."""

    hidden_states: torch.Tensor
    """The hidden states after the final norm, shape [N, L, E]."""


@torch.no_grad()
def run_target(target: LlamaForCausalLM, tokens: torch.Tensor) -> TargetOutput:
    """Runs the target on tokens of shape [N, L]."""
    stream = target.model.embed_tokens(tokens)
    rotary = target.model.rotary_emb(stream, position_ids=torch.arange(tokens.shape[1])[None])
    layer_inputs = []
    for layer in target.model.layers:
        layer_inputs.append(stream)
        # Without a mask scaled_dot_product_attention is causal.
        stream = layer(stream, attention_mask=None, position_embeddings=rotary)
    return TargetOutput(layer_inputs=layer_inputs, hidden_states=target.model.norm(stream))


def distillation_loss(logits: torch.Tensor, target_probs: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy of the drafter's distribution under the target's.

    It differs by a constant from the Kullback-Leibler divergence where both have the same vocabulary. Where the
    drafter's is smaller, target_probs holds the target's probabilities of its tokens, as they are: rows in which the
    target means another token count for less.
    """
    return -(target_probs * functional.log_softmax(logits.float(), dim=-1)).sum(dim=-1).mean()


class Drafter(ABC):
    """Something that drafts tokens for a target, while it is trained."""

    module: nn.Module
    """Whose parameters are trained."""

    layers: nn.Module
    """The part of the module whose matrices Muon trains."""

    matrix_learning_rate = 5e-3
    """Peak learning rate of those matrices."""

    @abstractmethod
    def loss(self, windows: torch.Tensor) -> torch.Tensor:
        """The loss of a batch of windows, shape [N, L + 1]."""

    @abstractmethod
    def draft(self, contexts: torch.Tensor) -> torch.Tensor:
        """Drafts greedily after contexts of shape [N, L]; returns tokens of shape [N, NUM_DRAFT_TOKENS].

        The last token of a context is the one just sampled: the target has not computed hidden states for it yet.
        """

    @abstractmethod
    def save(self, out: Path) -> None:
        """Writes the checkpoint folder in bfloat16."""

    @abstractmethod
    def load(self, out: Path) -> None:
        """Replaces the module's weights by those of a folder that save wrote."""


class DraftModel(Drafter):
    """A small Llama, trained to the target's distribution at every position."""

    def __init__(self, target: LlamaForCausalLM, tokenizer: PreTrainedTokenizerFast):
        self.target = target
        self.tokenizer = tokenizer
        config = copy.deepcopy(target.config)
        config.hidden_size = 128
        config.intermediate_size = 384
        config.num_hidden_layers = 1
        config.num_attention_heads = 4
        config.num_key_value_heads = 2
        self._use(LlamaForCausalLM(config))

    def _use(self, model: LlamaForCausalLM) -> None:
        self.model = self.module = model
        self.layers = model.model.layers

    def loss(self, windows: torch.Tensor) -> torch.Tensor:
        tokens = windows[:, :-1]
        with torch.no_grad():
            logits = self.target.lm_head(run_target(self.target, tokens).hidden_states)
            target_probs = logits.float().softmax(dim=-1)
        return distillation_loss(self.model(input_ids=tokens, use_cache=False).logits, target_probs)

    def draft(self, contexts: torch.Tensor) -> torch.Tensor:
        return continue_greedily(self.model, contexts, NUM_DRAFT_TOKENS)

    def save(self, out: Path) -> None:
        save_checkpoint(self.model, self.tokenizer, out)

    def load(self, out: Path) -> None:
        self._use(LlamaForCausalLM.from_pretrained(out, dtype=torch.float32))


class ChainAttention(nn.Module):
    """Attention of a head that drafts one token after the other."""

    def __init__(self, config: LlamaConfig, input_size: int, qkv_bias: bool = False):
        super().__init__()
        num_key_value_heads = config.num_key_value_heads or config.num_attention_heads
        self.head_dim = config.head_dim or config.hidden_size // config.num_attention_heads
        self.num_groups = config.num_attention_heads // num_key_value_heads
        query_size = config.num_attention_heads * self.head_dim
        key_value_size = num_key_value_heads * self.head_dim
        self.q_proj = nn.Linear(input_size, query_size, bias=qkv_bias)
        self.k_proj = nn.Linear(input_size, key_value_size, bias=qkv_bias)
        self.v_proj = nn.Linear(input_size, key_value_size, bias=qkv_bias)
        self.o_proj = nn.Linear(query_size, config.hidden_size, bias=False)

    def forward(
        self,
        inputs: torch.Tensor,
        rotary: tuple[torch.Tensor, torch.Tensor],
        rows: torch.Tensor,
        cache: list[tuple[torch.Tensor, torch.Tensor]],
    ) -> torch.Tensor:
        """One place of the rows' drafts.

        Row r attends to what place 0 computed for the rows up to r, which are the known positions, and to what each
        later place computed for row r itself, this one included (training-time test, section 3.2 of the paper).

        Args:
            inputs: shape [N, R, input_size].
            rotary: cosines and sines of the rows' positions.
            rows: which rows these are, shape [R]; all of them at place 0, and the same at each place after it.
            cache: keys and values of the places so far, shape [N, H, R, D] each; those of this place are appended.

        Returns:
            Shape [N, R, E].
        """
        query, key, value = (
            projection(inputs).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        query, key = apply_rotary_pos_emb(query, key, *rotary)
        cache.append((key.repeat_interleave(self.num_groups, 1), value.repeat_interleave(self.num_groups, 1)))
        (known_key, known_value), *own = cache
        num_known = known_key.shape[2]
        future = torch.arange(num_known) > rows[:, None]
        scores = (query @ known_key.transpose(-1, -2)).float().masked_fill(future, -torch.inf)
        own_scores = [(query * own_key).sum(dim=-1, keepdim=True).float() for own_key, _ in own]
        weights = (torch.cat([scores, *own_scores], dim=-1) * self.head_dim**-0.5).softmax(dim=-1).to(value.dtype)
        output = weights[..., :num_known] @ known_value
        for place, (_, own_value) in enumerate(own):
            output = output + weights[..., num_known + place, None] * own_value
        return self.o_proj(output.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class Eagle3Layer(nn.Module):
    """The decoder layer of the head. The feature, not its norm, is the residual stream."""

    def __init__(self, config: LlamaConfig):
        super().__init__()
        # Queries, keys and values come from an embedding next to a feature.
        self.self_attn = ChainAttention(config, 2 * config.hidden_size)
        self.mlp = LlamaMLP(config)  # type: ignore[no-untyped-call]
        self.input_layernorm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.hidden_norm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)

    def forward(
        self,
        features: torch.Tensor,
        embeddings: torch.Tensor,
        rotary: tuple[torch.Tensor, torch.Tensor],
        rows: torch.Tensor,
        cache: list[tuple[torch.Tensor, torch.Tensor]],
    ) -> torch.Tensor:
        """Features and embeddings of shape [N, R, E] to the next features, of the same shape."""
        inputs = torch.cat([self.input_layernorm(embeddings), self.hidden_norm(features)], dim=-1)
        hidden = features + self.self_attn(inputs, rotary, rows, cache)
        return hidden + self.mlp(self.post_attention_layernorm(hidden))  # type: ignore[no-any-return]


class Eagle3Head(nn.Module):
    """The parameters of an EAGLE-3 checkpoint, under its names."""

    d2t: torch.Tensor
    t2d: torch.Tensor

    def __init__(self, config: LlamaConfig):
        super().__init__()
        self.midlayer = Eagle3Layer(config)
        self.norm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        num_features = len(config.eagle_config["eagle_aux_hidden_state_layer_ids"])
        self.fc = nn.Linear(num_features * config.hidden_size, config.hidden_size, bias=False)
        self.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False)
        self.register_buffer("d2t", torch.zeros(config.draft_vocab_size, dtype=torch.int64))
        self.register_buffer("t2d", torch.zeros(config.vocab_size, dtype=torch.bool))
        self.rotary_emb = LlamaRotaryEmbedding(config)

    def forward(
        self,
        features: torch.Tensor,
        embeddings: torch.Tensor,
        rows: torch.Tensor,
        place: int,
        cache: list[tuple[torch.Tensor, torch.Tensor]],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """One place of the rows' drafts: the next features, shape [N, R, E], and logits over the draft vocabulary."""
        rotary = self.rotary_emb(features, position_ids=(rows + place)[None])
        features = self.midlayer(features, embeddings, rotary, rows, cache)
        return features, self.lm_head(self.norm(features))


class ChainHead(Drafter):
    """A head that reads features of the target at known positions, and its own at those of drafts."""

    target: LlamaForCausalLM

    @property
    @abstractmethod
    def target_ids(self) -> torch.Tensor:
        """The target's ids of the draft vocabulary."""

    @abstractmethod
    def first_features(self, output: TargetOutput) -> torch.Tensor:
        """The features of known positions, shape [N, L, E]."""

    @abstractmethod
    def step(
        self,
        features: torch.Tensor,
        embeddings: torch.Tensor,
        rows: torch.Tensor,
        place: int,
        cache: list[tuple[torch.Tensor, torch.Tensor]],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """One place of the rows' drafts: the next features, shape [N, R, E], and logits over the draft vocabulary."""

    def loss(self, windows: torch.Tensor) -> torch.Tensor:
        tokens = windows[:, :-1]
        output = run_target(self.target, tokens)
        with torch.no_grad():
            target_probs = self.target.lm_head(output.hidden_states).float().softmax(dim=-1)[..., self.target_ids]
            embeddings = self.target.model.embed_tokens(tokens)
        rows = torch.arange(tokens.shape[1] - NUM_DRAFT_TOKENS)
        features = self.first_features(output)[:, rows]
        cache: list[tuple[torch.Tensor, torch.Tensor]] = []
        loss = torch.zeros(())
        for place in range(NUM_DRAFT_TOKENS):
            if place == 1:
                rows, features = rows[::ROW_STRIDE], features[:, ::ROW_STRIDE]
            sampled = rows + 1 + place
            features, logits = self.step(features, embeddings[:, sampled], rows, place, cache)
            loss = loss + PLACE_DECAY**place * distillation_loss(logits, target_probs[:, sampled])
        return loss

    def draft(self, contexts: torch.Tensor) -> torch.Tensor:
        features = self.first_features(run_target(self.target, contexts[:, :-1]))
        tokens = contexts[:, 1:]
        rows = torch.arange(tokens.shape[1])
        cache: list[tuple[torch.Tensor, torch.Tensor]] = []
        drafts = []
        for place in range(NUM_DRAFT_TOKENS):
            features, logits = self.step(features, self.target.model.embed_tokens(tokens), rows, place, cache)
            # From here on the last row alone, whose draft is the one after the whole context.
            rows, features = rows[-1:], features[:, -1:]
            tokens = self.target_ids[logits[:, -1:].argmax(dim=-1)]
            drafts.append(tokens)
        return torch.cat(drafts, dim=1)


class Eagle3(ChainHead):
    """An EAGLE-3 head whose vocabulary is the corpus's most frequent tokens."""

    def __init__(self, target: LlamaForCausalLM, corpus: TokenIds, draft_vocab_size: int):
        self.target = target
        self.config = copy.deepcopy(target.config)
        self.config.architectures = ["LlamaForCausalLMEagle3"]
        self.config.intermediate_size = 512
        self.config.num_hidden_layers = 1
        self.config.tie_word_embeddings = False
        self.config.draft_vocab_size = draft_vocab_size
        # As far apart as the paper's low, middle and high features.
        self.config.eagle_config = {"eagle_aux_hidden_state_layer_ids": [1, 3, 5], "use_aux_hidden_state": True}

        frequencies = np.bincount(corpus, minlength=target.config.vocab_size)
        most_frequent = np.sort(np.argsort(-frequencies, kind="stable")[:draft_vocab_size])
        target_ids = torch.from_numpy(most_frequent)
        self.module = self.head = Eagle3Head(self.config)
        self.head.d2t.copy_(target_ids - torch.arange(draft_vocab_size))
        self.head.t2d[target_ids] = True
        self.head.lm_head.weight.data.copy_(target.lm_head.weight[target_ids])
        self.layers = nn.ModuleList([self.head.midlayer, self.head.fc])

    @property
    def target_ids(self) -> torch.Tensor:
        return self.head.d2t + torch.arange(len(self.head.d2t))

    def first_features(self, output: TargetOutput) -> torch.Tensor:
        layer_ids = self.config.eagle_config["eagle_aux_hidden_state_layer_ids"]
        return self.head.fc(torch.cat([output.layer_inputs[i] for i in layer_ids], dim=-1))  # type: ignore[no-any-return]

    def step(self, *inputs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        return self.head(*inputs)  # type: ignore[no-any-return]

    def save(self, out: Path) -> None:
        save_module(self.head, self.config, out)

    def load(self, out: Path) -> None:
        self.head.load_state_dict(load_file(out / "model.safetensors"))


class MtpLayer(nn.Module):
    """The parameters of a layer of multi-token prediction, under MiMo's names."""

    def __init__(self, target: LlamaForCausalLM):
        super().__init__()
        config = target.config
        self.self_attn = ChainAttention(config, config.hidden_size, qkv_bias=True)
        self.mlp = LlamaMLP(config)  # type: ignore[no-untyped-call]
        self.token_layernorm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.hidden_layernorm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.input_layernorm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.post_attention_layernorm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.final_layernorm = LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.input_proj = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        self.rotary_emb = LlamaRotaryEmbedding(config)
        self.load_state_dict(target.model.layers[-1].state_dict(), strict=False)
        self.final_layernorm.load_state_dict(target.model.norm.state_dict())
        with torch.no_grad():
            for projection in (self.self_attn.q_proj, self.self_attn.k_proj, self.self_attn.v_proj):
                projection.bias.zero_()
            self.input_proj.weight.copy_(torch.eye(config.hidden_size).repeat(1, 2) / 2)

    def forward(
        self,
        features: torch.Tensor,
        embeddings: torch.Tensor,
        rows: torch.Tensor,
        place: int,
        cache: list[tuple[torch.Tensor, torch.Tensor]],
    ) -> torch.Tensor:
        """One place of the rows' drafts: the next features, shape [N, R, E]."""
        rotary = self.rotary_emb(features, position_ids=(rows + place)[None])
        stream = self.input_proj(torch.cat([self.hidden_layernorm(features), self.token_layernorm(embeddings)], dim=-1))
        stream = stream + self.self_attn(self.input_layernorm(stream), rotary, rows, cache)
        stream = stream + self.mlp(self.post_attention_layernorm(stream))
        return self.final_layernorm(stream)  # type: ignore[no-any-return]


class Mtp(ChainHead):
    """A layer of multi-token prediction, with the target's output matrix. It begins as the target's last layer."""

    PREFIX = "model.mtp_layers.0."
    OWN, TARGETS = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"

    def __init__(self, target: LlamaForCausalLM, folder: Path):
        self.target, self._folder = target, folder
        self.module = self.layers = MtpLayer(target)

    @property
    def target_ids(self) -> torch.Tensor:
        return torch.arange(self.target.config.vocab_size)

    def first_features(self, output: TargetOutput) -> torch.Tensor:
        return output.hidden_states

    def step(self, *inputs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        features = self.module(*inputs)
        return features, self.target.lm_head(features)

    def save(self, out: Path) -> None:
        config = {name: value for name, value in self.target.config.to_dict().items() if name in MIMO_KEYS}
        config |= {
            "architectures": ["MiMoForCausalLM"],
            "model_type": "mimo",
            "attention_bias": True,
            "dtype": "bfloat16",
            "num_nextn_predict_layers": 1,
            "rope_theta": self.target.config.rope_parameters["rope_theta"],
            "use_sliding_window": False,
        }
        own = {f"{self.PREFIX}{name}": tensor for name, tensor in self.module.state_dict().items()}
        for number, layer in enumerate(self.target.model.layers):  # Qwen2 has biases, and Llama none
            for part in "qkv":
                projection = getattr(layer.self_attn, f"{part}_proj")
                own[f"model.layers.{number}.self_attn.{part}_proj.bias"] = torch.zeros(projection.out_features)
        targets = load_file(self._folder / "model.safetensors")
        shards = {self.OWN: own, self.TARGETS: targets}
        weight_map = {name: file for file, tensors in shards.items() for name in tensors}
        total_size = sum(2 * tensor.numel() for tensors in shards.values() for tensor in tensors.values())
        index = {"metadata": {"total_size": total_size}, "weight_map": dict(sorted(weight_map.items()))}
        files = {path.name: path for path in self._folder.iterdir() if path.name != "config.json"}
        files[self.TARGETS] = files.pop("model.safetensors")
        with replacing_files(out) as temporary:
            for name, content in (("config.json", config), ("model.safetensors.index.json", index)):
                (temporary / name).write_text(json.dumps(content, indent=2) + "\n")
            save_file(
                {name: tensor.bfloat16() for name, tensor in own.items()},
                temporary / self.OWN,
                metadata={"format": "pt"},
            )
            for name, path in files.items():
                (temporary / name).symlink_to(os.path.relpath(path, out))

    def load(self, out: Path) -> None:
        tensors = load_file(out / self.OWN)
        own = {name.removeprefix(self.PREFIX): one for name, one in tensors.items() if name.startswith(self.PREFIX)}
        self.module.load_state_dict(own)


class MedusaBlock(nn.Module):
    """The residual blocks of one head."""

    def __init__(self, hidden_size: int, num_layers: int):
        super().__init__()
        layers = [nn.Linear(hidden_size, hidden_size) for _ in range(num_layers)]
        for layer in layers:
            # Each head starts as the target's own (section 2.1.1 of the paper).
            nn.init.zeros_(layer.weight)
            nn.init.zeros_(layer.bias)
        self.layers = nn.ModuleList(layers)

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        """Hidden states to hidden states, shape [N, R, E]."""
        for layer in self.layers:
            hidden_states = hidden_states + functional.silu(layer(hidden_states))
        return hidden_states


class MedusaHeads(nn.Module):
    """The parameters of a Medusa checkpoint, under the names of vLLM."""

    def __init__(self, hidden_size: int, num_heads: int, num_layers: int):
        super().__init__()
        self.blocks = nn.ModuleList(MedusaBlock(hidden_size, num_layers) for _ in range(num_heads))


class Medusa(Drafter):
    """Medusa-1 heads that share the target's output matrix."""

    matrix_learning_rate = 2e-2
    """They start at zero and have far to go: in a trial of 250 steps on a part of the corpus, 5e-3 left the first
    head's loss 0.2 nats higher."""

    def __init__(self, target: LlamaForCausalLM, num_layers: int = 1):
        self.target = target
        hidden_size, vocab_size = target.config.hidden_size, target.config.vocab_size
        self.config = {
            "architectures": ["MedusaModel"],
            "model_type": "medusa",
            "dtype": "bfloat16",
            "hidden_size": hidden_size,
            "vocab_size": vocab_size,
            "truncated_vocab_size": vocab_size,
            "medusa_num_heads": NUM_DRAFT_TOKENS,
            "num_heads": NUM_DRAFT_TOKENS,
            "medusa_num_layers": num_layers,
            "num_hidden_layers": num_layers,
            "medusa_fc_bias": True,
            "original_lm_head": True,
            "max_position_embeddings": target.config.max_position_embeddings,
        }
        self.module = self.heads = MedusaHeads(hidden_size, NUM_DRAFT_TOKENS, num_layers)
        self.layers = self.heads.blocks

    def loss(self, windows: torch.Tensor) -> torch.Tensor:
        hidden_states = run_target(self.target, windows[:, :-1]).hidden_states
        with torch.no_grad():
            target_probs = self.target.lm_head(hidden_states).float().softmax(dim=-1)
        rows = torch.arange(0, hidden_states.shape[1] - NUM_DRAFT_TOKENS, ROW_STRIDE)
        loss = torch.zeros(())
        for place, block in enumerate(self.heads.blocks):
            logits = self.target.lm_head(block(hidden_states[:, rows]))
            loss = loss + PLACE_DECAY**place * distillation_loss(logits, target_probs[:, rows + 1 + place])
        return loss

    def draft(self, contexts: torch.Tensor) -> torch.Tensor:
        last = run_target(self.target, contexts[:, :-1]).hidden_states[:, -1]
        return torch.stack([self.target.lm_head(block(last)).argmax(dim=-1) for block in self.heads.blocks], dim=1)

    def save(self, out: Path) -> None:
        save_module(self.heads, self.config, out)

    def load(self, out: Path) -> None:
        self.heads.load_state_dict(load_file(out / "model.safetensors"))


def save_module(module: nn.Module, config: LlamaConfig | dict[str, object], out: Path) -> None:
    """Writes a module's tensors, in bfloat16 where they are floats, and its configuration."""
    with replacing_files(out) as temporary:
        if isinstance(config, LlamaConfig):
            config.dtype = torch.bfloat16
            config.save_pretrained(temporary)
        else:
            (temporary / "config.json").write_text(json.dumps(config, indent=2) + "\n")
        tensors = {
            name: tensor.bfloat16() if tensor.is_floating_point() else tensor
            for name, tensor in module.state_dict().items()
        }
        save_file(tensors, temporary / "model.safetensors", metadata={"format": "pt"})


def own_text(target: Path, stream: TokenIds, num_contexts: int, lengths: tuple[int, int], seed: int) -> TokenIds:
    """Contexts out of the stream, each with the target's own continuation, one after the other.

    Quire generates them, for which it has to be installed: as the model is served, in bfloat16.

    Args:
        target: its folder.
        stream: what contexts are taken from.
        num_contexts: how many.
        lengths: of a context, and of the target's own continuation, in tokens.
        seed: of what they are.

    Returns:
        Shape [num_contexts * sum(lengths)].
    """
    from quire_engine import LLM, SamplingParams

    context_length, own_length = lengths
    starts = np.random.default_rng(seed).integers(0, len(stream) - context_length, num_contexts).tolist()
    contexts = [stream[start : start + context_length].tolist() for start in starts]
    params = [
        SamplingParams(
            temperature=0.7 if number % 2 else 0.0,
            seed=number,
            max_tokens=own_length,
            ignore_eos=True,
            detokenize=False,
        )
        for number in range(num_contexts)
    ]
    llm = LLM(target, dtype="bfloat16", max_num_seqs=64)
    outputs = llm.generate([{"prompt_token_ids": context} for context in contexts], params)
    llm.shutdown()
    texts = [context + output.outputs[0].token_ids for context, output in zip(contexts, outputs, strict=True)]
    return np.concatenate(texts).astype(stream.dtype)


@torch.no_grad()
def count_accepted(
    drafter: Drafter,
    target: LlamaForCausalLM,
    stream: TokenIds,
    *,
    length: int,
    stride: int,
    num_own: int = 0,
    batch_size: int = 32,
) -> torch.Tensor:
    """How many tokens of each greedy draft equal the target's own greedy continuation, up to the first that does not.

    Every stride tokens of the stream a context of the given length begins. The text decides the context alone: drafter
    and target both go on from it by tokens of their own. With `num_own` the target's greedy continuation takes the
    place of so many last tokens of each context. Shape [num_contexts], values from 0 to NUM_DRAFT_TOKENS.
    """
    starts = range(0, len(stream) - length + 1, stride)
    contexts = torch.from_numpy(np.stack([stream[start : start + length] for start in starts]))
    if num_own:
        given = contexts[:, : length - num_own].split(128)  # type: ignore[no-untyped-call]
        contexts = torch.cat([torch.cat([part, continue_greedily(target, part, num_own)], dim=1) for part in given])
    accepted = [
        (drafter.draft(batch) == continue_greedily(target, batch, NUM_DRAFT_TOKENS)).long().cumprod(dim=1).sum(dim=1)
        for batch in contexts.split(batch_size)  # type: ignore[no-untyped-call]
    ]
    return torch.cat(accepted)


def acceptance(accepted: torch.Tensor) -> dict[str, object]:
    """What `count_accepted` found, in short."""
    # Of the drafts of which all places before were accepted, those of which this place was too.
    reached = [int((accepted >= place).sum()) for place in range(NUM_DRAFT_TOKENS + 1)]
    return {
        "drafts": len(accepted),
        "by_place": [round(now / before, 3) if before else None for before, now in itertools.pairwise(reached)],
        "mean_accepted_length": round(accepted.double().mean().item(), 3),
    }


def parse_arguments() -> argparse.Namespace:
    """The command line; the defaults are those of the published folders."""
    default = TrainingConfig()
    parser = argparse.ArgumentParser(
        description="Train what drafts tokens for tinypy, on the source of the Python standard library.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    parser.add_argument("method", choices=("draft", "eagle3", "medusa", "mtp"), help="what to train")
    parser.add_argument("--target", type=Path, required=True, help="Hugging Face folder of the model to draft for")
    parser.add_argument("--out", type=Path, required=True, help="folder for the checkpoint")
    parser.add_argument("--library", type=Path, default=Path(sysconfig.get_paths()["stdlib"]), help="source to learn")
    parser.add_argument("--steps", type=int, default=700, help="optimizer steps; 0 only measures what is in --out")
    parser.add_argument("--draft-vocab-size", type=int, default=2048, help="tokens that the EAGLE-3 head can draft")
    parser.add_argument("--resume", action="store_true", help="begin with the weights in --out")
    parser.add_argument(
        "--own-contexts", type=int, default=0, help="learn from the target's own continuations of so many contexts"
    )
    parser.add_argument(
        "--own-text",
        type=int,
        nargs=2,
        default=(128, 384),
        metavar=("CONTEXT", "OWN"),
        help="tokens of each of those contexts, and of the continuation",
    )
    parser.add_argument(
        "--long-from", type=float, default=0.9, help="share of the steps after which windows are of 1,024 tokens"
    )
    parser.add_argument(
        "--mean-with",
        type=Path,
        help="folder of an earlier run, whose weights and the new ones are averaged at the end",
    )
    parser.add_argument("--seed", type=int, default=default.seed, help="seed of weights and data order")
    parser.add_argument("--threads", type=int, default=os.cpu_count() or 1, help="threads that torch computes with")
    parser.add_argument(
        "--compile",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="compile the forward and backward pass: faster, needs a C++ compiler",
    )
    parser.add_argument("--save-seconds", type=float, default=120.0, help="time between checkpoints")
    return parser.parse_args()


def train_drafter(drafter: Drafter, stream: TokenIds, arguments: argparse.Namespace) -> float:
    """Trains and saves the drafter; returns the mean training loss of the last fifty steps."""
    # Most of the learning is done on short windows, which are cheaper; the last steps have every position of a context.
    config = TrainingConfig(
        seed=arguments.seed,
        steps=arguments.steps,
        warmup_steps=50,
        matrix_learning_rate=drafter.matrix_learning_rate,
        window_stages=((0.0, 256), (arguments.long_from, 1024)),
    )

    def save() -> None:
        drafter.save(arguments.out)

    training_loss = train(
        drafter.module,
        build_optimizers(drafter.module, drafter.layers, config),
        drafter.loss,
        stream,
        config,
        save,
        arguments.save_seconds,
        compile_step=arguments.compile,
    )
    save()
    return training_loss


def main() -> None:
    """Collects, trains, saves, measures; prints a summary as JSON."""
    arguments = parse_arguments()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(arguments.seed)
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    began = time.monotonic()

    tokenizer = PreTrainedTokenizerFast.from_pretrained(arguments.target)
    for key in ("is_local", "local_files_only"):
        tokenizer.init_kwargs.pop(key, None)  # How it was loaded is not to be saved with it.
    target = LlamaForCausalLM.from_pretrained(arguments.target, dtype=torch.float32).requires_grad_(False)
    corpus = collect_corpus(arguments.library)
    training, validation = encode(corpus.training, tokenizer), encode(corpus.validation, tokenizer)
    drafter: Drafter
    if arguments.method == "draft":
        drafter = DraftModel(target, tokenizer)
    elif arguments.method == "eagle3":
        drafter = Eagle3(target, training, arguments.draft_vocab_size)
    elif arguments.method == "mtp":
        drafter = Mtp(target, arguments.target)
    else:
        drafter = Medusa(target)
    num_parameters = sum(parameter.numel() for parameter in drafter.module.parameters())
    print(
        f"{num_parameters:,} parameters; {len(corpus.training)} files, {len(training):,} tokens to learn; "
        f"{len(corpus.validation)} files, {len(validation):,} tokens to validate",
        flush=True,
    )

    training_loss = None
    if arguments.resume:
        drafter.load(arguments.out)
    if arguments.own_contexts:
        training = own_text(
            arguments.target, training, arguments.own_contexts, tuple(arguments.own_text), arguments.seed
        )
    if arguments.steps:
        training_loss = round(train_drafter(drafter, training, arguments), 4)
    minutes = (time.monotonic() - began) / 60

    drafter.load(arguments.out)
    if arguments.mean_with is not None:
        own = {name: tensor.clone() for name, tensor in drafter.module.state_dict().items()}  # loading writes to it
        drafter.load(arguments.mean_with)
        for name, other in drafter.module.state_dict().items():
            if other.is_floating_point():
                other.add_(own[name]).div_(2)
        drafter.save(arguments.out)
        drafter.load(arguments.out)
    summary = {
        "method": arguments.method,
        "parameters": num_parameters,
        "steps": arguments.steps,
        "training_loss": training_loss,
        "after_the_librarys_text": acceptance(count_accepted(drafter, target, validation, length=256, stride=64)),
        "after_its_own_text": acceptance(
            count_accepted(drafter, target, validation, length=256, stride=64, num_own=128)
        ),
        "minutes": round(minutes, 1),
        "python": sys.version.split()[0],
        "torch": torch.__version__,
    }
    print(json.dumps(summary, indent=2))


if __name__ == "__main__":
    main()
