"""KVTransferConfig: where KV blocks are kept beside the KV cache, under the keys of vLLM's `kv_transfer_config`."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any

from quire_engine.config.checks import POSITIVE_SECONDS, between, check, check_fields, one_of

_NEUTRAL = (
    "engine_id", "kv_buffer_device", "kv_buffer_size", "kv_rank", "kv_parallel_size", "kv_ip", "kv_port",
    "enable_permute_local_kv",
)  # fmt: skip
"""vLLM's keys that change nothing here: they are about connections between engines."""
_EXTRA = "kv_transfer_config: kv_connector_extra_config"
_HOST = re.compile(r"\[[^/\s]+\]|[^/:\s]+")
_PATHS = ("shared_storage_path", "key_file")
"""Settings that may be relative paths."""
_OWN = {
    "SharedStorageConnector": ("shared_storage_path", "max_bytes"),
    "RemoteStorageConnector": ("address", "key_file"),
    "SharedMemoryConnector": ("max_bytes",),
    "MultiConnector": ("connectors",),
}
"""The settings of each connector alone."""
_NEEDED = {
    "shared_storage_path": "the path of a folder",
    "address": "'host:port' of a store (quire kv-store)",
    "key_file": "the path of this host's file of keys (quire keys host)",
    "connectors": "a list of at least two objects with kv_connector and kv_connector_extra_config",
}
"""Settings without a default, and what each must be."""
TIERS = {"SharedMemoryConnector": "memory", "SharedStorageConnector": "files", "RemoteStorageConnector": "remote"}
"""Connector → its name in metrics."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StorageConfig:
    """Where a connector keeps blocks, and what it may transfer at a time."""

    shared_storage_path: str = ""
    """`SharedStorageConnector`: the folder, which is made if it is missing. Several engines may share one."""
    max_bytes: Annotated[int, between(1)] | None = None
    """Bytes of all blocks of all engines in the folder, or in memory. The least recently used ones are evicted. Unset:
    16 GiB of files; of memory a quarter of what is free at the start, and at most as much."""
    address: str = ""
    """`RemoteStorageConnector`: where `quire kv-store` listens, on this host or another one: `host:port`."""
    key_file: str = ""
    """This host's file of keys, which trusts the store's key alone (`quire keys host`)."""
    staging_bytes: Annotated[int, between(1)] = 128 << 20
    """Host memory of a rank for blocks that are loaded, and as much again for those that are saved. Blocks beyond it,
    because the store is slower than the model, are not saved."""
    load_timeout_s: Annotated[float, POSITIVE_SECONDS] = 10.0
    """The timeout of a request's load; then its blocks are computed."""
    connectors: tuple["TierConfig", ...] = ()
    """`MultiConnector`: blocks are looked up in these, in this order, and saved in all of them."""

    def __post_init__(self) -> None:
        for name in _PATHS:
            check(isinstance(getattr(self, name), str), f"{_EXTRA}: {name}", getattr(self, name), _NEEDED[name])
        host, _, port = self.address.rpartition(":") if isinstance(self.address, str) else ("", "", "")
        is_address = _HOST.fullmatch(host) is not None and port.isdecimal() and 0 < int(port) < 1 << 16
        check(self.address == "" or is_address,
              f"{_EXTRA}: address", self.address, _NEEDED["address"])  # fmt: skip
        check_fields(self, f"{_EXTRA}: ")

    @property
    def host(self) -> str:
        """The address's host, without the brackets of IPv6."""
        return self.address.rpartition(":")[0].strip("[]")

    @property
    def port(self) -> int:
        """The address's port."""
        return int(self.address.rpartition(":")[2])


@dataclass(frozen=True, kw_only=True, slots=True)
class TierConfig:
    """One of the connectors of a `MultiConnector`."""

    kv_connector: str
    """As in `KVTransferConfig`."""
    kv_connector_extra_config: StorageConfig
    """This connector's own settings; shared ones stand beside `connectors`."""

    @property
    def tier(self) -> str:
        """Its name in metrics."""
        return TIERS[self.kv_connector]

    @property
    def place_setting(self) -> str:
        """Where it keeps blocks, for messages."""
        name = _OWN[self.kv_connector][0]
        value = getattr(self.kv_connector_extra_config, name)
        if value is None:
            return f"kv_transfer_config: kv_connector is {self.kv_connector!r}"
        return f"{_EXTRA}: {name} is {value!r}"


