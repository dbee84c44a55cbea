"""`quire doctor`: what this machine can run, and what is missing, each with its fix; and whether a checkpoint runs."""

import os
import platform
import re
import shutil
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from quire_engine.system.extras import install_command

from quire_cli.errors import CommandError
from quire_cli.model_repository import check_model, offered_tasks, read_adapters
from quire_cli.ports import Endpoint, ReservedPorts
from quire_cli.server.run_directory import SHARED_MEMORY, leftovers
from quire_cli.server.tritonserver import find_tritonserver

if TYPE_CHECKING:
    from quire_engine.config import EngineConfig
    from quire_engine.models import ServedCheckpoint

ADAPTER_CONFIG = "adapter_config.json"
_CPU_FEATURES = ("avx2", "avx512f", "avx512_bf16", "avx512_vnni", "amx_bf16", "amx_int8")
_GIB = 2**30
_MIB = 2**20
# The Python backend maps 1 MiB per model, and more with requests in flight; containers get 64 MiB by default.
_SHM_ENOUGH = 64 * _MIB
_SHM_LEAST = 8 * _MIB
_MEMORY_ENOUGH = 2 * _GIB
DRIVER_FILE = Path("/proc/driver/nvidia/version")
_PORTS = {"grpc-port": 8001, "http-port": 8000, "metrics-port": 8002}


@dataclass(frozen=True, slots=True)
class Check:
    """One finding. `FAIL`: `quire serve` cannot work. `WARN`: it works, but worse, or not with its defaults."""

    name: str
    status: Literal["OK", "WARN", "FAIL"]
    detail: str
    mend: str = ""

    def __str__(self) -> str:
        return f"{self.status:4}  {self.name:12} {self.detail}{f'; {self.mend}' if self.mend else ''}"

    def as_dict(self) -> dict[str, str]:
        """For JSON."""
        return asdict(self)


def examine() -> Iterator[Check]:
    """Run every check, one after the other."""
    checks: tuple[Callable[[], Check], ...] = (
        _python, _packages, _cpu, _kernels, _cores, _memory, _gpu, _tritonserver, _ports, _shared_memory, _leftovers,
    )  # fmt: skip
    for check in checks:
        yield check()


def examine_model(path: Path, settings: Mapping[str, Any]) -> Iterator[Check]:
    """Check a checkpoint, and what it takes of this machine's memory, without loading it.

    Args:
        path: a folder, a GGUF file, or a name of the Hub, whose weights are not downloaded; or the folder of a LoRA
            adapter, which is then checked with the checkpoint that it was trained on.
        settings: the engine's, as in `model.json`.
    """
    from quire_engine.config.hub import WEIGHTS, fetch_checkpoint, is_hub_name
    from quire_engine.errors import EngineError

    settings, source = dict(settings), "configuration, tokenizer and the headers of its weights"
    try:
        if (path / ADAPTER_CONFIG).is_file():
            path, settings = _base_of(path), {"enable_lora": True, "lora_modules": {path.name: str(path)}, **settings}
        if is_hub_name(str(path)):
            path = Path(fetch_checkpoint(str(path), settings.pop("revision", None), weights=False))
            if not any(path.glob(WEIGHTS)):
                settings["load_format"] = "dummy"
                source = "config.json and tokenizer, as the weights are not on this machine"
        yield from _model_checks(*check_model(path, settings), source)
    except (CommandError, EngineError, ValueError) as error:
        cause, _, mend = " ".join(str(error).split()).partition("; ")
        yield Check("model", "FAIL", cause, mend or "docs/models.md says what is served")


def _base_of(adapter: Path) -> Path:
    """The checkpoint that an adapter was trained on. Raises CheckpointError if it is not on this machine."""
    from quire_engine.config.hub import is_hub_name
    from quire_engine.errors import CheckpointError
    from quire_engine.models.checkpoints.files import read_json

    base = read_json(adapter / ADAPTER_CONFIG).get("base_model_name_or_path")
    if isinstance(base, str) and base and (Path(base).exists() or is_hub_name(base)):
        return Path(base)
    raise CheckpointError(
        f"{adapter / ADAPTER_CONFIG} names the base {base!r}, which is not on this machine; check the adapter with "
        f'its base: quire doctor --model BASE enable_lora=true \'lora_modules={{"{adapter.name}": "{adapter}"}}\''
    )


