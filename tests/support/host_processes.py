"""Programs of other hosts: engines without a front, and a store of KV blocks; over loopback, or in a namespace."""

import json
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from support.namespaces import Namespace
from support.ports import unused_port
from support.remote import trusting_hosts

__all__ = ["Site", "started"]

Process = subprocess.Popen[str]


class Site:
    """A front's settings, and the programs of other hosts, which have copies of its model.json.

    Args:
        folder: for files of keys, the model repository and the store's blocks.
        checkpoint: of the model.
        host: another host; unset: it is this one.
        has_store: whether there is to be a store that all have.
        settings: of the model, besides those below.
    """

    def __init__(
        self,
        folder: Path,
        checkpoint: Path,
        host: Namespace | None = None,
        *,
        has_store: bool = False,
        **settings: Any,
    ) -> None:
        self._folder, self._host = folder, host
        self._address = "127.0.0.1" if host is None else host.gateway
        self._store_port = unused_port(self._address)
        for name in ("engines", "store"):
            (folder / name).mkdir()
        front_keys, self._host_keys = trusting_hosts(folder / "engines")
        self._store_keys, store_trusting_keys = trusting_hosts(folder / "store")
        if has_store:
            extra = {"address": f"{self._address}:{self._store_port}", "key_file": str(store_trusting_keys)}
            settings["kv_transfer_config"] = {
                "kv_connector": "RemoteStorageConnector", "kv_connector_extra_config": extra
            }  # fmt: skip
        self.settings: dict[str, Any] = {
            "data_parallel_address": self._address, "data_parallel_rpc_port": unused_port(self._address),
            "data_parallel_key_file": str(front_keys), "kv_cache_memory_bytes": 1 << 24, **settings,
        }  # fmt: skip
        self._version = folder / "models" / "tinypy" / "1"
        self._version.mkdir(parents=True)
        (self._version.parent / "config.pbtxt").write_text('backend: "quire"\n')
        model = {"model": str(checkpoint), "dtype": "float32", **self.settings}
        (self._version / "model.json").write_text(json.dumps(model))

    @property
    def repository(self) -> Path:
        """The model repository, which holds tinypy."""
        return self._version.parents[1]

    def headless(self, rank: int) -> Process:
        """An engine of the other host."""
        options = {"model-repository": self.repository, "data-parallel-start-rank": rank,
                   "data-parallel-key-file": self._host_keys}  # fmt: skip
        return self._start("join", *(f"--{name}={value}" for name, value in options.items()))

    def store(self) -> Process:
        """The store, on the front's host, once it serves."""
        listen, keys = f"{self._address}:{self._store_port}", str(self._store_keys)
        command = ["kv-store", str(self._folder / "blocks"), "--listen", listen, "--key-file", keys]
        process = subprocess.Popen(_quire(command), stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        assert process.stdout.readline().startswith("quire: ready kv_store=")
        return process

    def _start(self, *arguments: str) -> Process:
        command = _quire(arguments)
        if self._host is not None:
            command = self._host.command(*command)
        return subprocess.Popen(command, stdout=subprocess.PIPE, text=True)


def _quire(arguments: Sequence[str]) -> list[str]:
    return [sys.executable, "-m", "quire_cli", *arguments]


@contextmanager
def started() -> Iterator[dict[str, Process]]:
    """Programs by their names, which end with this."""
    processes: dict[str, Process] = {}
    try:
        yield processes
    finally:
        for process in processes.values():
            process.terminate()
        for process in processes.values():
            process.communicate(timeout=60)
