"""Packed weights in files: a start maps what an earlier one has packed, and does not read the checkpoint.

::

    weight_cache_dir/
      3f0c….weights     by its key, in hex, which begins with that of the code; last used at its time of modification

    | MAGIC | length of the header | its SHA-256 | header, msgpack | tensors, at multiples of ALIGNMENT |

The key is a digest of what packed weights depend on: names, sizes, times, inodes and headers of the checkpoint's files,
its configuration, the settings, the rank, the kernels, and the source of all code that packs. Nothing is ever stale. A
start deletes the files of other code, unless they were used since this code was installed: an engine that runs the
other code may use the same folder.

A file is mapped copy-on-write, so the engine is ready before it is read; a thread then moves it to huge pages. It is
written once the engine is ready, by a thread of the lowest priority, without a name; it gets one when it is on the
disk. So a crash leaves nothing. When it is opened, its owner, its mode, its length, the digest of its header and its
key are checked, and the tensors' numbers are not: that would read them all. What fails is made anew.
"""

import contextlib
import fcntl
import functools
import hashlib
import logging
import mmap
import os
import re
import stat
import struct
import threading
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import quire_kernels
import torch
from quire_kernels.cpu import status as kernel_status
from torch import nn

from quire_engine.distributed import ParallelState
from quire_engine.models.checkpoints import open_checkpoint
from quire_engine.models.checkpoints.config import CheckpointConfig
from quire_engine.models.decoder import Decoder
from quire_engine.models.layers.parallel import Packable, Weight
from quire_engine.models.mapped import aligned, move_to_huge_pages
from quire_engine.models.packed_values import Encoder, Restorer
from quire_engine.system.extras import cache_folder
from quire_engine.system.process_state import lower_priority

logger = logging.getLogger(__name__)

MAGIC = b"quire weights 1\n"
PREFIX = struct.Struct(f"<{len(MAGIC)}sQ32s")
MIN_BYTES = 64 << 20
"""Less is packed as fast as it is mapped."""
DISK_SHARE = 0.5
"""The most that all files may take of what is free and what they take."""
CODE_DIGITS = 16
"""Digits of a key that identify the code that packs."""
CHUNK = 16 << 20
LOWEST_PRIORITY = 19
NAME = re.compile(r"[0-9a-f]{64}\.weights")
INVALID = (OSError, ValueError, msgspec.MsgspecError)
"""What a file raises that is not there or not valid."""


class Header(msgspec.Struct):
    """What a file holds."""

    key: str
    size: int
    """Bytes of all tensors."""
    modules: dict[str, dict[str, Any]]
    """By the path of a module in the model, its packed weight or its parameters, as `Encoder` writes them."""


