"""What stored KV blocks depend on besides their tokens. Engines that differ in any of it share no blocks.

A stored block has the numbers that this engine would compute, bit for bit; otherwise a request could have another
output with a loaded block than without it. So a namespace is narrow: the same checkpoint, computed with the same
settings by the same kernels.
"""

import hashlib
import json
import os
import platform
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from quire_engine.config import EngineCoreConfig
from quire_engine.errors import CheckpointError
from quire_engine.models.checkpoints import open_checkpoint

LAYOUT = 3
"""Version of block files and hashes."""
SAMPLES = 64
"""Places at which a file of weights is read, besides its header."""
SAMPLE_BYTES = 4096


def describe_namespace(config: EngineCoreConfig, max_model_len: int, devices: Sequence[int]) -> dict[str, Any]:
    """All that keys and values depend on.

    Args:
        config: the engine core's.
        max_model_len: of the model; some kinds of positions depend on it.
        devices: what `DescribeKV` returns, by rank.

    Raises:
        OSError: the checkpoint cannot be read.
    """
    model, parallel = config.model, config.parallel
    return {
        "layout": LAYOUT,
        "checkpoint": checkpoint_digest(Path(model.model), model.load_format, model.seed),
        "dtype": model.dtype,
        "kv_cache_dtype": config.cache.kv_cache_dtype,
        "quantization": model.quantization,
        "model_impl": model.model_impl,
        "block_size": config.cache.block_size,
        "max_model_len": max_model_len,
        "tensor_parallel_size": parallel.tensor_parallel_size,
        "pipeline_parallel_size": parallel.pipeline_parallel_size,
        "enable_expert_parallel": parallel.enable_expert_parallel,
        "computed_with": [f"{device:016x}" for device in devices],
    }


def namespace_of(description: dict[str, Any]) -> bytes:
    """The digest of a description: 32 bytes."""
    return hashlib.sha256(json.dumps(description, sort_keys=True).encode()).digest()


def number_of(parts: Sequence[object]) -> int:
    """A digest of 62 bits of these parts, and of the versions of the packages that compute."""
    packages = [_version(name) for name in ("torch", "triton", "quire", "transformers")]
    words = json.dumps([*map(str, parts), platform.machine(), *packages])
    return int.from_bytes(hashlib.sha256(words.encode()).digest()[:8], "little") >> 2


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def checkpoint_digest(folder: Path, load_format: str, seed: int, *, with_times: bool = True) -> str:
    """A digest of a checkpoint without reading all of it: its configuration, and each weight file's size, time of its
    last change, header and samples.

    Args:
        folder: the checkpoint, or its GGUF file.
        load_format: as in the settings; `dummy` weights are their seed's.
        seed: that seed.
        with_times: False: a copy on another machine has the same digest.

    Raises:
        OSError: it cannot be read.
    """
    digest = hashlib.sha256()
    for name in ("config.json", "generation_config.json"):
        path = folder / name
        digest.update(path.read_bytes() if path.exists() else b"-")
        digest.update(b"\0")
    if load_format == "dummy":
        digest.update(f"dummy {seed}".encode())
        if (folder / "config.json").exists():  # else it is in the file of the weights
            return digest.hexdigest()
    try:
        files = open_checkpoint(folder).weight_files()
    except CheckpointError as error:
        raise OSError(str(error)) from None
    for path, header_bytes in files.items():
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            changed_at = status.st_mtime_ns if with_times else 0
            digest.update(f"{path.name} {status.st_size} {changed_at}\0".encode())
            file.seek(8)
            digest.update(file.read(min(header_bytes, status.st_size) - 8))
            for i in range(SAMPLES):
                file.seek(header_bytes + i * max(status.st_size - header_bytes, 0) // SAMPLES)
                digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()
