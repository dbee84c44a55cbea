"""AdapterRegistry: the adapters that requests may name. It is part of the frontend, and calls no engine."""

import threading
from collections.abc import Iterable
from pathlib import Path
from typing import TypeGuard

import msgspec

from quire_engine.adapters.checkpoint import AdapterCheckpoint, Runner, run_here
from quire_engine.config import LoRAConfig
from quire_engine.errors import RequestError, UnknownAdapterError, did_you_mean, quote
from quire_engine.lora import AdaptableModules, Adapter, AdapterInfo, LoRARequest
from quire_engine.stats import AdapterStats

PARAMETER = "lora_name"
MAX_NAME = 256
"""Characters; names are labels of metrics."""


class AdapterRegistry:
    """Names and what is known of each. Thread-safe: a folder is read without holding anything up.

    Args:
        config: the settings; those of `lora_modules` are registered at once.
        modules: of the model; None: it cannot have adapters.

    Raises:
        CheckpointError: one of `lora_modules` cannot be served.
    """

    def __init__(self, config: LoRAConfig, modules: AdaptableModules | None) -> None:
        self._config, self._modules = config, modules
        self._infos: dict[str, AdapterInfo] = {}
        self._unpinned: list[Adapter] = []
        self._lock = threading.Lock()
        for name, folder in config.lora_modules.items():
            self.add(LoRARequest(name, lora_path=folder))

    @property
    def is_enabled(self) -> bool:
        """Whether requests may name adapters at all."""
        return self._config.enable_lora and self._modules is not None

    @property
    def names(self) -> list[str]:
        """Those that requests may use now."""
        return list(self._infos)

    def add(self, request: LoRARequest, run_large: Runner = run_here) -> AdapterInfo:
        """Read and check a folder, and register it. A name that is registered means this folder from now on; its live
        requests go on with what they began with. Blocks for as long as it takes to read the folder.

        Args:
            request: the name and the folder.
            run_large: as for `AdapterCheckpoint.read`.

        Raises:
            RequestError: the name is empty, there is no path, or the engine serves no adapters.
            CheckpointError: the folder cannot be served.
        """
        self._check_enabled()
        name, path = request.lora_name, request.lora_path
        if not isinstance(name, str) or not 0 < len(name) <= MAX_NAME or not name.isprintable():
            allowed = f"1 to {MAX_NAME} printable characters"
            raise RequestError(PARAMETER, f"lora_name is {quote(name)}; it must be {allowed}")
        if not isinstance(path, str) or not path or "\0" in path:
            raise RequestError("lora_path", f"lora_path is {quote(path)}; it must be the path of a folder")
        assert self._modules is not None
        folder = Path(path).absolute()
        read = AdapterCheckpoint.read(folder, self._modules, self._config.max_lora_rank, run_large)
        info = AdapterInfo(
            name=name, folder=str(folder), digest=read.digest, rank=read.rank, num_bytes=read.num_bytes,
            target_modules=read.target_modules,
        )  # fmt: skip
        with self._lock:
            before = self._infos.get(name)
            info.is_pinned = before is not None and before.is_pinned and before.digest == info.digest
            self._infos[name] = info
            self._note_end(before)
        return info

    def find(self, request: LoRARequest | Adapter | None) -> Adapter | None:
        """The adapter of a request: the registered one of that name, whatever its path; or one that was found before.
        None: no adapter.

        Raises:
            UnknownAdapterError: there is none of that name.
        """
        if request is None or isinstance(request, Adapter):
            return request
        self._check_enabled()
        info = self._infos.get(request.lora_name)
        if info is None:
            raise self._unknown(request.lora_name)
        return info.adapter

    def needs_reading(self, request: LoRARequest | Adapter | None) -> TypeGuard[LoRARequest]:
        """Whether it needs `add` and not `find`: it has a path, which is not the registered one of its name."""
        if not isinstance(request, LoRARequest) or not request.lora_path or self._modules is None:
            return False
        info = self._infos.get(request.lora_name)
        return info is None or info.folder != str(Path(request.lora_path).absolute())

    def remove(self, name: str) -> None:
        """Forget a name. Raises UnknownAdapterError."""
        self._check_enabled()
        with self._lock:
            info = self._infos.pop(name, None)
            if info is None:
                raise self._unknown(name)
            self._note_end(info)

    def take_unpinned(self) -> list[Adapter]:
        """The adapters that no name pins any more, since this was last called: the engines may drop them."""
        with self._lock:
            unpinned, self._unpinned = self._unpinned, []
        return unpinned

    def pin(self, name: str) -> Adapter:
        """Mark an adapter as pinned, and return it. Raises UnknownAdapterError; RequestError: too many are pinned."""
        with self._lock:
            self.find(LoRARequest(name))
            pinned = {info.digest for info in self._infos.values() if info.is_pinned} | {self._infos[name].digest}
            most = self._config.num_ready - 1
            if len(pinned) > most:
                raise RequestError(
                    PARAMETER,
                    f"lora_name is {quote(name)}, and {len(pinned) - 1} adapters are pinned; at most {most} of "
                    f"max_cpu_loras={self._config.num_ready} may be, as others need room, too: raise max_cpu_loras",
                )
            self._infos[name].is_pinned = True
            return self._infos[name].adapter

    def infos(self, engines: Iterable[AdapterStats]) -> list[AdapterInfo]:
        """All adapters, with the statistics of the engines."""
        counts = list(engines)
        found = []
        for info in list(self._infos.values()):  # another thread may add one
            info = msgspec.structs.replace(info)
            for stats in counts:
                info.num_running += stats.running.get(info.name, 0)
                info.num_waiting += stats.waiting.get(info.name, 0)
                info.num_loads += stats.loads.get(info.digest, 0)
            if any(info.digest in stats.in_use for stats in counts):
                info.state = "in use"
            elif any(info.digest in stats.ready for stats in counts):
                info.state = "ready"
            found.append(info)
        return found

    def _note_end(self, info: AdapterInfo | None) -> None:
        """Unpin what no name pins any more. The caller holds the lock."""
        pinned = {one.digest for one in self._infos.values() if one.is_pinned}
        if info is not None and info.is_pinned and info.digest not in pinned:
            self._unpinned.append(info.adapter)

    def _check_enabled(self) -> None:
        if not self.is_enabled:
            raise UnknownAdapterError(PARAMETER, "LoRA feature is not enabled. Set enable_lora to true in model.json")

    def _unknown(self, name: str) -> UnknownAdapterError:
        hint = did_you_mean(name, list(self._infos)) if isinstance(name, str) else ""
        return UnknownAdapterError(PARAMETER, f"lora_name is {quote(name)}; there is no such adapter{hint}")