def _adapter_checks(config: "EngineConfig", checkpoint: "ServedCheckpoint") -> Iterator[Check]:
    from quire_engine.errors import CheckpointError

    for name, read in read_adapters(config, checkpoint):
        if isinstance(read, CheckpointError):
            cause, _, mend = " ".join(str(read).split()).partition("; ")
            yield Check("adapter", "FAIL", f"{name}: {cause}", mend or "docs/adapters.md says what is served")
        else:
            layers = f"{len(read.modules)} layers ({', '.join(read.target_modules)})"
            detail = f"{name}: LoRA of rank {read.rank} for {checkpoint.architecture}, {layers}"
            yield Check("adapter", "OK", f"{detail}, {_size(read.num_bytes)}")


def _model_checks(config: "EngineConfig", checkpoint: "ServedCheckpoint", source: str) -> Iterator[Check]:
    from quire_engine.core.build_engine import check_settings
    from quire_engine.device.placement import rank_device
    from quire_engine.models.checkpoints.config import CheckpointConfig
    from quire_engine.models.registry import ARCHITECTURES, POOLING_ARCHITECTURES
    from quire_engine.worker.memory_estimate import MemoryEstimate
    from quire_kernels import cpu

    max_model_len = config.model.max_model_len or checkpoint.max_position_embeddings
    tasks = ", ".join(offered_tasks(config, checkpoint))
    check_settings(config, checkpoint, max_model_len)
    device = rank_device(config, 0)
    where = f"the CPU ({cpu.status().instruction_set or 'plain torch'})" if device.type == "cpu" else str(device)
    if not isinstance(checkpoint, CheckpointConfig):
        detail = f"{checkpoint.architecture} runs on {where} with transformers' own code, for {tasks}"
        yield Check("model", "WARN", detail, "it is slower than Quire's own families; its memory is known once it is "
                    "loaded")  # fmt: skip
        return
    family = (ARCHITECTURES | POOLING_ARCHITECTURES).get(checkpoint.architecture, "of its text model")
    yield Check("model", "OK", f"{checkpoint.architecture} runs on {where} as of the family {family}, with "
                f"{max_model_len} tokens of context, for {tasks}; checked: {source}")  # fmt: skip
    stored = checkpoint.weight_format.method
    numbers = checkpoint.dtype if config.model.dtype == "auto" else config.model.dtype
    numbers = config.model.quantization or (numbers if stored == "unquantised" else stored)
    estimate = MemoryEstimate.of(config, checkpoint, max_model_len, device)
    each = "" if config.parallel.world_size == 1 else f" on each of {config.parallel.world_size} ranks"
    yield Check("weights", "OK", f"{estimate.num_parameters / 1e6:.1f} M parameters, "
                f"{_size(estimate.weight_bytes)}{each} in {numbers}")  # fmt: skip
    detail = (f"{estimate.kv_bytes_per_token} bytes per token{each}; {estimate.num_kv_cache_tokens} tokens fit into "
              f"{_size(estimate.available_bytes)}, less what the largest step takes")  # fmt: skip
    if estimate.num_states:
        detail += f"; {estimate.num_states} states of recurrent layers of {_size(estimate.state_bytes)} are among it"
    if estimate.num_kv_cache_tokens < max_model_len:
        mend = f"set max_model_len to at most {estimate.num_kv_cache_tokens}, or give it more memory"
        yield Check("KV cache", "WARN", f"{detail}: fewer than a request of full length has", mend)
    else:
        yield Check("KV cache", "OK", detail)
    yield from _adapter_checks(config, checkpoint)


