"""ChainModel: a model that drafts one token after the other; a smaller checkpoint, or a head. BlockModel: DFlash.

A smaller checkpoint with the same vocabulary: Leviathan et al. 2023, https://arxiv.org/abs/2211.17192; Chen et al.
2023, https://arxiv.org/abs/2302.01318.

A head reads hidden states of the target at every position before the one that it drafts for: EAGLE-3 and DFlash those
of several layers, multi-token prediction the last ones. Each step of the target stores them in a table with a row for
each cache slot, like keys and values. So they are there when a request begins to be drafted for late, after a rest, or
with a prefix that was found in the cache.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
from quire_kernels import load_rows, store_columns

from quire_engine.kv_cache import StateSpec
from quire_engine.models.base import FeatureTaps, RecordableLM
from quire_engine.models.decoder import Decoder
from quire_engine.models.dflash import DFlash
from quire_engine.models.eagle3 import Eagle3
from quire_engine.models.mtp import MultiTokenPredictor
from quire_engine.models.step_context import KVCaches, StepContext


class CachingModel(Protocol):
    """A model that drafts and has keys and values of its own. Its input at a position may be the token after that
    position."""

    token_offset: int
    """0: the input at position p is token p, as for any decoder. 1: it is token p + 1."""
    input_widths: Sequence[int]
    """Features of each of its inputs."""
    dtype: torch.dtype
    state_specs: Sequence[StateSpec]
    """By layer."""

    def known_inputs(self, token_ids_T: torch.Tensor, slot_mapping_T: torch.Tensor) -> list[torch.Tensor]:
        """The inputs at positions of known tokens, [T, width] each; uses only ops of `quire_kernels`, so that it can be
        recorded."""

    def layers(self, inputs: Sequence[torch.Tensor], context: StepContext, kv_caches: KVCaches) -> torch.Tensor:
        """[T, width] each → [T, E]; uses only ops of `quire_kernels`, so that it can be recorded."""

    def allocate_caches(self, num_blocks: int) -> KVCaches:
        """Keys and values for so many blocks, by layer. What else the model keeps for blocks is replaced, too."""


class ChainModel(CachingModel, Protocol):
    """What `ChainDrafter` drafts with."""

    def drafted_inputs(self, token_ids_T: torch.Tensor, out_TE: torch.Tensor) -> list[torch.Tensor]:
        """The inputs at positions of drafts, [T, width] each.

        Args:
            token_ids_T: the drafts.
            out_TE: what `layers` returned for the positions before them.
        """

    def logits(self, out_SE: torch.Tensor) -> torch.Tensor:
        """[S, E] → [S, V] float32, overwritten by the next call. It is recorded as well."""


class DraftModel:
    """A `ChainModel`.

    Args:
        model: all of it, on one rank.
        allocate_caches: (its layers, number of blocks) → their keys and values.
    """

    token_offset = 0

    def __init__(self, model: RecordableLM, allocate_caches: Callable[[Sequence[StateSpec], int], KVCaches]) -> None:
        self._model = model
        self.input_widths: Sequence[int] = [model.input_size]
        self.dtype = model.dtype
        self.state_specs = model.state_specs
        self._allocate_caches = allocate_caches

    def allocate_caches(self, num_blocks: int) -> KVCaches:
        caches = self._allocate_caches(self.state_specs, num_blocks)
        return [
            own if spec.cache_of is None else caches[spec.cache_of]
            for own, spec in zip(caches, self.state_specs, strict=True)
        ]

    def known_inputs(self, token_ids_T: torch.Tensor, slot_mapping_T: torch.Tensor) -> list[torch.Tensor]:
        return [self._model.embed(token_ids_T)]

    def drafted_inputs(self, token_ids_T: torch.Tensor, out_TE: torch.Tensor) -> list[torch.Tensor]:
        return [self._model.embed(token_ids_T)]

    def layers(self, inputs: Sequence[torch.Tensor], context: StepContext, kv_caches: KVCaches) -> torch.Tensor:
        return self._model.final_norm(*self._model.run_layers(inputs[0], None, context, kv_caches), context)

    def logits(self, out_SE: torch.Tensor) -> torch.Tensor:
        logits_SV = self._model.compute_logits(out_SE)
        assert logits_SV is not None, "it is on one rank"
        return logits_SV


class TappingModel:
    """The part of a `CachingModel` that reads the target's hidden states.

    Args:
        head: drafts.
        target: this rank's part of the model that it drafts for; it stores its hidden states from then on.
        block_size: tokens per KV block.
        allocate_caches: (its layers, number of blocks) → their keys and values.
    """

    token_offset = 1

    def __init__(
        self,
        head: Eagle3 | MultiTokenPredictor | DFlash,
        target: Decoder,
        block_size: int,
        allocate_caches: Callable[[Sequence[StateSpec], int], KVCaches],
    ) -> None:
        self._target, self._block_size, self._allocate_caches = target, block_size, allocate_caches
        self._tapped_layers, self.dtype = head.tapped_layers, head.dtype
        self._state_width = len(head.tapped_layers) * target.hidden_size
        self.state_specs: Sequence[StateSpec] = head.state_specs

    @property
    def table_bytes_per_block(self) -> int:
        """Memory of the target's hidden states."""
        return self._block_size * self._state_width * self._target.dtype.itemsize

    def allocate_caches(self, num_blocks: int) -> KVCaches:
        device = self._target.norm.weight.device
        self._target.feature_taps = None  # it frees what there was
        shape = (num_blocks * self._block_size, self._state_width)
        states = torch.zeros(shape, dtype=self._target.dtype, device=device)
        self._target.feature_taps = FeatureTaps(self._tapped_layers, states)
        return self._allocate_caches(self.state_specs, num_blocks)

    def _states(self, slot_mapping_T: torch.Tensor) -> torch.Tensor:
        """The target's hidden states, side by side."""
        assert self._target.feature_taps is not None
        return load_rows(self._target.feature_taps.table_NE, slot_mapping_T)


