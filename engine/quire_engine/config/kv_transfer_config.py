"""KVTransferConfig: where KV blocks are kept beside the KV cache, under the keys of vLLM's `kv_transfer_config`."""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from quire_engine.config.checks import check, check_int, is_number

__all__ = ["KVTransferConfig", "SharedStorageConfig"]

CONNECTORS = ("SharedStorageConnector",)
ROLES = ("kv_both", "kv_producer", "kv_consumer")
_NEUTRAL = (
    "engine_id", "kv_buffer_device", "kv_buffer_size", "kv_rank", "kv_parallel_size", "kv_ip", "kv_port",
    "enable_permute_local_kv",
)  # fmt: skip
"""vLLM's keys that ask for nothing here: they are about connections between engines."""
_EXTRA = "kv_transfer_config: kv_connector_extra_config"


@dataclass(frozen=True, kw_only=True, slots=True)
class SharedStorageConfig:
    """Blocks in files of a folder."""

    shared_storage_path: str
    """The folder; it is made if it is not there. Several engines may have the same one."""
    max_bytes: int = 16 << 30
    """Of all that is kept in the folder, whichever engines keep it. The files that were not used for longest make
    room."""
    staging_bytes: int = 128 << 20
    """Host memory of a rank for blocks on their way from files, and as much again for those on their way to them. What
    is to be kept beyond it, because the disk is slower than the model, is not."""
    load_timeout_s: float = 10.0
    """How long a request waits for its blocks before it is computed without them."""

    def __post_init__(self) -> None:
        path = self.shared_storage_path
        check(isinstance(path, str) and path != "", f"{_EXTRA}: shared_storage_path", path, "the path of a folder")
        check_int(f"{_EXTRA}: max_bytes", self.max_bytes, 1)
        check_int(f"{_EXTRA}: staging_bytes", self.staging_bytes, 1)
        check(is_number(self.load_timeout_s) and 0 < self.load_timeout_s < float("inf"),
              f"{_EXTRA}: load_timeout_s", self.load_timeout_s, "a number of seconds above 0")  # fmt: skip


@dataclass(frozen=True, kw_only=True, slots=True)
class KVTransferConfig:
    """A connector and what it does."""

    kv_connector: str
    """`SharedStorageConnector`: files in a folder."""
    kv_role: str = "kv_both"
    """`kv_producer` only saves blocks, `kv_consumer` only loads them, `kv_both` does both."""
    kv_connector_extra_config: SharedStorageConfig = field(
        default_factory=lambda: SharedStorageConfig(shared_storage_path="")
    )
    """What the connector needs to know."""

    def __post_init__(self) -> None:
        check(self.kv_connector in CONNECTORS, "kv_transfer_config: kv_connector", self.kv_connector,
              f"one of {', '.join(CONNECTORS)}")  # fmt: skip
        check(self.kv_role in ROLES, "kv_transfer_config: kv_role", self.kv_role, f"one of {', '.join(ROLES)}")

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
        check("kv_connector" in own, "kv_transfer_config: kv_connector", None, f"one of {', '.join(CONNECTORS)}")
        extra = own.get("kv_connector_extra_config", {})
        check(isinstance(extra, Mapping), _EXTRA, extra, "an object")
        known = [item.name for item in fields(SharedStorageConfig)]
        check(extra.keys() <= set(known), _EXTRA, dict(extra), f"of {', '.join(known)}")
        check("shared_storage_path" in extra, f"{_EXTRA}: shared_storage_path", None, "the path of a folder")
        return cls(**{**own, "kv_connector_extra_config": SharedStorageConfig(**extra)})

    @staticmethod
    def with_absolute_path(value: Mapping[str, Any], base_dir: Path) -> dict[str, Any]:
        """The setting as it stands in `model.json`, with a relative path taken from `base_dir`."""
        extra = value.get("kv_connector_extra_config")
        path = extra.get("shared_storage_path") if isinstance(extra, Mapping) else None
        if not isinstance(extra, Mapping) or not isinstance(path, str) or not path:
            return dict(value)
        return {
            **value,
            "kv_connector_extra_config": {**extra, "shared_storage_path": str((base_dir / path).resolve())},
        }
