"""ParallelConfig: how many processes share the model, and where they compute."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Annotated, Any

from quire_engine.config.checks import between, check, check_fields, is_int, one_of

MAX_REPLICAS = 64
MAX_PORT = 65535
_NEUTRAL_EPLB_KEYS = ("log_balancedness", "log_balancedness_interval", "use_async", "communicator")
"""vLLM's keys that change nothing here: balancedness is a metric, and weights move between steps, a few at a time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DisaggregationConfig:
    """How many replicas compute prompts, and how many go on from there."""

    prefill: Annotated[int, between(1)]
    """Replicas that compute prompts, and the first token of each request. They have the first ranks."""
    decode: Annotated[int, between(1)]
    """Replicas that compute all further tokens."""

    def __post_init__(self) -> None:
        check_fields(self, "disaggregation: ")

    @property
    def num_replicas(self) -> int:
        """Replicas of both roles."""
        return self.prefill + self.decode

    @classmethod
    def from_value(cls, value: Any) -> "DisaggregationConfig":
        """The setting as it stands in `model.json`.

        Raises:
            ValueError: it is no object, or a key or value is wrong.
        """
        check(isinstance(value, Mapping), "disaggregation", value, 'an object, such as {"prefill": 1, "decode": 1}')
        check(set(value) == {"prefill", "decode"}, "disaggregation", dict(value), "of prefill and decode, both of them")
        return cls(**value)


@dataclass(frozen=True, kw_only=True, slots=True)
class EPLBConfig:
    """When and how experts are spread anew over the ranks, under the keys of vLLM's `eplb_config`."""

    window_size: Annotated[int, between(1)] = 1000
    """Steps whose load decides the placement of experts."""
    step_interval: Annotated[int, between(1)] = 3000
    """Steps between two placements."""
    num_redundant_experts: Annotated[int, between(0)] = 0
    """Additional replicas of a layer's busiest experts. Added to `num_experts`, a multiple of
    `tensor_parallel_size`."""

    def __post_init__(self) -> None:
        check_fields(self, "eplb_config: ")

    @classmethod
    def from_value(cls, value: Any) -> "EPLBConfig":
        """The setting as it stands in `model.json`.

        Raises:
            ValueError: it is no object, or a key or value is wrong.
        """
        check(isinstance(value, Mapping), "eplb_config", value, "an object")
        known = [item.name for item in fields(cls)]
        for name in value:
            check(name in (*known, *_NEUTRAL_EPLB_KEYS, "policy"), "eplb_config", value, f"of {', '.join(known)}")
        check(value.get("policy", "default") == "default", "eplb_config: policy", value.get("policy"), "'default'")
        return cls(**{name: value[name] for name in known if name in value})


