"""EngineConfig: every setting of the engine, frozen and checked once.

The flat names are vLLM's, as in `model.json`. `EngineConfig.from_settings` sorts them into six groups, wherever they
come from: a file, `LLM(...)`, a command line.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from ipaddress import ip_address
from pathlib import Path
from typing import Annotated, Any

from quire_engine.config.checks import between, check, check_fields, filled, one_of, positive
from quire_engine.config.frontend_config import FrontendConfig
from quire_engine.config.hub import fetch_checkpoint, is_hub_name
from quire_engine.config.kv_transfer_config import KVTransferConfig
from quire_engine.config.lora_config import LoRAConfig
from quire_engine.config.parallel_config import ParallelConfig
from quire_engine.config.speculative_config import ASSISTANT, ONE_STAGE, WITHOUT_CACHE, SpeculativeConfig
from quire_engine.config.vllm_settings import without_vllm_names
from quire_engine.errors import did_you_mean

MAX_DRAFTED_ROWS = 512
"""Each row takes the memory of a vocabulary's logits. With far fewer rows a step is compute-bound already, and a draft
costs as much as a token of another request."""
REMOVED = {
    "max_response_bytes": "an answer may have 256 MiB",
    "cuda_graph_memory_bytes": "CUDA graphs take at most 1 GiB",
}
"""Settings of earlier versions: what holds instead."""
SECRETS = ("introspection_token",)
NO_SETTINGS = ("data_parallel_rank", "data_parallel_start_rank", "kv_memory")
"""The process that starts an engine core sets these; no file may."""
CONNECTORS_OF_HOSTS = ("SharedStorageConnector", "RemoteStorageConnector")
"""Connectors that share blocks among hosts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """Which checkpoint, and how it is computed."""

    model: Annotated[str, filled("the path of a folder")]
    """Path of a Hugging Face checkpoint folder or of a GGUF file; in settings also a folder's name on the Hub."""
    tokenizer: str | None = None
    """Path of the tokenizer's folder, or of a GGUF file that has it; unset: the model's."""
    dtype: Annotated[str, one_of("auto", "float32", "bfloat16", "float16")] = "auto"
    """The type of weights, activations and KV cache; `auto` takes the checkpoint's."""
    load_format: Annotated[str, one_of("auto", "dummy")] = "auto"
    """Where the weights come from: `auto` the checkpoint's files; `dummy` random ones, for measuring: then the folder
    needs only `config.json` and a tokenizer."""
    weight_cache_dir: str | None = None
    """On the CPU, packed weights of 64 MiB or more are kept in files of this folder, and later starts map them instead
    of reading the checkpoint. The files take at most half of the disk's free space. Unset: `quire/weights` in
    `$XDG_CACHE_HOME` or `~/.cache`; empty: none are kept."""
    model_impl: Annotated[str, one_of("auto", "quire", "transformers")] = "auto"
    """The code that computes the model: `quire` a family of ours; `transformers` transformers' own, with our attention,
    KV cache and sampler, which is slower; `auto` ours if there is one for the architecture, else transformers'."""
    quantization: Annotated[str, one_of("int8", "int4", "fp8")] | None = None
    """`int8` computes every linear layer in int8 (W8A8): weights are quantised when they are loaded, with one scale per
    output feature, activations as they come, with one scale per token. The output head's activations keep 16 bits
    (W8A16); on a GPU the head is not quantised. `int4` has weights of 4 bits in groups of 32 input features with a
    scale each (W4A8), and the head of `int8`; it is for the CPU: on a GPU the weights are dequantised again. Codes of 4
    or 8 bits that a checkpoint has stay as they are with `int4`. `fp8` does the same as `int8` in e4m3, but for the
    head, which is not quantised: GPUs from Ada on multiply it; on the CPU it is computed in float32, and is slow.
    Towers of images have 8 bits with each."""
    max_model_len: Annotated[int, between(1)] | None = None
    """Longest prompt plus output, in tokens; unset: what the checkpoint was trained for."""
    enforce_eager: bool = False
    """On a GPU, launch every kernel of every step by itself. Else steps in which all requests decode are captured as
    CUDA graphs when the engine starts. A pipeline's stages (`pipeline_parallel_size`) have none."""
    seed: Annotated[int, between(0)] = 0
    """Seeds what is random at start-up. Requests without a seed of their own get a random one each."""

    def __post_init__(self) -> None:
        check(self.tokenizer is None or isinstance(self.tokenizer, str), "tokenizer", self.tokenizer, "a path")
        folder = self.weight_cache_dir
        check(folder in (None, "") or (isinstance(folder, str) and folder.startswith("/")), "weight_cache_dir", folder,
              "the absolute path of a folder, or empty")  # fmt: skip
        check_fields(self)

    @property
    def tokenizer_path(self) -> str:
        """Folder of the tokenizer's files."""
        return self.tokenizer or self.model


