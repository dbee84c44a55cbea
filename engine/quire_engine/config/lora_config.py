"""LoRAConfig: whether requests may name LoRA adapters, and how many are kept where."""

from collections.abc import Mapping
from dataclasses import MISSING, dataclass, field, fields
from typing import Annotated

from quire_engine.config.checks import between, check, check_fields

MAX_LORA_RANK = 256


@dataclass(frozen=True, kw_only=True, slots=True)
class LoRAConfig:
    """LoRA adapters, by vLLM's names. ::

    lora_modules ─── registered: any number, in their folders
    max_cpu_loras ── ready: in the memory of each rank
    max_loras ────── in use: the different adapters of one step
    """

    enable_lora: bool = False
    """Whether requests may name adapters. Their memory is set aside then; without it nothing is."""
    max_loras: Annotated[int, between(1, 256)] = 4
    """Different adapters in one step. Requests of others wait, and others overtake them, but not without end."""
    max_lora_rank: Annotated[int, between(1, MAX_LORA_RANK)] = 64
    """The largest rank of an adapter. Memory is set aside for adapters of this rank that change every layer."""
    max_cpu_loras: Annotated[int, between(1, 65536)] | None = None
    """Adapters that each rank keeps ready in the machine's memory; unset: twice `max_loras`. The one that was used
    longest ago makes room for the next."""
    lora_modules: dict[str, str] = field(default_factory=dict)
    """Adapters that are registered from the start: `{"name": "folder"}`."""

    def __post_init__(self) -> None:
        words = {"true": True, "false": False}  # as in vllm_backend's examples
        if isinstance(self.enable_lora, str):
            object.__setattr__(self, "enable_lora", words.get(self.enable_lora.lower(), self.enable_lora))
        check(isinstance(self.enable_lora, bool), "enable_lora", self.enable_lora, "true or false")
        if not self.enable_lora:
            if self.lora_modules:
                raise ValueError("lora_modules is set without enable_lora; set enable_lora to true, or leave it out")
            for one in fields(self)[1:]:  # bounds of nothing, as vLLM's files have them
                default = one.default if one.default is not MISSING else {}
                object.__setattr__(self, one.name, default)
            return
        check_fields(self)
        check(self.num_ready >= self.max_loras, "max_cpu_loras", self.max_cpu_loras,
              f"at least max_loras={self.max_loras}")  # fmt: skip
        modules = self.lora_modules
        check(isinstance(modules, Mapping) and all(isinstance(one, str) and one for item in modules.items()
              for one in item), "lora_modules", modules, "an object of names and their folders")  # fmt: skip

    @property
    def num_ready(self) -> int:
        """Adapters that each rank keeps in memory."""
        return self.max_cpu_loras or 2 * self.max_loras
