"""LoRA: what callers say and learn of adapters, and what travels with a request; see `adapters/`."""

from typing import Literal

import msgspec

AdapterState = Literal["disk", "ready", "in use"]
"""Where an adapter is: in its folder alone; in the memory of all ranks of some engine; there, and requests use it."""


class LoRARequest(msgspec.Struct, frozen=True):
    """Names an adapter, in vLLM's shape."""

    lora_name: str
    lora_int_id: int = 0
    """Not used: names identify adapters."""
    lora_path: str = ""
    """Its folder; not needed if the name is registered."""


class Adapter(msgspec.Struct, frozen=True, omit_defaults=True):
    """An adapter as a request has it, from its arrival to its end, whatever happens to the name meanwhile."""

    name: str
    folder: str
    digest: str
    """SHA-256 of its configuration and weights, in hexadecimal. KV blocks depend on it, and ranks load nothing else."""
    is_pinned: bool = False
    """Whether it stays in memory once it is loaded."""


class AdapterInfo(msgspec.Struct, kw_only=True):
    """A registered adapter."""

    name: str
    folder: str
    digest: str
    """SHA-256 of its configuration and weights, in hexadecimal."""
    rank: int
    """The largest of its matrices'."""
    num_bytes: int
    """The size of its weights in the file."""
    target_modules: list[str]
    """The last parts of the names of the layers that it changes."""
    state: AdapterState = "disk"
    is_pinned: bool = False
    num_running: int = 0
    """Requests that have begun to run with it."""
    num_waiting: int = 0
    num_loads: int = 0
    """How often it was loaded, summed over the engines, since they started."""

    @property
    def adapter(self) -> Adapter:
        """What a request has that names it."""
        return Adapter(self.name, self.folder, self.digest, self.is_pinned)


class AdaptableModules(msgspec.Struct):
    """The layers of a model that adapters may change."""

    shapes: dict[str, tuple[int, int]] = {}
    """Output and input features of each linear layer, by its name in the model."""
    renamed: list[tuple[str, str]] = []
    """Parts of the checkpoint's names, and what stands for them in the model's."""
    fused: dict[str, list[str]] = {}
    """By the name of a projection in the checkpoint, the model's projections that it is made of, in their order."""
    tables: dict[str, tuple[int, int]] = {}
    """Tokens and features of the embedding and of the head, by their names in the model. Adapters may replace them."""
    are_tied: bool = False
    """Whether the base has one matrix for both."""
    are_experts_interleaved: bool = False
    """Whether rows of gate and up alternate where transformers has both of all experts in one parameter."""
    why_not_experts: str = ""
    """Where adapters may not change experts: what the engine computes them with or on."""
    why_not_dora: str = ""
    """Likewise where there may be no DoRA."""

    def named(self, name: str) -> str:
        """The model's name of a layer, of which transformers' is given."""
        name = f"{name.partition('language_model.')[2] or name}.weight"  # as parts of names may end with a dot
        for theirs, ours in self.renamed:
            name = name.replace(theirs, ours)
        return name.removesuffix(".weight").removeprefix("model.")

    def parts(self, name: str) -> list[str]:
        """The layers that one of the checkpoint's is made of, by the model's names; itself if it is not fused."""
        parent, _, last = name.rpartition(".")
        parts = self.fused.get(last, ())
        return [f"{parent}.{part}" for part in parts] if parts and name not in self.shapes else [name]
