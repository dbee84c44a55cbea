"""Our paged attention in the place of transformers' own (its attention interface, `ALL_ATTENTION_FUNCTIONS`).

Three implementations are registered there. `PAGED` computes. `EXACT` is the model's own, in float32. `PROBE` finds out,
in a run over a few tokens, what each layer needs: number and size of heads, scale, soft cap, and the window,
which only the mask tells for certain. transformers builds no masks for `PAGED`, which would take memory quadratic in
the tokens of a step; for `PROBE` it calls a function that reads the rule behind a mask instead.
"""

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from quire_kernels import paged_attention
from quire_kernels.kv_cache import write_kv_cache
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import eager_mask

from quire_engine.kv_cache import AttentionSpec
from quire_engine.models.step_context import StepContext

PAGED, EXACT, PROBE = "quire_paged", "quire_exact", "quire_probe"
PAGED_ATTRIBUTE = "quire_paged_attention"
"""The attribute of transformers' modules with their `PagedAttention`."""
CHANGES_NOTHING = frozenset((
    "cache_position", "is_causal", "logits_to_keep", "output_attentions", "output_hidden_states",
    "output_router_logits", "position_embeddings", "position_ids", "return_dict", "sliding_window", "use_cache",
))  # fmt: skip
"""Arguments of an attention function besides those that `Probe.attend` reads; `sliding_window` repeats the mask's."""
MAX_PROBED_POSITIONS = 1 << 17
"""Positions for which a mask's rule is read. No model has a longer window."""


class UnfitModelError(Exception):
    """A model cannot run with our attention; the message states why."""


@dataclass(slots=True)
class Step:
    """What the attention of all layers reads; set for each step."""

    context: StepContext
    kv_caches: Mapping[int, tuple[torch.Tensor, ...]]
    """By number of the layer."""


@dataclass(slots=True)
class PagedAttention:
    """The attention of one layer."""

    number: int
    spec: AttentionSpec
    scale: float
    soft_cap: float | None
    step: Step | None = None

    def __call__(self, query_THD: torch.Tensor, key_TKD: torch.Tensor, value_TKD: torch.Tensor) -> torch.Tensor:
        """[T, H, D] -> [T, H, D]; writes this step's keys and values to the cache first."""
        assert self.step is not None
        context, (key_cache, value_cache) = self.step.context, self.step.kv_caches[self.number]
        write_kv_cache(key_TKD, value_TKD, context.slot_mapping, key_cache, value_cache)
        return paged_attention(
            query_THD, key_cache, value_cache, context.block_table, context.query_start_loc, context.seq_lens,
            self.scale, context.plans.get(self.spec), window=self.spec.window, soft_cap=self.soft_cap,
        )  # fmt: skip


def _attend(
    module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any
) -> tuple[torch.Tensor, None]:
    """transformers' signature, for one flattened batch: [1, H, T, D] -> [1, T, H, D]."""
    attention: PagedAttention = getattr(module, PAGED_ATTRIBUTE)
    return attention(*(x[0].transpose(0, 1) for x in (query, key, value)))[None], None


def _attend_exactly(
    module: nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *more: Any, **others: Any
) -> tuple[torch.Tensor, None]:
    """The model's own function. In half precision it rounds the scores, which with some tokens changes its results by
    half of their size."""
    own = sys.modules[type(module).__module__].eager_attention_forward
    return own(module, query.float(), key.float(), value.float(), *more, **others)[0].to(query.dtype), None


AttentionInterface.register(PAGED, _attend)
AttentionInterface.register(EXACT, _attend_exactly)
AttentionMaskInterface.register(EXACT, eager_mask)


class Probe:
    """Records the attention of a model that runs with `PROBE`; only one at a time. The mask's rule is read for
    `max_position` positions, the longest sequence."""

    def __init__(self, max_position: int) -> None:
        self.layers: dict[nn.Module, PagedAttention] = {}
        """By the module that calls, in the order of the calls."""
        self._windows: list[int | None] = []
        """By number of the mask."""
        self._positions = min(max_position, MAX_PROBED_POSITIONS)
        AttentionInterface.register(PROBE, self.attend)
        AttentionMaskInterface.register(PROBE, self.mask)

    def mask(
        self,
        batch_size: int,
        q_length: int,
        kv_length: int,
        *_: Any,
        mask_function: Callable[..., torch.Tensor],
        **__: Any,
    ) -> torch.Tensor:
        """Return a mask that is filled with its number. Raises UnfitModelError if its rule is neither causal nor causal
        with a window."""
        self._windows.append(_window_of(mask_function, self._positions))
        return torch.full((batch_size, 1, q_length, kv_length), float(len(self._windows) - 1))

    def attend(
        self,
        module: nn.Module,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None,
        scaling: float | None = None,
        dropout: float = 0.0,
        softcap: float | None = None,
        **others: Any,
    ) -> tuple[torch.Tensor, None]:
        """Record a layer. Each token gets its own value, so that nothing else mixes tokens if the model is fit. Raises
        UnfitModelError if the layer needs what our attention does not do."""
        asked = [name for name, value in others.items() if value is not None and name not in CHANGES_NOTHING]
        if asked:
            raise UnfitModelError(f"gives its attention {', '.join(sorted(asked))}")
        (num_heads, head_size), num_kv_heads = query.shape[1::2], key.shape[1]
        if key.shape != value.shape or key.shape[3] != head_size:
            raise UnfitModelError(f"has heads of {head_size} for queries, {key.shape[3]} for keys and "
                                  f"{value.shape[3]} for values")  # fmt: skip
        if others.get("is_causal") is False or not getattr(module, "is_causal", True):
            raise UnfitModelError("has attention that is not causal")
        window = others.get("sliding_window") if attention_mask is None else self._window_behind(attention_mask)
        scale = head_size**-0.5 if scaling is None else float(scaling)
        attention = PagedAttention(
            len(self.layers), AttentionSpec(num_heads, num_kv_heads, head_size, window), scale, softcap
        )
        known = self.layers.setdefault(module, attention)
        attention.number = known.number
        if known != attention:
            raise UnfitModelError("calls one module's attention in several ways")
        return value.repeat_interleave(num_heads // num_kv_heads, dim=1).transpose(1, 2).contiguous(), None

    def _window_behind(self, mask: torch.Tensor) -> int | None:
        number = int(mask.max())
        if mask.dtype == torch.bool or number not in range(len(self._windows)) or not bool((mask == number).all()):
            raise UnfitModelError("makes masks of its own")
        return self._windows[number]

    def attach(self) -> list[PagedAttention]:
        """Attach its attention to each module, for `PAGED`."""
        for module, attention in self.layers.items():
            setattr(module, PAGED_ATTRIBUTE, attention)
        return list(self.layers.values())


def _window_of(mask_function: Callable[..., torch.Tensor], positions: int) -> int | None:
    """The window of a rule (batch, head, query, key) → visible, or None where every key before is."""
    zero, keys_K = torch.zeros(1, 1, dtype=torch.int64), torch.arange(positions)
    queries_Q1 = torch.tensor([positions // 3, positions // 2, positions // 2 + 1, positions - 1])[:, None]
    queries_Q1.clamp_(max=positions - 1)
    visible_QK = torch.as_tensor(mask_function(zero, zero, queries_Q1, keys_K)).broadcast_to(len(queries_Q1), positions)
    window = int(visible_QK[-1].sum())
    expected_QK = (keys_K <= queries_Q1) & (keys_K > queries_Q1 - window)
    if not torch.equal(visible_QK, expected_QK):
        raise UnfitModelError("has attention that is neither causal nor causal with a sliding window")
    return None if window == positions else window