class WeightCache:
    """The file of one rank's part of a model, in a folder that is made when the first file is written; the key is that
    of `cache_for`."""

    def __init__(self, folder: Path, key: str) -> None:
        self.path = folder / f"{key}.weights"
        self.mapped_bytes = 0
        """Size of the file that `load` has mapped."""
        self._key = key
        self._mapping: weakref.ref[mmap.mmap] | None = None
        self._address = 0

    def load(self, make: Callable[[], Decoder]) -> Decoder | None:
        """The model from `make` with its weights, mapped from the file; None if there is no file, or none that is
        valid."""
        try:
            memory, start, header = self._open()
        except FileNotFoundError:
            return None
        except INVALID as error:
            logger.warning("%s is not used, and made anew: %s", self.path, error)
            return None
        model = make()
        decoder = Restorer(torch.frombuffer(memory, dtype=torch.uint8, offset=start))
        for path, module in _modules(model):  # exactly these, as the key is the same
            _set_state(module, decoder.decode_all(header.modules[path]))
        self.mapped_bytes, self._mapping, self._address = len(memory), weakref.ref(memory), decoder.address - start
        logger.info("weights: %.1f MiB mapped from %s", len(memory) / 2**20, self.path)
        return model

    def start_background(self, model: nn.Module) -> None:
        """Begin what makes the weights fast to reach, once the engine is ready: move those of a file to huge pages, or
        write the file for the next start. If the model is freed meanwhile, no file is written."""
        arguments = (weakref.ref(model),)
        threading.Thread(target=self._run, args=arguments, name="weight-cache", daemon=True).start()

    def _run(self, model: "weakref.ref[nn.Module]") -> None:
        try:
            if self._mapping is None:
                lower_priority(LOWEST_PRIORITY)
                self.save(model)
            elif (mapping := self._mapping()) is not None:  # the weights are not discarded
                move_to_huge_pages(self._address, len(mapping))
            self._delete_outdated()
        except (OSError, TypeError, RuntimeError) as error:
            logger.info("packed weights are not kept in %s: %s", self.path.parent, error)

    def _delete_outdated(self) -> None:
        installed_ns = max(path.stat().st_mtime_ns for path in packer_files())
        folder = _open_folder(self.path.parent)
        try:
            for info, name in _own_files(folder):
                if not name.startswith(self._key[:CODE_DIGITS]) and info.st_mtime_ns < installed_ns:
                    with contextlib.suppress(FileNotFoundError):  # another engine does the same
                        os.unlink(name, dir_fd=folder)
        finally:
            os.close(folder)

    def save(self, model: Callable[[], nn.Module | None]) -> None:
        """Write the file, unless there is a valid one, or no room for it.

        Args:
            model: returns it, or None once its memory is needed: then no file is written.

        Raises:
            OSError: it cannot be written.
            TypeError: weights are packed in a form that no file can hold.
        """
        folder = _open_folder(self.path.parent)
        try:
            fcntl.flock(folder, fcntl.LOCK_EX)  # ranks write in turn; of replicas, the first
            try:
                self._open()
            except INVALID as error:
                if not isinstance(error, FileNotFoundError):
                    self.path.unlink()
                self._write(folder, model)
        finally:
            os.close(folder)

    def _write(self, folder: int, model: Callable[[], nn.Module | None]) -> None:
        present = model()
        if present is None:
            return
        encoder = Encoder()
        modules = {path: encoder.encode_all(_state(module)) for path, module in _modules(present)}
        del present
        # Offsets count from the end of the header, whose length depends on them.
        head = msgspec.msgpack.encode(Header(self._key, encoder.size, modules))
        start = aligned(PREFIX.size + len(head))
        if not _make_room(folder, start + encoder.size):
            return
        file = os.open(".", os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600, dir_fd=folder)
        try:
            os.posix_fallocate(file, 0, start + encoder.size)
            _write_all(file, 0, PREFIX.pack(MAGIC, len(head), hashlib.sha256(head).digest()) + head)
            for offset, tensor in encoder.tensors:
                content = memoryview(tensor.flatten().view(torch.uint8).numpy().data)
                for first in range(0, len(content), CHUNK):
                    if model() is None:
                        return
                    _write_all(file, start + offset + first, content[first : first + CHUNK])
            os.fsync(file)
            with contextlib.suppress(FileExistsError):
                os.link(f"/proc/self/fd/{file}", self.path.name, dst_dir_fd=folder, follow_symlinks=True)
        finally:
            os.close(file)
        logger.info("weights: %.1f MiB kept in %s", (start + encoder.size) / 2**20, self.path)

    def _open(self) -> tuple[mmap.mmap, int, Header]:
        """Map the file; returns where its tensors begin, too. Raises OSError if it cannot be opened or is another
        user's, ValueError if it is damaged or holds other weights."""
        file = os.open(self.path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        try:
            size = _check_own(file, self.path, stat.S_ISREG)
            prefix = os.pread(file, PREFIX.size, 0)
            if len(prefix) < PREFIX.size:
                raise ValueError("it is truncated")
            magic, length, digest = PREFIX.unpack(prefix)
            if magic != MAGIC or length > size:
                raise ValueError("it is no file of weights")
            head = os.pread(file, length, PREFIX.size)
            if hashlib.sha256(head).digest() != digest:
                raise ValueError("its header is damaged")
            header = msgspec.msgpack.decode(head, type=Header)
            start = aligned(PREFIX.size + length)
            if header.key != self._key or start + header.size != size:
                raise ValueError(f"it has {size} bytes, or another key than its header says")
            os.utime(file)
            return mmap.mmap(file, size, mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE), start, header
        finally:
            os.close(file)


def cache_for(
    setting: str | None,
    checkpoint: Path,
    config: CheckpointConfig,
    dtype: torch.dtype,
    quantization: str | None,
    parallel: ParallelState,
) -> WeightCache | None:
    """The cache of a rank's packed weights, on the CPU; None if they are not kept.

    Args:
        setting: `weight_cache_dir`.
        checkpoint: its folder.
        config: its configuration.
        dtype: of the model.
        quantization: the setting.
        parallel: the rank.

    Raises:
        CheckpointError: a file is missing, truncated or malformed.
    """
    if setting == "" or parallel.num_redundant_experts is not None:  # experts move, and their weights change
        return None
    tensors = open_checkpoint(checkpoint).tensors
    if sum(tensor.num_bytes for tensor in tensors.values()) < MIN_BYTES:
        return None
    folder = cache_folder("weights") if setting is None else Path(setting)
    if folder is None:
        return None
    kernels = kernel_status()
    depends_on = (
        sorted((one.name, one.dtype, one.shape, one.num_bytes) for one in tensors.values()),
        [_identity(path) for path in sorted({one.path for one in tensors.values()})],
        repr(config), str(dtype), quantization,
        parallel.rank, parallel.tensor_parallel_size, parallel.pipeline_parallel_size,
        parallel.enable_expert_parallel, parallel.expert_replica, parallel.num_expert_replicas,
        kernels.instruction_set, kernels.interprets_triton, torch.__version__,
    )  # fmt: skip
    code, digest = _packers_digest(), hashlib.sha256(repr(depends_on).encode()).hexdigest()
    return WeightCache(folder, code[:CODE_DIGITS] + digest[CODE_DIGITS:])


def _identity(path: Path) -> tuple[str, int, int, int]:
    info = path.stat()
    return path.name, info.st_size, info.st_mtime_ns, info.st_ino


def packer_files() -> list[Path]:
    """The source and the libraries of `PACKERS`."""
    folders = Path(__file__).parent, Path(quire_kernels.__file__).parent
    return [path for folder in folders for path in sorted(folder.rglob("*")) if path.suffix in (".py", ".so")]


@functools.cache
def _packers_digest() -> str:
    digest = hashlib.sha256()
    for path in packer_files():
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()


def _modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    return ((path, module) for path, module in model.named_modules() if isinstance(module, Weight | Packable))


def _state(module: nn.Module) -> dict[str, Any]:
    packed = module.packed_weight if isinstance(module, Packable) else None
    if packed is not None:
        return {"packed": packed}
    return {name: parameter.data for name, parameter in module.named_parameters(recurse=False)}


def _set_state(module: nn.Module, state: dict[str, Any]) -> None:
    if isinstance(module, Packable) and "packed" in state:
        module.use_packed(state["packed"])
        return
    for name, tensor in state.items():
        getattr(module, name).data = tensor


def _open_folder(folder: Path) -> int:
    """A descriptor of a folder, which is made if it is missing. Raises OSError if another user could write there."""
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        _check_own(descriptor, folder, stat.S_ISDIR)
    except OSError:
        os.close(descriptor)
        raise
    return descriptor


def _check_own(descriptor: int, path: Path, is_kind: Callable[[int], bool]) -> int:
    """The size of a file that only this user can write; PermissionError for others."""
    info = os.fstat(descriptor)
    if not is_kind(info.st_mode) or info.st_uid != os.geteuid() or info.st_mode & 0o022:
        raise PermissionError(f"{path} is another user's, or others can write it")
    return info.st_size


def _own_files(folder: int) -> list[tuple[os.stat_result, str]]:
    with os.scandir(folder) as entries:
        return [(entry.stat(follow_symlinks=False), entry.name) for entry in entries if NAME.fullmatch(entry.name)]


def _make_room(folder: int, size: int) -> bool:
    """Evict the least recently used files until so many bytes more are within `DISK_SHARE`. False, and nothing is
    deleted, if they never can be."""
    own = _own_files(folder)
    total, disk = sum(info.st_size for info, _ in own), os.fstatvfs(folder)
    most = DISK_SHARE * (disk.f_bavail * disk.f_frsize + total)
    if size > most:
        logger.info("packed weights are not kept: they are %d bytes, and there is room for %d", size, most)
        return False
    for info, name in sorted(own, key=lambda one: one[0].st_mtime_ns):
        if total + size <= most:
            break
        os.unlink(name, dir_fd=folder)
        total -= info.st_size
    return True


def _write_all(file: int, offset: int, content: bytes | memoryview) -> None:
    while content:
        written = os.pwrite(file, content, offset)
        content, offset = content[written:], offset + written