@dataclass(frozen=True, kw_only=True, slots=True)
class ParallelConfig:
    """How many processes share the model, and where they compute.

    ::

        replica (data_parallel_size)         0                       1
        rank (world_size, of each)           0     1     2     3     0     1     2     3
        GPU, by gpu_device_ids or as is      0     1     2     3     4     5     6     7
    """

    device: Annotated[str, one_of("auto", "cpu", "cuda")] = "auto"
    """What all ranks compute on: `cpu`, `cuda` (a GPU each), or `auto`: a GPU where torch finds one, else the CPU."""
    gpu_device_ids: list[int] | None = None
    """The GPU of each rank, replica by replica, as CUDA numbers those that it may see. Unset: 0, 1, …"""
    data_parallel_size: Annotated[int, between(1, MAX_REPLICAS)] = 1
    """Replicas of the engine, among which requests are divided: each has the whole model, its own ranks and KV cache,
    and a share of its machine. The requests of a replica that fails continue on the others."""
    data_parallel_routing: Annotated[str, one_of("prefix", "least_loaded", "round_robin")] = "prefix"
    """Which replica a request goes to: `prefix` the one that will compute its prompt first, by its cache and its load;
    `least_loaded` the one with the fewest requests, waiting ones counted four times; `round_robin` the next."""
    disaggregation: DisaggregationConfig | None = None
    """Some replicas compute prompts, and others all that follows, so that no long prompt delays the tokens of other
    requests: `{"prefill": 1, "decode": 1}`. Blocks are handed over by `kv_transfer_config`, if unset through memory.
    `data_parallel_size` is their sum. Unset: each replica does both."""
    data_parallel_size_local: int | None = None
    """How many of the replicas, those with the first ranks, are on this host; unset: all. Engines of other hosts join
    as the others, by `quire join`."""
    data_parallel_max_size: int | None = None
    """One more than the highest rank of engines of other hosts: those from `data_parallel_size` on may join and leave
    while the model is served, and their absence is no failure. Unset: there are none of these."""
    data_parallel_address: str | None = None
    """The address on which the front listens for engines of other hosts. Unset: there are none."""
    data_parallel_rpc_port: int | None = None
    """Its TCP port."""
    data_parallel_key_file: str | None = None
    """File with this host's secret key and the public keys of trusted hosts; `quire keys host FILE` makes it."""
    data_parallel_rank: Annotated[int, between(0)] = 0
    """Which replica this is. No setting: the front sets it for each engine core."""
    data_parallel_start_rank: Annotated[int, between(0)] = 0
    """The first replica of this host. No setting: an option of `quire join`."""
    tensor_parallel_size: Annotated[int, between(1)] = 1
    """Ranks that each layer is cut into."""
    pipeline_parallel_size: Annotated[int, between(1)] = 1
    """Stages that the layers are divided among."""
    enable_expert_parallel: bool = False
    """In a mixture of experts, each of the `tensor_parallel_size` ranks has whole experts, not a slice of each. With
    several replicas the experts are divided among all ranks, which then compute every step together."""
    enable_eplb: bool = False
    """Place the experts on the ranks by their load, while requests run (`expert parallelism load balancer`). Needs
    `enable_expert_parallel` with several ranks on one machine."""
    eplb_config: EPLBConfig = field(default_factory=EPLBConfig)
    """Its parameters: `{"window_size": 1000, "step_interval": 3000, "num_redundant_experts": 0}`."""
    distributed_executor_backend: Annotated[str, one_of("uni", "mp", "ray")] | None = None
    """Where the ranks run: `uni` in the engine's own process (one rank only), `mp` one process each on this machine,
    `ray` as Ray actors, also on several machines. Unset: `uni` for one rank, `mp` for several."""

    def __post_init__(self) -> None:
        if self.disaggregation is not None:
            self._take_disaggregation(self.disaggregation)
        if not isinstance(self.eplb_config, EPLBConfig):
            object.__setattr__(self, "eplb_config", EPLBConfig.from_value(self.eplb_config))
        check_fields(self)
        self._check_hosts()
        if self.enable_eplb:
            self._check_eplb()
        backend = self.distributed_executor_backend
        check(backend != "uni" or self.world_size == 1, "distributed_executor_backend", backend,
              f"'mp' or 'ray' for {self.world_size} ranks")  # fmt: skip
        if self.data_parallel_size > 1:
            several = f"with data_parallel_size={self.data_parallel_size}"
            check(backend != "ray", "distributed_executor_backend", backend,
                  f"'uni' or 'mp' {several}: the ranks of a replica are on one machine")  # fmt: skip
        if self.is_lockstep:
            self._check_lockstep()
        if self.gpu_device_ids is not None:
            self._check_gpu_device_ids(self.gpu_device_ids)

    def _take_disaggregation(self, value: Any) -> None:
        """Derive `data_parallel_size` from the roles; a value that contradicts them is rejected."""
        is_setting = not isinstance(value, DisaggregationConfig)
        roles = DisaggregationConfig.from_value(value) if is_setting else value
        size = self.data_parallel_size
        check(size == roles.num_replicas or (is_setting and size == 1), "data_parallel_size", size,
              f"unset or {roles.num_replicas} with disaggregation, whose replicas it counts")  # fmt: skip
        object.__setattr__(self, "disaggregation", roles)
        object.__setattr__(self, "data_parallel_size", roles.num_replicas)

    def _check_hosts(self) -> None:
        size, num_local = self.data_parallel_size, self.data_parallel_size_local
        most_local = self.num_ranks if self.data_parallel_start_rank else size
        for name, own, allowed in (
            ("data_parallel_max_size", self.data_parallel_max_size, between(size, MAX_REPLICAS)),
            ("data_parallel_size_local", num_local, between(1, most_local)),
        ):
            check(own is None or allowed.holds(own), name, own, allowed.text)
        kinds = {"data_parallel_address": str, "data_parallel_rpc_port": int, "data_parallel_key_file": str}
        for name, kind in kinds.items():
            value = getattr(self, name)
            if not self.has_remote_replicas:
                check(value is None, name, value, f"unset where all of data_parallel_size={size} replicas are on this "
                      "host; data_parallel_size_local says how many are, and data_parallel_max_size how many more may "
                      "come from others")  # fmt: skip
                continue
            needs = f"with {self.num_local_replicas} of {self.num_ranks} replicas on this host: engines of other hosts"
            if kind is int:
                check(is_int(value, 1) and value <= MAX_PORT, name, value, f"a port from 1 to {MAX_PORT} {needs} join "
                      "there")  # fmt: skip
            else:
                what = "an address of the front's host" if name == "data_parallel_address" else "the path of a file"
                check(isinstance(value, str) and value != "", name, value, f"{what} {needs} join by it")

    def _check_eplb(self) -> None:
        has_ranks = self.enable_expert_parallel and self.tensor_parallel_size > 1
        check(has_ranks, "enable_eplb", True, "false without enable_expert_parallel, and with one rank for each layer "
              f"(tensor_parallel_size={self.tensor_parallel_size}): there is nothing to move")  # fmt: skip
        check(self.distributed_executor_backend != "ray", "enable_eplb", True, "false with "
              "distributed_executor_backend='ray', whose ranks do not report their load")  # fmt: skip

    def _check_lockstep(self) -> None:
        """Reject what replicas that compute every step together do not support."""
        several = f"with enable_expert_parallel and data_parallel_size={self.data_parallel_size}"
        check(not self.has_remote_replicas, "data_parallel_size_local", self.data_parallel_size_local,
              f"unset {several}: replicas that share experts are on one host")  # fmt: skip
        check(self.pipeline_parallel_size == 1, "pipeline_parallel_size", self.pipeline_parallel_size,
              f"1 {several}: replicas that share experts have no stages; use tensor_parallel_size")  # fmt: skip
        check(self.disaggregation is None, "disaggregation", self.disaggregation,
              f"unset {several}: replicas that share experts have no roles")  # fmt: skip
        check(not self.enable_eplb, "enable_eplb", self.enable_eplb,
              f"false {several}: experts move among the ranks of one replica alone")  # fmt: skip
        check(self.device != "cuda", "device", self.device,
              f"'cpu' {several}: replicas share experts on the CPU alone")  # fmt: skip
        check(self.gpu_device_ids is None, "gpu_device_ids", self.gpu_device_ids,
              f"unset {several}: replicas share experts on the CPU alone")  # fmt: skip

    @property
    def is_lockstep(self) -> bool:
        """Whether the replicas share the experts, and therefore compute every step together."""
        return self.enable_expert_parallel and self.data_parallel_size > 1

    @property
    def num_redundant_experts(self) -> int | None:
        """Replicas of experts in each layer; None if every expert stays where it is."""
        return self.eplb_config.num_redundant_experts if self.enable_eplb else None

    def _check_gpu_device_ids(self, ids: list[int]) -> None:
        def check_ids(ok: bool, allowed: str) -> None:
            check(ok, "gpu_device_ids", ids, allowed)

        check_ids(isinstance(ids, list) and all(is_int(item, 0) for item in ids), "a list of integers of at least 0")
        check_ids(self.device != "cpu", "unset with device='cpu', or device 'cuda'")
        check_ids(self.distributed_executor_backend != "ray", "unset with distributed_executor_backend='ray': Ray "
                  "chooses the GPUs")  # fmt: skip
        check_ids(len(set(ids)) == len(ids), "without repetition: a rank has its GPU to itself")
        check_ids(len(ids) == self.num_all_ranks, f"of {self.num_all_ranks}, one for each rank")

    @property
    def world_size(self) -> int:
        """Ranks of one replica."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def num_local_replicas(self) -> int:
        """Replicas on this host, which divide it among them."""
        return self.data_parallel_size if self.data_parallel_size_local is None else self.data_parallel_size_local

    @property
    def num_ranks(self) -> int:
        """Upper bound on the replicas, without those that are added to this host while it serves."""
        return self.data_parallel_max_size or self.data_parallel_size

    @property
    def has_remote_replicas(self) -> bool:
        """Whether engines of other hosts join those of this one."""
        return self.num_local_replicas < self.num_ranks

    @property
    def remote_ranks(self) -> range:
        """Those that engines of other hosts may have, as the front knows them."""
        return range(self.num_local_replicas, self.num_ranks)

    def local_rank(self, number: int) -> int:
        """The rank of the front's own replica of this number. Those that are added later have ranks after other
        hosts'."""
        return number if number < self.num_local_replicas else number + len(self.remote_ranks)

    def with_local_replicas(self, num_local: int) -> "ParallelConfig":
        """The same with another number of replicas on the front's host.

        Raises:
            ValueError: the other settings do not allow so many.
        """
        ids, num_ranks, added = self.gpu_device_ids, num_local * self.world_size, num_local - self.num_local_replicas
        if ids is not None and len(ids) < num_ranks:
            raise ValueError(
                f"gpu_device_ids names {len(ids)} GPUs, and {num_local} replicas have {num_ranks} ranks; leave it "
                "unset, so that each rank takes the next GPU, or set data_parallel_size and name them all"
            )
        most = self.data_parallel_max_size
        return replace(
            self,
            data_parallel_size=self.data_parallel_size + added,
            data_parallel_size_local=num_local if self.has_remote_replicas else None,
            data_parallel_max_size=most + added if most is not None and self.has_remote_replicas else None,
            gpu_device_ids=None if ids is None else ids[:num_ranks],
        )

    @property
    def num_all_ranks(self) -> int:
        """Ranks of all replicas on this host."""
        return self.world_size * self.num_local_replicas

    @property
    def routes_by_prefix(self) -> bool:
        """Whether the router needs the contents of each replica's cache."""
        return self.num_ranks > 1 and self.data_parallel_routing == "prefix"

    @property
    def executor_backend(self) -> str:
        """`distributed_executor_backend`, or what it is when unset."""
        return self.distributed_executor_backend or ("uni" if self.world_size == 1 else "mp")
