"""Whether engines on two hosts give the same tokens: what that depends on, as far as settings and files say it."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import msgspec

from quire_engine.config import EngineCoreConfig
from quire_engine.core.remote.kv_store_identity import STORE, describe_store
from quire_engine.core.remote.wire import dialect
from quire_engine.kv_connector.namespace import checkpoint_digest
from quire_engine.models.files import TOKENIZER_FILES

__all__ = ["describe_engine", "difference", "difference_of_blocks"]

_OWN = {
    "model", "tokenizer", "device", "gpu_device_ids", "gpu_memory_utilization", "kv_cache_memory_bytes",
    "kv_memory", "cuda_graph_memory_bytes", "enforce_eager", "kv_transfer_config", "distributed_executor_backend",
    "data_parallel_size_local", "data_parallel_address", "data_parallel_rpc_port", "data_parallel_key_file",
    "data_parallel_rank", "data_parallel_start_rank",
}  # fmt: skip
"""Settings that each host may have its own way: where things are, and how they are computed with the same result."""


def describe_engine(config: EngineCoreConfig) -> dict[str, str]:
    """What has to be equal on all hosts, by name: settings, and digests of the files.

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
    if drafts is not None:
        described["drafting checkpoint"] = checkpoint_digest(Path(drafts[1]), "auto", 0, with_times=False)
    for group in (model, config.cache, config.scheduler, config.parallel):
        for item in fields(group):
            if item.name not in _OWN:
                value = msgspec.to_builtins(getattr(group, item.name))
                if item.name == "speculative_config" and drafts is not None:
                    value = {key: one for key, one in value.items() if key != "model"}
                described[item.name] = json.dumps(value, sort_keys=True)
    if config.parallel.disaggregation is not None and config.cache.kv_transfer_config is not None:
        described |= describe_store(config.cache.kv_transfer_config)
    return described


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
    """What an engine of another host differs in, and what to do about it; None if nothing.

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
    digest: Any = hashlib.sha256()
    for name in TOKENIZER_FILES:
        path = folder / name
        digest.update(path.read_bytes() if path.is_file() else b"-")
        digest.update(b"\0")
    return str(digest.hexdigest())
