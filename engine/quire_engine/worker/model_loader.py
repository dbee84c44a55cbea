"""ModelLoader: loads a rank's part of the model, and the model that drafts for it."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from quire_engine.config import EngineCoreConfig
from quire_engine.distributed import ParallelState
from quire_engine.kv_cache import StateSpec
from quire_engine.models import ServedCheckpoint
from quire_engine.models.base import CausalLM
from quire_engine.models.checkpoints.config import CheckpointConfig
from quire_engine.models.decoder import Decoder
from quire_engine.models.fallback.checkpoint import TransformersCheckpoint
from quire_engine.models.loader import load_model
from quire_engine.models.served import check_draft_checkpoint, draft_target
from quire_engine.models.step_context import KVCaches
from quire_engine.models.weight_cache import WeightCache, cache_for
from quire_engine.tasks.pooler import Pooler
from quire_engine.worker.batch.input_batch import InputBatch
from quire_engine.worker.drafting.drafting import Drafting
from quire_engine.worker.drafting.make import make_draft_method

logger = logging.getLogger(__name__)

CACHE_DTYPES = {"int8": torch.int8, "fp8": torch.float8_e4m3fn}
"""By `kv_cache_dtype`."""


class ModelLoader:
    """Loads them as often as they were discarded. Raises ValueError if the model that drafts does not suit the
    checkpoint."""

    def __init__(
        self,
        config: EngineCoreConfig,
        checkpoint: ServedCheckpoint,
        max_model_len: int,
        parallel: ParallelState,
        device: torch.device,
    ) -> None:
        self._config, self._checkpoint, self._max_model_len = config, checkpoint, max_model_len
        self._parallel, self._device = parallel, device
        drafts = config.scheduler.draft_checkpoint
        self._draft_target = None if drafts is None else draft_target(checkpoint, drafts[0])
        self.dtype_name = checkpoint.dtype if config.model.dtype == "auto" else config.model.dtype
        self._dtype: torch.dtype = getattr(torch, self.dtype_name)
        self.cache_dtype = CACHE_DTYPES.get(config.cache.kv_cache_dtype, self._dtype)
        self.weight_cache: WeightCache | None = None
        """The cache of the model that `load` has returned last; None if its packed weights are not kept."""

    def of(self, folder: str) -> "ModelLoader":
        """The same for a checkpoint of the same architecture and shapes in another folder."""
        config = replace(self._config, model=replace(self._config.model, model=folder))
        return ModelLoader(config, self._checkpoint, self._max_model_len, self._parallel, self._device)

    def load(self) -> CausalLM:
        """This rank's part of the model, on its device."""
        config = self._config.model
        if isinstance(self._checkpoint, TransformersCheckpoint):
            from quire_engine.models.fallback.model import load_transformers_model  # imports all of transformers

            if config.quantization is not None:
                raise ValueError(
                    f"quantization is {config.quantization!r}; it must be unset, as "
                    f"{self._checkpoint.architecture} runs with transformers' own code"
                )
            return load_transformers_model(
                Path(config.model), self._checkpoint, self._dtype, self._max_model_len, self._device,
                config.load_format,
            )  # fmt: skip
        assert isinstance(self._checkpoint, CheckpointConfig)
        drafts = self._config.scheduler.draft_checkpoint
        if drafts is not None and self._parallel.is_output_rank:  # before this model is loaded, which may take minutes
            check_draft_checkpoint(drafts[0], Path(drafts[1] or config.model), self._checkpoint, config.load_format)
        if self._device.type == "cpu" and config.load_format != "dummy":
            self.weight_cache = cache_for(
                config.weight_cache_dir, Path(config.model), self._checkpoint, self._dtype, config.quantization,
                self._parallel,
            )  # fmt: skip
        return load_model(
            Path(config.model), self._checkpoint, self._dtype, self._max_model_len, self._parallel,
            config.quantization, self._device, config.load_format, self.weight_cache,
        )  # fmt: skip

    def load_pooler(self) -> Pooler:
        """What makes results of hidden states; its head is on the output rank alone."""
        if not self._parallel.is_output_rank:
            return Pooler()
        model = self._config.model
        is_dummy = model.load_format == "dummy"
        return Pooler.load(Path(model.model), self._checkpoint, self._device, is_dummy=is_dummy)

    def load_drafting(
        self,
        model: CausalLM,
        batch: InputBatch,
        allocate_caches: Callable[[Sequence[StateSpec], int], KVCaches],
        target_caches: Callable[[], tuple[KVCaches, Sequence[int]]],
        clock: Callable[[], float],
    ) -> Drafting | None:
        """What drafts after steps, for what `load` returned; None without a model that drafts, or on ranks that do not
        sample. For the callables, see `make_draft_method`."""
        scheduler = self._config.scheduler
        if self._draft_target is None or not self._parallel.is_output_rank:
            return None
        assert isinstance(model, Decoder)
        method = make_draft_method(
            self._config, model, self._draft_target, self.cache_dtype, batch, self._max_model_len, self._device,
            allocate_caches, target_caches,
        )  # fmt: skip
        logger.info("drafts: %s, %d bytes per KV block", scheduler.draft_checkpoint, method.bytes_per_block)
        spec = scheduler.speculative_config
        by_chance = spec is not None and spec.acceptance == "rejection"
        return Drafting(method, batch, self._device, by_chance, clock)
