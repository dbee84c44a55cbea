"""KVTransferConfig: where KV blocks are kept beside the KV cache, under the keys of vLLM's `kv_transfer_config`."""

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from quire_engine.config.checks import check, check_int, is_number

__all__ = ["KVTransferConfig", "StorageConfig"]

ROLES = ("kv_both", "kv_producer", "kv_consumer")
_NEUTRAL = (
    "engine_id", "kv_buffer_device", "kv_buffer_size", "kv_rank", "kv_parallel_size", "kv_ip", "kv_port",
    "enable_permute_local_kv",
)  # fmt: skip
"""vLLM's keys that ask for nothing here: they are about connections between engines."""
_EXTRA = "kv_transfer_config: kv_connector_extra_config"
_HOST = re.compile(r"\[[^/\s]+\]|[^/:\s]+")
_PATHS = ("shared_storage_path", "key_file")
"""Settings that may be relative paths."""
_OWN = {
    "SharedStorageConnector": ("shared_storage_path", "max_bytes"),
    "RemoteStorageConnector": ("address", "key_file"),
}
"""What each connector has of its own."""
_NEEDED = {
    "shared_storage_path": "the path of a folder",
    "address": "'host:port' of a store (quire kv-store)",
    "key_file": "the path of this host's file of keys (quire key)",
}
"""What there is no default for."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StorageConfig:
    """Where blocks are kept, by one connector or the other, and what may be on its way."""

    shared_storage_path: str = ""
    """`SharedStorageConnector`: the folder; it is made if it is not there. Several engines may have the same one."""
    max_bytes: int = 16 << 30
    """Of all that is kept in the folder, whichever engines keep it. The files that were not used for longest make
    room."""
    address: str = ""
    """`RemoteStorageConnector`: where `quire kv-store` listens, on this host or another one: `host:port`."""
    key_file: str = ""
    """This host's keys, which trust the store's alone (`quire key`)."""
    staging_bytes: int = 128 << 20
    """Host memory of a rank for blocks on their way from the store, and as much again for those on their way to it.
    What is to be kept beyond it, because the store is slower than the model, is not."""
    load_timeout_s: float = 10.0
    """How long a request waits for its blocks before it is computed without them."""

    def __post_init__(self) -> None:
        for name in _PATHS:
            check(isinstance(getattr(self, name), str), f"{_EXTRA}: {name}", getattr(self, name), _NEEDED[name])
        host, _, port = self.address.rpartition(":") if isinstance(self.address, str) else ("", "", "")
        is_address = _HOST.fullmatch(host) is not None and port.isdecimal() and 0 < int(port) < 1 << 16
        check(self.address == "" or is_address,
              f"{_EXTRA}: address", self.address, _NEEDED["address"])  # fmt: skip
        check_int(f"{_EXTRA}: max_bytes", self.max_bytes, 1)
        check_int(f"{_EXTRA}: staging_bytes", self.staging_bytes, 1)
        check(is_number(self.load_timeout_s) and 0 < self.load_timeout_s < float("inf"),
              f"{_EXTRA}: load_timeout_s", self.load_timeout_s, "a number of seconds above 0")  # fmt: skip

    @property
    def host(self) -> str:
        """Of the address; that of IPv6 without its brackets."""
        return self.address.rpartition(":")[0].strip("[]")

    @property
    def port(self) -> int:
        """Of the address."""
        return int(self.address.rpartition(":")[2])


@dataclass(frozen=True, kw_only=True, slots=True)
class KVTransferConfig:
    """A connector and what it does."""

    kv_connector: str
    """`SharedStorageConnector`: files in a folder; `RemoteStorageConnector`: a store that is asked over TCP."""
    kv_role: str = "kv_both"
    """`kv_producer` only saves blocks, `kv_consumer` only loads them, `kv_both` does both."""
    kv_connector_extra_config: StorageConfig
    """What the connector needs to know."""

    def __post_init__(self) -> None:
        check(self.kv_role in ROLES, "kv_transfer_config: kv_role", self.kv_role, f"one of {', '.join(ROLES)}")

    @property
    def is_remote(self) -> bool:
        """Whether the store is another process, which may come and go."""
        return self.kv_connector == "RemoteStorageConnector"

    @property
    def place_setting(self) -> str:
        """Where blocks are kept, as a message says it."""
        name = _OWN[self.kv_connector][0]
        return f"{_EXTRA}: {name} is {getattr(self.kv_connector_extra_config, name)!r}"

    @property
    def saves(self) -> bool:
        """Whether blocks are kept."""
        return self.kv_role != "kv_consumer"

    @property
    def loads(self) -> bool:
        """Whether blocks that are kept are used."""
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
        extra = own.get("kv_connector_extra_config", {})
        check(isinstance(extra, Mapping), _EXTRA, extra, "an object")
        connector = own["kv_connector"]
        check(
            isinstance(connector, str) and connector in _OWN,
            "kv_transfer_config: kv_connector",
            connector,
            f"one of {', '.join(_OWN)}",
        )
        known = [*_OWN[connector], "staging_bytes", "load_timeout_s"]
        check(extra.keys() <= set(known), _EXTRA, dict(extra), f"of {', '.join(known)}")
        for name in _OWN[connector]:
            check(name not in _NEEDED or extra.get(name, "") != "", f"{_EXTRA}: {name}", extra.get(name),
                  _NEEDED.get(name, ""))  # fmt: skip
        return cls(**{**own, "kv_connector_extra_config": StorageConfig(**extra)})

    @staticmethod
    def with_absolute_path(value: Mapping[str, Any], base_dir: Path) -> dict[str, Any]:
        """The setting as it stands in `model.json`, with a relative path taken from `base_dir`."""
        extra = value.get("kv_connector_extra_config")
        extra = dict(extra) if isinstance(extra, Mapping) else {}
        found = {name: extra[name] for name in _PATHS if isinstance(extra.get(name), str) and extra[name]}
        if not found:
            return dict(value)
        absolute = {name: str((base_dir / path).resolve()) for name, path in found.items()}
        return {**value, "kv_connector_extra_config": {**extra, **absolute}}
