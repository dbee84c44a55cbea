"""Five adapters of one checkpoint, and the checkpoints that they are merged into."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from quire_engine import LoRARequest
from support.adapters import make_adapter, merge_adapter
from support.oracle import Expected, generate_greedily, load_reference

CASES: dict[str, dict[str, Any]] = {
    "one": {"rank": 1, "seed": 1},
    "eight": {"rank": 8, "seed": 2, "targets": ["q_proj", "v_proj"], "infix": ".default"},
    "stabilized": {"rank": 64, "seed": 3, "use_rslora": True},
    "patterns": {
        "rank": 4, "seed": 4, "rank_pattern": {"layers.0.self_attn.q_proj": 17, "down_proj": 2},
        "alpha_pattern": {".*v_proj": 31, "up_proj": 5}, "targets": ["q_proj", "v_proj", "up_proj", "down_proj"],
    },
    "bfloat16": {"rank": 16, "seed": 5, "dtype": torch.bfloat16, "targets": ["o_proj", "gate_proj"]},
}  # fmt: skip
"""What PEFT can save, by the adapter's name."""


@dataclass(frozen=True, slots=True)
class Adapters:
    """Adapters of a checkpoint."""

    base: Path
    folders: dict[str, Path]
    merged: Callable[[str], Path]
    """By name, the checkpoint that one is merged into; that of the empty name is the base."""

    def request(self, name: str) -> LoRARequest | None:
        return LoRARequest(name, 1, str(self.folders[name])) if name else None

    def expected(self, name: str, prompts: list[list[int]], num_tokens: int) -> list[Expected]:
        """What transformers generates with the merged checkpoint."""
        model = load_reference(self.merged(name) if name else self.base)
        return [generate_greedily(model, prompt, num_tokens) for prompt in prompts]


@pytest.fixture(scope="session")
def adapters(checkpoint: Callable[[str], Path], made: Callable[[str, Callable[[Path], object]], Path]) -> Adapters:
    base = checkpoint("tied-gqa")
    folders = {
        name: made(f"adapter-{name}", lambda folder, case=case: make_adapter(folder, base, **case))
        for name, case in CASES.items()
    }

    def merged(name: str) -> Path:
        return made(f"merged-{name}", lambda folder: merge_adapter(folder, base, folders[name]))

    return Adapters(base, folders, merged)