@dataclass(frozen=True, kw_only=True, slots=True)
class CacheConfig:
    """The paged KV cache."""

    block_size: Annotated[int, between(1, 1024)] = 16
    """Tokens per KV block."""
    kv_cache_memory_bytes: Annotated[int, between(1)] | None = None
    """Bytes of KV cache; unset: sized by a profiling run."""
    gpu_memory_utilization: Annotated[float, positive("in (0, 1]", 1)] = 0.9
    """On a GPU, the share of its memory that weights, activations and KV cache may take. On the CPU it is a share of
    half of the free memory, which other programs need too."""
    kv_cache_dtype: Annotated[str, one_of("auto", "int8", "fp8")] = "auto"
    """`auto` is the model's. `int8`, with a scale for each token and head, holds almost twice the tokens, and long
    contexts are read almost twice as fast; it has kernels for the CPU alone. `fp8` (e4m3, without scales) holds twice
    the tokens, less precisely; it has kernels for GPUs alone, and is slow on the CPU."""
    enable_prefix_caching: bool = True
    """Reuse the KV blocks of equal prompt beginnings."""
    disable_hybrid_kv_cache_manager: bool = False
    """Let layers with a sliding window keep all tokens, as other layers do, and not only those that they see."""
    kv_transfer_config: KVTransferConfig | None = None
    """Keep full KV blocks elsewhere, too, from where they come back when the cache has lost them, even after a restart:
    in memory, `{"kv_connector": "SharedMemoryConnector"}`, or in files of a folder, `{"kv_connector":
    "SharedStorageConnector", "kv_connector_extra_config": {"shared_storage_path": "…"}}`. Unset: what leaves the cache
    is computed again; with `disaggregation`, in memory."""
    kv_memory: int | None = None
    """The descriptor of that memory, once there is some: its owner's, and inherited from there."""

    def __post_init__(self) -> None:
        if self.kv_transfer_config is not None and not isinstance(self.kv_transfer_config, KVTransferConfig):
            object.__setattr__(self, "kv_transfer_config", KVTransferConfig.from_value(self.kv_transfer_config))
        check_fields(self)
        if self.kv_transfer_config is not None and not self.enable_prefix_caching:
            raise ValueError(
                "enable_prefix_caching is False with kv_transfer_config, whose blocks are found by the prefix cache; "
                "leave one of the two out"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class SchedulerConfig:
    """What may run together in one step."""

    max_num_seqs: Annotated[int, between(1, 4096)] = 64
    """Requests that run at once. Each has a slot of max_model_len tokens in the batch of every rank, and start-up runs
    all of them in one step: the limit of 4096 keeps a typing error from taking all memory."""
    max_num_batched_tokens: Annotated[int, between(1)] = 2048
    """Token budget of one step, prefill and decode together."""
    long_prefill_token_threshold: Annotated[int, between(0)] = 0
    """The most prompt tokens of one request in a step; 0: only the budget limits them. One prompt at a time is computed
    in chunks, and prompts that fit the rest of a step overtake others that do not."""
    scheduling_policy: Annotated[str, one_of("fcfs", "priority", "slo")] = "fcfs"
    """Which waiting request comes next: `fcfs` the one that came first, `priority` the one with the lowest `priority`
    value, and of these the one that came first. The last in this order is preempted when the blocks run out. `slo`
    works for the objectives of the setting `slo`: the one with the least time to spare comes next, and what cannot make
    its time to first token is rejected at once, or runs when there is room, as its class says."""
    max_queued_requests: Annotated[int, between(0)] | None = None
    """Requests that may wait for their first step; the others are rejected at once, after a step. Unset: no limit."""
    max_queue_delay_ms: Annotated[float, positive("a number of milliseconds above 0")] | None = None
    """How long a request may wait for its first step before it is rejected. Unset: no limit."""
    async_scheduling: bool | None = None
    """Whether a step is scheduled while the one before computes. Unset: on a GPU only, as on a CPU both take the same
    cores."""
    speculative_config: SpeculativeConfig | None = None
    """Speculative decoding: `{"method": "suffix"}` drafts tokens, and a step checks several at once. It gives the same
    tokens, sooner where the text repeats itself. Unset: each step computes one token of a request."""

    def __post_init__(self) -> None:
        if self.speculative_config is not None and not isinstance(self.speculative_config, SpeculativeConfig):
            object.__setattr__(self, "speculative_config", SpeculativeConfig.from_value(self.speculative_config))
        check_fields(self)

    @property
    def max_draft_tokens(self) -> int:
        """The most drafts of a request in a step; 0 without speculative decoding."""
        return 0 if self.speculative_config is None else self.speculative_config.max_draft_tokens

    @property
    def draft_checkpoint(self) -> tuple[str, str | None] | None:
        """`SpeculativeConfig.checkpoint`; None without speculative decoding, too."""
        return None if self.speculative_config is None else self.speculative_config.checkpoint

    @property
    def max_num_sampled_rows(self) -> int:
        """Upper bound on the positions that a step samples: for each of `max_num_seqs` requests the last one and its
        drafts'."""
        rows_each = min(MAX_DRAFTED_ROWS, self.max_num_batched_tokens) // self.max_num_seqs
        return self.max_num_seqs * max(min(1 + self.max_draft_tokens, rows_each), 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineCoreConfig:
    """The settings of an engine core and its ranks: all but the frontend's."""

    model: ModelConfig
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    parallel: ParallelConfig = field(default_factory=ParallelConfig)
    lora: LoRAConfig = field(default_factory=LoRAConfig)

    def __post_init__(self) -> None:
        if self.scheduler.async_scheduling and self.parallel.pipeline_parallel_size > 1:
            raise ValueError(
                f"async_scheduling is True with pipeline_parallel_size={self.parallel.pipeline_parallel_size}, whose "
                "stages are kept busy by several batches already; leave one of the two unset"
            )
        drafts = self.scheduler.draft_checkpoint
        if drafts is not None and drafts[0] in ONE_STAGE and self.parallel.pipeline_parallel_size > 1:
            raise ValueError(
                f"speculative_config: method is {drafts[0]!r} with pipeline_parallel_size="
                f"{self.parallel.pipeline_parallel_size}; it reads hidden states of several stages: use another "
                "method, or tensor_parallel_size"
            )
        if drafts is not None and drafts[0] == ASSISTANT and self.parallel.world_size > 1:
            raise ValueError(
                f"speculative_config: method is {drafts[0]!r} with tensor_parallel_size="
                f"{self.parallel.tensor_parallel_size} and pipeline_parallel_size="
                f"{self.parallel.pipeline_parallel_size}; it reads the model's keys and values, of which each rank has "
                "other heads or layers: use another method, or one rank"
            )
        if self.parallel.is_lockstep:
            self._check_lockstep()
        backend = self.parallel.executor_backend
        check(not self.lora.enable_lora or backend != "ray", "distributed_executor_backend", backend,
              "'uni' or 'mp' with enable_lora: ranks of Ray do not report what they have loaded")  # fmt: skip
        is_apart = self.parallel.disaggregation is not None and not self.parallel.has_remote_replicas
        if is_apart and self.cache.kv_transfer_config is None:
            memory = KVTransferConfig.from_value({"kv_connector": "SharedMemoryConnector"})
            object.__setattr__(self, "cache", replace(self.cache, kv_transfer_config=memory))
        if self.cache.kv_transfer_config is not None:
            self._check_kv_transfer()
        if self.parallel.disaggregation is not None:
            transfer = self.cache.kv_transfer_config
            check(transfer is not None and transfer.saves and transfer.loads, "kv_transfer_config",
                  None if transfer is None else transfer.kv_role, "with kv_role 'kv_both', or unset where all replicas "
                  "are on one host: with disaggregation blocks go from prefill to decode replicas by it")  # fmt: skip
            if transfer is not None and self.parallel.has_remote_replicas:
                _check_reach(transfer, self.parallel.data_parallel_address or "")

    def _check_lockstep(self) -> None:
        several = f"with enable_expert_parallel and data_parallel_size={self.parallel.data_parallel_size}"
        check(not self.scheduler.async_scheduling, "async_scheduling", self.scheduler.async_scheduling,
              f"unset {several}: replicas agree on each step before it begins")  # fmt: skip
        check(self.cache.kv_transfer_config is None, "kv_transfer_config", self.cache.kv_transfer_config,
              f"unset {several}: what replicas that share experts have computed is not kept elsewhere")  # fmt: skip
        check(not self.lora.enable_lora, "enable_lora", self.lora.enable_lora, f"false {several}")

    def _check_kv_transfer(self) -> None:
        backend, drafts = self.parallel.executor_backend, self.scheduler.draft_checkpoint
        check(backend != "ray", "distributed_executor_backend", backend, "'uni' or 'mp' with kv_transfer_config: ranks "
              "of Ray do not tell what they have loaded")  # fmt: skip
        check(drafts is None or drafts[0] in WITHOUT_CACHE, "speculative_config: method", drafts and drafts[0],
              "'ngram', 'suffix', 'medusa' or 'gemma4_assistant' with kv_transfer_config: others have keys and values "
              "of their own, which are not kept with the model's")  # fmt: skip

    def async_scheduling(self, uses_gpu: bool) -> bool:
        """Whether steps are scheduled ahead, by workers that compute on a GPU or on the CPU.

        Args:
            uses_gpu: what decides where `scheduler.async_scheduling` is unset and the model is one stage.
        """
        if self.parallel.pipeline_parallel_size > 1:
            return False
        wanted = self.scheduler.async_scheduling
        return uses_gpu if wanted is None else wanted


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineConfig(EngineCoreConfig):
    """All settings of one engine."""

    frontend: FrontendConfig = field(default_factory=FrontendConfig)

    @property
    def core(self) -> EngineCoreConfig:
        """The settings of the engine core and its ranks. The frontend's secrets stay in its process."""
        return EngineCoreConfig(
            model=self.model, cache=self.cache, scheduler=self.scheduler, parallel=self.parallel, lora=self.lora
        )

    def for_replica(self, rank: int, num_local: int | None = None) -> "EngineConfig":
        """The settings of one replica, with its rank.

        Args:
            rank: which.
            num_local: how many replicas share the front's host, this one included, if that changes.

        Raises:
            ValueError: the other settings do not allow so many.
        """
        parallel = self.parallel
        if num_local is None:
            return replace(self, parallel=replace(parallel, data_parallel_rank=rank))
        if parallel.enable_expert_parallel and num_local != parallel.num_local_replicas:
            raise ValueError(
                f"enable_expert_parallel is True with data_parallel_size={parallel.data_parallel_size}, and the "
                "experts are divided among the ranks that there are at the start; change data_parallel_size in "
                "model.json, and load the model again"
            )
        # Its GPUs follow from its number on this host.
        first = len(parallel.remote_ranks) if rank >= parallel.num_ranks else 0
        parallel = parallel.with_local_replicas(num_local)
        return replace(self, parallel=replace(parallel, data_parallel_rank=rank, data_parallel_start_rank=first))

    def for_headless(self, start_rank: int, data_parallel_size_local: int = 1, **settings: Any) -> "EngineConfig":
        """The settings of a host whose engines join a front on another one.

        Args:
            start_rank: of the first of them.
            data_parallel_size_local: how many there are.
            settings: what else differs from the front's: `data_parallel_address`, `data_parallel_rpc_port` and
                `data_parallel_key_file`.

        Raises:
            ValueError: the front has no such replicas, or a setting has a bad value.
        """
        most, num_local = self.parallel.num_ranks, data_parallel_size_local
        name = "data_parallel_size" if self.parallel.data_parallel_max_size is None else "data_parallel_max_size"
        check(num_local < most, "data_parallel_size_local", num_local,
              f"less than {name}={most}: the first replicas are the front's own")  # fmt: skip
        check(1 <= start_rank <= most - num_local, "data_parallel_start_rank", start_rank, f"from 1 to "
              f"{most - num_local} for {num_local} of {name}={most} replicas")  # fmt: skip
        parallel = replace(
            self.parallel,
            data_parallel_start_rank=start_rank,
            data_parallel_size_local=num_local,
            **settings,
        )
        return replace(self, parallel=parallel)

    def settings(self) -> dict[str, Any]:
        """All settings but secrets, flat as in `model.json`."""
        groups = [getattr(self, name) for name in _GROUPS]
        values = {item.name: getattr(group, item.name) for group in groups for item in fields(group)}
        return {name: value for name, value in values.items() if name not in (*SECRETS, *NO_SETTINGS)}

    @classmethod
    def from_settings(cls, settings: Mapping[str, Any], base_dir: Path | None = None) -> "EngineConfig":
        """Sort flat settings, named as in `model.json`, into their groups.

        Args:
            settings: name → value. A `model` named as on the Hugging Face Hub becomes its folder in the Hub's cache, of
                the `revision` that is set with it.
            base_dir: what relative paths of `model`, `tokenizer` and a model that drafts start from; unset: the working
                directory.

        Raises:
            ValueError: an unknown name (the nearest known one is named), a missing `model`, a bad value, or one of
                vLLM's that needs a missing feature; or a checkpoint of the Hub cannot be fetched.
        """
        settings = without_vllm_names(settings)
        revision = settings.pop("revision", None) or None
        groups: dict[str, dict[str, Any]] = {name: {} for name in _GROUPS}
        for name, value in settings.items():
            groups[_group_of(name)][name] = value
        if "model" not in settings:
            raise ValueError("model is missing; it must be the path of a checkpoint folder")
        model = settings["model"]
        if isinstance(model, str) and is_hub_name(model, base_dir):
            check(revision is None or isinstance(revision, str), "revision", revision, "a branch, tag or commit")
            groups["model"]["model"] = fetch_checkpoint(model, revision)
        else:
            check(revision is None, "revision", revision, "unset: model is a folder, which is there in one version")
        if base_dir is not None:
            _make_absolute(groups, base_dir)
        return cls(**{name: _GROUPS[name](**values) for name, values in groups.items()})


_GROUPS: dict[str, type[Any]] = {
    "model": ModelConfig,
    "cache": CacheConfig,
    "scheduler": SchedulerConfig,
    "parallel": ParallelConfig,
    "lora": LoRAConfig,
    "frontend": FrontendConfig,
}


def setting_names() -> list[str]:
    """Every name that `model.json` may hold."""
    return [item.name for group in _GROUPS.values() for item in fields(group) if item.name not in NO_SETTINGS]


def _group_of(name: str) -> str:
    for group, kind in _GROUPS.items():
        if name != "kv_memory" and any(item.name == name for item in fields(kind)):
            return group
    if name in REMOVED:
        raise ValueError(f"the setting {name!r} was removed: {REMOVED[name]}; take it out")
    raise ValueError(f"unknown setting {name!r}{did_you_mean(name, setting_names(), else_all=True)}")


def _make_absolute(groups: Mapping[str, dict[str, Any]], base_dir: Path) -> None:
    """Take relative paths among the settings from `base_dir`."""

    def absolute(values: dict[str, Any], *names: str) -> None:
        for name in names:
            path = values.get(name)
            if isinstance(path, str) and path:
                try:
                    values[name] = str((base_dir / path).resolve())
                except ValueError as error:  # NUL, or half of a surrogate pair
                    raise ValueError(f"{name} is {path!r}; it must be a path: {error}") from None

    absolute(groups["model"], "model", "tokenizer")
    absolute(groups["parallel"], "data_parallel_key_file")
    if isinstance(adapters := groups["lora"].get("lora_modules"), Mapping):
        groups["lora"]["lora_modules"] = own = dict(adapters)
        absolute(own, *own)
    if groups["frontend"].get("generation_config") not in ("auto", "vllm"):
        absolute(groups["frontend"], "generation_config")
    drafts, transfer = groups["scheduler"].get("speculative_config"), groups["cache"].get("kv_transfer_config")
    if isinstance(drafts, Mapping):
        groups["scheduler"]["speculative_config"] = draft_model = dict(drafts)
        absolute(draft_model, "model")
    if isinstance(transfer, Mapping):
        groups["cache"]["kv_transfer_config"] = KVTransferConfig.with_absolute_path(transfer, base_dir)


def _check_reach(transfer: KVTransferConfig, front: str) -> None:
    """Check that prefill and decode replicas of several hosts reach the same blocks."""
    hosts = "with disaggregation over several hosts"
    tiers = [tier for tier in transfer.tiers if tier.kv_connector in CONNECTORS_OF_HOSTS]
    check(bool(tiers), "kv_transfer_config: kv_connector", transfer.kv_connector,
          f"one of {', '.join(CONNECTORS_OF_HOSTS)} {hosts}, or one among several: others keep blocks on one host "
          "alone")  # fmt: skip
    for tier in tiers:
        storage = tier.kv_connector_extra_config
        check(not storage.shared_storage_path.startswith("/dev/shm"), "kv_transfer_config: shared_storage_path",
              storage.shared_storage_path, f"a folder that all hosts have mounted {hosts}, and not memory of this one; "
              "or take a RemoteStorageConnector and quire kv-store")  # fmt: skip
        is_reached = tier.tier != "remote" or not _is_loopback(storage.host) or _is_loopback(front)
        check(is_reached, "kv_transfer_config: address", storage.address,
              f"an address that all of them reach {hosts}: that of quire kv-store --listen")  # fmt: skip


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"
