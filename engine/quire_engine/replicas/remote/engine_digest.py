"""Digests that tell whether engines on two hosts compute the same tokens, and keep their KV blocks in one place.

A path does not identify a folder: folders of the same name may be different ones, and one may be mounted under two
names. So the first engine that uses a folder writes a file with a random number to it. A store that is served over TCP
proves that it has its secret key, so its public key identifies it.
"""

import contextlib
import hashlib
import json
import os
import secrets
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import msgspec

from quire_engine.config import EngineCoreConfig, KVTransferConfig, TierConfig
from quire_engine.ipc.keys import read_keys
from quire_engine.kv_connector.namespace import checkpoint_digest
from quire_engine.models.checkpoints.files import TOKENIZER_FILES
from quire_engine.replicas.remote.wire import dialect

STORE = "KV store"
"""Name of the store's description."""
NUMBER = "number"
"""The file in the folder."""

_OWN = {
    "model", "tokenizer", "weight_cache_dir", "device", "gpu_device_ids", "gpu_memory_utilization",
    "kv_cache_memory_bytes", "kv_memory", "enforce_eager", "kv_transfer_config",
    "distributed_executor_backend", "data_parallel_size_local", "data_parallel_address", "data_parallel_rpc_port",
    "data_parallel_key_file", "data_parallel_rank", "data_parallel_start_rank",
    "lora_modules", "max_loras", "max_cpu_loras",
}  # fmt: skip
"""Settings that may differ between hosts: paths, and settings that do not change the result."""


def describe_engine(config: EngineCoreConfig) -> dict[str, str]:
    """The settings, and digests of the files, that have to be equal on all hosts, by name.

    Raises:
        OSError: a file cannot be read.
        ValueError: the place where KV blocks are handed over cannot be used.
    """
    model = config.model
    described = {
        "quire": dialect(),
        "checkpoint": checkpoint_digest(Path(model.model), model.load_format, model.seed, with_times=False),
        "tokenizer": _files_digest(Path(model.tokenizer_path)),
    }
    drafts = config.scheduler.draft_checkpoint
    if drafts is not None and drafts[1] is not None:
        described["drafting checkpoint"] = checkpoint_digest(Path(drafts[1]), "auto", 0, with_times=False)
    for group in (model, config.cache, config.scheduler, config.parallel, config.lora):
        for item in fields(group):
            if item.name not in _OWN:
                value = msgspec.to_builtins(getattr(group, item.name))
                if item.name == "speculative_config" and drafts is not None:
                    value = {key: one for key, one in value.items() if key != "model"}
                described[item.name] = json.dumps(value, sort_keys=True)
    if config.parallel.disaggregation is not None and config.cache.kv_transfer_config is not None:
        described |= describe_store(config.cache.kv_transfer_config)
    return described


def describe_store(transfer: KVTransferConfig) -> dict[str, str]:
    """What has to be equal on all hosts whose engines load KV blocks of others.

    Raises:
        ValueError: the folder cannot be read or written, or the keys of this host are not valid.
    """
    return {STORE: ", ".join(_description_of(tier) for tier in transfer.tiers if tier.tier != "memory")}


def _description_of(tier: TierConfig) -> str:
    storage = tier.kv_connector_extra_config
    if tier.tier == "remote":
        keys = read_keys(Path(storage.key_file), "kv_transfer_config: key_file")
        return f"key {keys.peers[0].hex()}" if keys.peers else "none"
    try:
        return f"folder {_number_of(Path(storage.shared_storage_path))}"
    except OSError as error:
        raise ValueError(f"{tier.place_setting}, which cannot be used: {error}") from None


def _number_of(folder: Path) -> str:
    """The number in a folder, written first if there is none. It appears whole, and concurrent writers agree on one."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    path = folder / NUMBER
    if not path.exists():
        part = folder / f".{NUMBER}.{secrets.token_hex(4)}.tmp"
        part.write_text(secrets.token_hex(16))
        try:
            with contextlib.suppress(FileExistsError):
                os.link(part, path)
        finally:
            part.unlink()
    return path.read_text()


def difference_of_blocks(own: str, others: str, host: str) -> str | None:
    """Why an engine's KV blocks are of no use to those of the front; None if they are.

    Args:
        own: `EngineCoreReady.kv_namespace` of the front's.
        others: of the engine.
        host: the engine's.
    """
    here, there = json.loads(own or "{}"), json.loads(others or "{}")
    names = [name for name in (*here, *there) if here.get(name) != there.get(name)]
    if not names:
        return None
    mends = {
        "checkpoint": "copy the folder with the times of its files (rsync -t, cp -p)",
        "computed_with": "give both the same processors, versions of PyTorch, Triton and transformers, and number of "
                         "threads (OMP_NUM_THREADS)",
    }  # fmt: skip
    return (
        f"with disaggregation the KV blocks of one are the other's, and {names[0]} differs at the front and on {host}; "
        + mends.get(names[0], "give both the same model.json")
    )


def difference(own: Mapping[str, str], others: Mapping[str, str], host: str) -> str | None:
    """The difference of an engine of another host, and what to do about it; None if there is none.

    Args:
        own: `describe_engine` of the front.
        others: of the engine.
        host: the engine's.
    """
    names = [name for name in (*own, *others) if own.get(name) != others.get(name)]
    if not names:
        return None
    name = names[0]
    here, there = own.get(name, "not there"), others.get(name, "not there")
    if name == STORE:
        return (
            f"KV blocks are kept in another place on {host} ({there[:40]}) than at the front ({here[:40]}), and with "
            "disaggregation one loads what the other keeps; mount one folder on both, or let both ask one store"
        )
    if name == "quire":
        return f"Quire is {here} at the front and {there} on {host}; install the same version on both"
    if own.keys() >= {name} and (name == "tokenizer" or name.endswith("checkpoint")):
        return (
            f"the {name} on {host} is not the front's (digest {there[:12]}, and {here[:12]} at the front); copy the "
            "same folder to both"
        )
    return f"{name} is {here} at the front and {there} on {host}; give both the same model.json"


def _files_digest(folder: Path) -> str:
    if folder.is_file():
        return checkpoint_digest(folder, "auto", 0, with_times=False)
    digest: Any = hashlib.sha256()
    for name in TOKENIZER_FILES:
        path = folder / name
        digest.update(path.read_bytes() if path.is_file() else b"-")
        digest.update(b"\0")
    return str(digest.hexdigest())