@dataclass(frozen=True, kw_only=True, slots=True)
class KVTransferConfig:
    """A connector and what it does."""

    kv_connector: str
    """`SharedMemoryConnector`: memory that all engines of the model on this host share; `SharedStorageConnector`: files
    in a folder; `RemoteStorageConnector`: a store over TCP; `MultiConnector`: several of these."""
    kv_role: Annotated[str, one_of("kv_both", "kv_producer", "kv_consumer")] = "kv_both"
    """`kv_producer` only saves blocks, `kv_consumer` only loads them, `kv_both` does both."""
    kv_connector_extra_config: StorageConfig
    """Settings of the connector."""

    def __post_init__(self) -> None:
        check_fields(self, "kv_transfer_config: ")

    @property
    def tiers(self) -> tuple[TierConfig, ...]:
        """This connector, or those of a `MultiConnector` in their order."""
        own = TierConfig(
            kv_connector=self.kv_connector, kv_connector_extra_config=self.kv_connector_extra_config
        )  # fmt: skip
        return self.kv_connector_extra_config.connectors or (own,)

    @property
    def memory(self) -> StorageConfig | None:
        """The settings of the `SharedMemoryConnector`, if there is one."""
        found = [one for one in self.tiers if one.kv_connector == "SharedMemoryConnector"]
        return found[0].kv_connector_extra_config if found else None

    @property
    def saves(self) -> bool:
        """Whether blocks are saved."""
        return self.kv_role != "kv_consumer"

    @property
    def loads(self) -> bool:
        """Whether saved blocks are loaded."""
        return self.kv_role != "kv_producer"

    @classmethod
    def from_value(cls, value: Any) -> "KVTransferConfig":
        """The setting as it stands in `model.json`.

        Raises:
            ValueError: it is no object, or a key or value is wrong.
        """
        check(isinstance(value, Mapping), "kv_transfer_config", value, "an object")
        own = {name: item for name, item in value.items() if name not in _NEUTRAL}
        policy = own.pop("kv_load_failure_policy", "recompute")
        check(policy == "recompute", "kv_transfer_config: kv_load_failure_policy", policy,
              "'recompute': blocks that cannot be loaded are computed")  # fmt: skip
        known = [item.name for item in fields(cls)]
        check(own.keys() <= set(known), "kv_transfer_config", value, f"of {', '.join(known)}")
        check("kv_connector" in own, "kv_transfer_config: kv_connector", None, f"one of {', '.join(_OWN)}")
        connector = own["kv_connector"]
        extra = _storage_of(connector, own.get("kv_connector_extra_config", {}), ("staging_bytes", "load_timeout_s"))
        return cls(**{**own, "kv_connector_extra_config": extra})

    @staticmethod
    def with_absolute_path(value: Mapping[str, Any], base_dir: Path) -> dict[str, Any]:
        """The setting as it stands in `model.json`, with a relative path taken from `base_dir`."""
        extra = value.get("kv_connector_extra_config")
        if not isinstance(extra, Mapping):
            return dict(value)
        found = {name: extra[name] for name in _PATHS if isinstance(extra.get(name), str) and extra[name]}
        own: dict[str, Any] = {name: str((base_dir / path).resolve()) for name, path in found.items()}
        inner = extra.get("connectors")
        if isinstance(inner, Sequence) and all(isinstance(one, Mapping) for one in inner):
            own["connectors"] = [KVTransferConfig.with_absolute_path(one, base_dir) for one in inner]
        return {**value, "kv_connector_extra_config": {**extra, **own}}


def _storage_of(connector: Any, extra: Any, shared: Sequence[str] = ()) -> StorageConfig:
    """A connector's settings, as they stand in `model.json`. All connectors have the `shared` settings; these are empty
    for one of several, where they stand outside. Raises ValueError if the connector or its `extra` settings are wrong.
    """
    names = [name for name in _OWN if shared or name != "MultiConnector"]
    is_known = isinstance(connector, str) and connector in names
    check(is_known, "kv_transfer_config: kv_connector", connector, f"one of {', '.join(names)}")
    check(isinstance(extra, Mapping), _EXTRA, extra, "an object")
    known = [*_OWN[connector], *shared]
    check(extra.keys() <= set(known), f"{_EXTRA} of {connector}", dict(extra), f"of {', '.join(known)}")
    for name in _OWN[connector]:
        check(name not in _NEEDED or extra.get(name, "") != "", f"{_EXTRA}: {name}", extra.get(name),
              _NEEDED.get(name, ""))  # fmt: skip
    if connector == "MultiConnector":
        extra = {**extra, "connectors": _tiers_of(extra["connectors"])}
    return StorageConfig(**extra)


def _tiers_of(connectors: Any) -> tuple[TierConfig, ...]:
    """Check the connectors of a `MultiConnector`."""
    name, keys = f"{_EXTRA}: connectors", ("kv_connector", "kv_connector_extra_config")
    is_list = isinstance(connectors, list | tuple) and len(connectors) >= 2
    check(is_list and all(isinstance(one, Mapping) for one in connectors), name, connectors, _NEEDED["connectors"])
    tiers: list[TierConfig] = []
    for one in connectors:
        own = {key: item for key, item in one.items() if key not in _NEUTRAL}
        check(own.keys() <= set(keys), name, dict(one), f"of {', '.join(keys)}; kv_role and all else is said once, "
              "outside")  # fmt: skip
        connector = own.get("kv_connector")
        storage = _storage_of(connector, own.get("kv_connector_extra_config", {}))
        assert isinstance(connector, str)
        check(connector not in [tier.kv_connector for tier in tiers], name, connector, "each connector once")
        tiers.append(TierConfig(kv_connector=connector, kv_connector_extra_config=storage))
    return tuple(tiers)