class HeadModel(TappingModel):
    """A `ChainModel`.

    Args:
        head: see `TappingModel`, like `target`, `block_size` and `allocate_caches`.
        target: likewise.
        vocab_size: of the target.
        max_num_rows: requests that are drafted for at once.
        block_size: likewise.
        allocate_caches: likewise.
    """

    def __init__(
        self,
        head: Eagle3 | MultiTokenPredictor,
        target: Decoder,
        vocab_size: int,
        max_num_rows: int,
        block_size: int,
        allocate_caches: Callable[[Sequence[StateSpec], int], KVCaches],
    ) -> None:
        super().__init__(head, target, block_size, allocate_caches)
        self._head, self._vocab_size = head, vocab_size
        self.input_widths: Sequence[int] = [head.hidden_size, head.hidden_size]
        width = 0 if head.target_ids is None else vocab_size
        self._logits = torch.full((max_num_rows, width), float("-inf"), device=target.norm.weight.device)
        """Recordings write to it, so it never moves. Tokens outside the head's vocabulary are never written."""

    def known_inputs(self, token_ids_T: torch.Tensor, slot_mapping_T: torch.Tensor) -> list[torch.Tensor]:
        return [self._head.embed(token_ids_T), self._head.features(self._states(slot_mapping_T))]

    def drafted_inputs(self, token_ids_T: torch.Tensor, out_TE: torch.Tensor) -> list[torch.Tensor]:
        return [self._head.embed(token_ids_T), out_TE]

    def layers(self, inputs: Sequence[torch.Tensor], context: StepContext, kv_caches: KVCaches) -> torch.Tensor:
        """Overwrites the hidden states with the result, with which drafting goes on at the next positions."""
        embedded_TE, feature_TE = inputs
        return self._head.run_layer(embedded_TE, feature_TE, context, kv_caches[0])

    def logits(self, out_SE: torch.Tensor) -> torch.Tensor:
        """[S, E] → [S, V] float32. Tokens outside the head's vocabulary have -inf."""
        logits_SD = self._head.logits(out_SE)
        if self._head.target_ids is None or self._vocab_size == logits_SD.shape[1]:
            return logits_SD
        logits_SV = self._logits[: len(logits_SD)]
        store_columns(logits_SD, self._head.target_ids, logits_SV)
        return logits_SV


class BlockModel(TappingModel):
    """A `CachingModel`, whose keys and values at known positions are made of the target's hidden states alone.

    Args:
        head: drafts.
        target: see `TappingModel`, like the others.
        block_size: likewise.
        allocate_caches: likewise.
    """

    def __init__(
        self,
        head: DFlash,
        target: Decoder,
        block_size: int,
        allocate_caches: Callable[[Sequence[StateSpec], int], KVCaches],
    ) -> None:
        super().__init__(head, target, block_size, allocate_caches)
        self.head = head
        self.input_widths: Sequence[int] = [head.hidden_size]

    def known_inputs(self, token_ids_T: torch.Tensor, slot_mapping_T: torch.Tensor) -> list[torch.Tensor]:
        return [self.head.features(self._states(slot_mapping_T))]

    def layers(self, inputs: Sequence[torch.Tensor], context: StepContext, kv_caches: KVCaches) -> torch.Tensor:
        self.head.write_caches(inputs[0], context, kv_caches)
        return inputs[0]