def _size(num_bytes: int) -> str:
    return f"{num_bytes / _GIB:.2f} GiB" if num_bytes >= _GIB else f"{num_bytes / _MIB:.1f} MiB"


def is_fit(checks: list[Check]) -> bool:
    """True when nothing that `quire serve` needs is missing."""
    return all(check.status != "FAIL" for check in checks)


def _python() -> Check:
    detail = f"{platform.python_version()} at {sys.executable}"
    if sys.platform != "linux":
        return Check("python", "FAIL", f"{detail}, on {sys.platform}", "quire runs on Linux on x86-64")
    if platform.machine() != "x86_64":
        mend = "use x86-64: quire is tested there alone, and its C++ kernels are for it"
        return Check("python", "WARN", f"{detail}, on {platform.machine()}", mend)
    return Check("python", "OK", detail)


def _packages() -> Check:
    versions = {name: _version(name) for name in ("torch", "transformers", "numpy", "msgspec", "pyzmq")}
    missing = [name for name, version in versions.items() if version is None]
    if missing:
        return Check("packages", "FAIL", f"{', '.join(missing)} not installed", install_command("server"))
    return Check("packages", "OK", ", ".join(f"{name} {version}" for name, version in versions.items()))


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _cpu() -> Check:
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    fields: dict[str, str] = {}
    for line in lines:
        key, separator, value = line.partition(":")
        if separator:
            fields.setdefault(key.strip(), value.strip())
    flags = set(fields.get("flags", "").split())
    features = " ".join(name for name in _CPU_FEATURES if name in flags)
    detail = f"{fields.get('model name', platform.machine())}: {features or 'no vector features'}"
    if "avx2" not in flags:
        return Check(
            "cpu",
            "WARN",
            detail,
            "without AVX2 models are computed in plain torch, which is slow; use a newer x86-64 CPU or a GPU",
        )
    return Check("cpu", "OK", detail)


def _kernels() -> Check:
    try:
        from quire_kernels import cpu
    except ImportError as error:
        return Check("kernels", "FAIL", f"cannot be imported: {error}", install_command("server"))
    try:
        status = cpu.status()
    except ValueError as error:
        return Check("kernels", "FAIL", str(error), f"unset {cpu.KERNELS_VARIABLE}")
    if status.instruction_set is None:
        return Check("kernels", "WARN", f"plain torch, which is slow: {status.reason}", cpu.MEND)
    return Check("kernels", "OK", f"C++ kernels, {status.reason}")


def _cores() -> Check:
    allowed = len(os.sched_getaffinity(0))
    quota = _cgroup("cpu.max").split()
    if len(quota) == 2 and quota[0].isdecimal() and int(quota[0]) / int(quota[1]) < allowed:
        limit = int(quota[0]) / int(quota[1])
        mend = f"threads beyond the quota are throttled; pin the container to {max(1, int(limit))} CPUs (--cpuset-cpus)"
        return Check("cores", "WARN", f"{allowed} allowed, but the container's quota is {limit:.1f}", mend)
    return Check("cores", "OK", f"{allowed} of {os.cpu_count()} allowed")


def _memory() -> Check:
    from quire_engine.system.memory import available_memory_bytes  # what the engine sizes its KV cache by

    available = available_memory_bytes()
    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    detail = f"{available / _GIB:.1f} GiB available of {total / _GIB:.1f}"
    if available < _MEMORY_ENOUGH:
        return Check("memory", "WARN", detail, "only the smallest models fit; free some")
    return Check("memory", "OK", detail)


