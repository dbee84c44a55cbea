"""Makes the method that drafts, from the settings.

MedusaDrafter drafts all tokens at once, from the hidden state of the last one (Cai et al. 2024,
https://arxiv.org/abs/2401.10774). It keeps nothing between steps.
"""

import logging
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from quire_kernels.kv_cache import scale_bytes

from quire_engine.config import EngineCoreConfig
from quire_engine.kv_cache import StateSpec, block_bytes
from quire_engine.messages import DraftTokens
from quire_engine.models.checkpoints.config import CheckpointConfig
from quire_engine.models.decoder import Decoder
from quire_engine.models.dflash import load_dflash
from quire_engine.models.eagle3 import Eagle3, load_eagle3
from quire_engine.models.gemma4_assistant import load_assistant
from quire_engine.models.loader import load_model
from quire_engine.models.medusa import MedusaHeads, load_medusa
from quire_engine.models.mtp import MultiTokenPredictor, load_mtp
from quire_engine.models.served import read_draft_model
from quire_engine.models.step_context import KVCaches
from quire_engine.worker.batch.input_batch import InputBatch
from quire_engine.worker.drafting.assistant import AssistantDrafter
from quire_engine.worker.drafting.block import BlockDrafter
from quire_engine.worker.drafting.chain import ChainDrafter
from quire_engine.worker.drafting.chain_models import BlockModel, DraftModel, HeadModel
from quire_engine.worker.drafting.draft_sampling import DraftSampling
from quire_engine.worker.drafting.drafting import DraftMethod
from quire_engine.worker.forward.recorded import RECORDED_TOKENS

logger = logging.getLogger(__name__)

Int64Array = npt.NDArray[np.int64]


class MedusaDrafter:
    """A `DraftMethod`. Each head drafts a place, so drafts are as long as there are heads, or shorter."""

    needs_hidden = True
    bytes_per_block = 0
    recorded_bytes = 0

    def __init__(self, heads: MedusaHeads) -> None:
        self._heads = heads

    def initialize_cache(self, num_blocks: int) -> None:
        """It has none."""

    def forget_blocks(self, block_ids: list[int]) -> None:
        """It knows none."""

    def draft(self, slots: Int64Array, hidden_SE: torch.Tensor | None, sampling: DraftSampling) -> list[DraftTokens]:
        assert hidden_SE is not None
        logits_SHV = self._heads.logits(hidden_SE)
        for place in range(min(sampling.num_places, self._heads.num_heads)):
            sampling.draw(logits_SHV[: sampling.num_rows(place), place])
        return sampling.drafts()


def make_draft_method(
    config: EngineCoreConfig,
    target: Decoder,
    target_config: CheckpointConfig,
    cache_dtype: torch.dtype,
    batch: InputBatch,
    max_model_len: int,
    device: torch.device,
    allocate_caches: Callable[[Sequence[StateSpec], int], KVCaches],
    target_caches: Callable[[], tuple[KVCaches, Sequence[int]]],
) -> DraftMethod:
    """Load what drafts.

    Args:
        config: names it.
        target: this rank's part of the model that it drafts for.
        target_config: of the whole.
        cache_dtype: of keys and values.
        batch: the requests.
        max_model_len: of the target.
        device: of the target.
        allocate_caches: (layers, number of blocks) → their keys and values.
        target_caches: the target's present caches, and by layer its group.

    Raises:
        CheckpointError: its checkpoint is not as it has to be.
    """
    drafts = config.scheduler.draft_checkpoint
    assert drafts is not None, "without a model that drafts"
    quantization = config.model.quantization
    target_folder = Path(config.model.model)
    method, folder = drafts[0], Path(drafts[1] or target_folder)
    if method == "medusa":
        return MedusaDrafter(load_medusa(folder, target_folder, target_config, target, quantization, device))
    if method == "gemma4_assistant":
        assistant = load_assistant(folder, target_config, target, max_model_len, quantization, device)
        return AssistantDrafter(assistant, target, batch, target_caches)
    size, max_tokens = batch.block_size, config.scheduler.max_num_batched_tokens
    sizes = size, cache_dtype.itemsize, 1, scale_bytes(cache_dtype)
    max_drafts = config.scheduler.max_draft_tokens
    max_num_rows = max(config.scheduler.max_num_seqs, RECORDED_TOKENS)
    if method == "dflash":
        dflash = load_dflash(folder, target_folder, target_config, target, max_model_len, quantization, device)
        block_model = BlockModel(dflash, target, size, allocate_caches)
        own_bytes = block_bytes(block_model.state_specs, *sizes) + block_model.table_bytes_per_block
        return BlockDrafter(block_model, own_bytes, batch, max_tokens)
    if method in ("eagle3", "mtp"):
        head: Eagle3 | MultiTokenPredictor
        if method == "eagle3":
            head = load_eagle3(folder, target_folder, target_config, target, max_model_len, quantization, device)
        else:
            is_dummy = config.model.load_format == "dummy"
            head = load_mtp(folder, target_config, target, max_model_len, quantization, device, is_dummy=is_dummy)
        with_head = HeadModel(head, target, target_config.vocab_size, max_num_rows, size, allocate_caches)
        own_bytes = block_bytes(with_head.state_specs, *sizes) + with_head.table_bytes_per_block
        return ChainDrafter(with_head, own_bytes, batch, max_tokens, max_drafts)
    own_config = read_draft_model(folder, target_config)
    if own_config.max_position_embeddings < max_model_len:
        logger.warning(
            "%s: max_position_embeddings is %d, less than max_model_len=%d; drafts beyond it are hardly ever right",
            folder, own_config.max_position_embeddings, max_model_len,
        )  # fmt: skip
    model = load_model(folder, own_config, target.dtype, max_model_len, quantization=quantization, device=device)
    own_bytes = block_bytes(model.state_specs, *sizes)
    return ChainDrafter(DraftModel(model, allocate_caches), own_bytes, batch, max_tokens, max_drafts)
