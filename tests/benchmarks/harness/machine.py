"""What the figures were measured on."""

import os
import platform
import time
from pathlib import Path

__all__ = ["describe_machine"]

FLAGS = ("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16", "amx_int8")


def describe_machine(cpuinfo: Path = Path("/proc/cpuinfo"), meminfo: Path = Path("/proc/meminfo")) -> dict[str, str]:
    """Processor with the instruction sets that matter, usable cores, memory, system, and the time of day."""
    fields = {
        name.strip(): value.strip()
        for name, _, value in (line.partition(":") for line in cpuinfo.read_text().splitlines())
    }
    flags = set(fields.get("flags", "").split())
    kilobytes = next(int(line.split()[1]) for line in meminfo.read_text().splitlines() if line.startswith("MemTotal"))
    return {
        "processor": fields.get("model name", platform.machine()),
        "instructions": " ".join(flag for flag in FLAGS if flag in flags),
        "cores": str(len(os.sched_getaffinity(0))),
        "memory": f"{kilobytes / 2**20:.0f} GiB",
        "system": f"{platform.system()} {platform.release()}, Python {platform.python_version()}",
        "date": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
    }