def _gpu() -> Check:
    """According to torch, which computes there, and not to nvidia-smi, which need not be installed."""
    try:
        import torch
    except ImportError as error:
        return Check("gpu", "FAIL", f"torch cannot be imported: {error}", install_command("server"))
    driver = _driver_version()
    if not torch.backends.cuda.is_built():  # type: ignore[no-untyped-call]
        without = f"torch {torch.__version__} has no CUDA"
        if driver is None:
            return Check("gpu", "OK", f"none ({without}, and there is no NVIDIA driver); models run on the CPU")
        mend = "install a CUDA build of torch to use the GPUs"
        return Check("gpu", "WARN", f"NVIDIA driver {driver}, but {without}: models run on the CPU", mend)
    with warnings.catch_warnings(record=True) as caught:  # in which torch says why it finds no GPU
        warnings.simplefilter("always")
        is_available = torch.cuda.is_available()
    if not is_available:
        if driver is None:
            return Check("gpu", "OK", "none (there is no NVIDIA driver); models run on the CPU")
        cause = " ".join(str(caught[0].message).split()) if caught else "torch finds no GPU"
        detail = f"NVIDIA driver {driver}, but {cause.rstrip('.')}: models run on the CPU"
        return Check("gpu", "WARN", detail, "mend the driver, or see whether CUDA_VISIBLE_DEVICES hides the GPUs")
    try:
        gpus = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
    except RuntimeError as error:  # a GPU that does not respond
        return Check("gpu", "WARN", f"torch cannot use the GPUs: {str(error).splitlines()[0]}", "mend the driver")
    names = ", ".join(
        f"{gpu.name} ({gpu.total_memory / _GIB:.0f} GiB, compute capability {gpu.major}.{gpu.minor})" for gpu in gpus
    )
    detail = f"{names}; driver {driver or 'unknown'}, CUDA {torch.version.cuda} of torch {torch.__version__}"
    if any(gpu.major < 8 for gpu in gpus):
        return Check("gpu", "WARN", detail, "bfloat16 needs compute capability 8.0: use dtype float16 on those below")
    return Check("gpu", "OK", detail)


def _driver_version() -> str | None:
    """Of the NVIDIA driver that is loaded; None where there is none."""
    try:
        lines = DRIVER_FILE.read_text(encoding="utf-8").splitlines()
    except OSError:
        return None
    words = lines[0].split() if lines else []
    return next((word for word in words if re.fullmatch(r"\d+(\.\d+)+", word)), "of unknown version")


def _tritonserver() -> Check:
    try:
        server = find_tritonserver()
    except CommandError as error:
        cause, _, mend = str(error).partition("; ")
        return Check("tritonserver", "FAIL", cause, mend)
    return Check("tritonserver", "OK", f"{server.version}, found in {server.origin}: {server.binary}")


def _ports() -> Check:
    taken = [f"{port} (--{option})" for option, port in _PORTS.items() if not _is_free(option, port)]
    if taken:
        return Check("ports", "WARN", f"in use: {', '.join(taken)}", "free them, or choose others with those options")
    return Check("ports", "OK", f"{', '.join(map(str, _PORTS.values()))} are free")


def _is_free(option: str, port: int) -> bool:
    try:
        with ReservedPorts() as ports:
            ports.take({option: Endpoint("127.0.0.1", port)})
    except CommandError:
        return False
    return True


def _shared_memory() -> Check:
    if not SHARED_MEMORY.is_dir():
        return Check("/dev/shm", "FAIL", "is missing", "mount a tmpfs there")
    usage = shutil.disk_usage(SHARED_MEMORY)
    detail = f"{usage.free / _MIB:.0f} MiB free of {usage.total / _MIB:.0f}"
    mend = "give it more (docker run --shm-size=1g), or remove what fills it"
    if usage.free < _SHM_LEAST:
        return Check("/dev/shm", "FAIL", detail, mend)
    if usage.free < _SHM_ENOUGH:
        return Check("/dev/shm", "WARN", detail, mend)
    return Check("/dev/shm", "OK", detail)


def _leftovers() -> Check:
    found = leftovers()
    if found:
        return Check("leftovers", "WARN", f"of dead runs: {found}", "the next quire serve removes them")
    return Check("leftovers", "OK", "none")


def _cgroup(file: str) -> str:
    """A control file of this process's cgroup (version 2, as containers see it); empty where there is none."""
    try:
        return Path("/sys/fs/cgroup", file).read_text(encoding="utf-8").strip()
    except OSError:
        return ""
