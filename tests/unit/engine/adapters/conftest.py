"""Adapters of one checkpoint, and the checkpoints that they are merged into."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from support.adapters import Adapters, make_adapter, merge_adapter

CASES: dict[str, dict[str, Any]] = {
    "one": {"rank": 1, "seed": 1},
    "eight": {"rank": 8, "seed": 2, "targets": ["q_proj", "v_proj"], "infix": ".default"},
    "stabilized": {"rank": 64, "seed": 3, "use_rslora": True},
    "patterns": {
        "rank": 4, "seed": 4, "rank_pattern": {"layers.0.self_attn.q_proj": 17, "down_proj": 2},
        "alpha_pattern": {".*v_proj": 31, "up_proj": 5}, "targets": ["q_proj", "v_proj", "up_proj", "down_proj"],
    },
    "tables": {"rank": 4, "seed": 6, "tables": ["embed_tokens", "lm_head"]},
    "embedding": {"rank": 2, "seed": 7, "targets": ["o_proj"], "tables": ["embed_tokens"]},
    "head": {"rank": 2, "seed": 8, "targets": ["o_proj"], "tables": ["lm_head"]},
    "fewer-tokens": {
        "rank": 2, "seed": 9, "targets": ["v_proj"], "tables": ["embed_tokens", "lm_head"], "num_tokens": 509,
    },
    "changed-tables": {"rank": 3, "seed": 10, "targets": ["q_proj", "embed_tokens", "lm_head"]},
    "changed-embedding": {"rank": 2, "seed": 11, "targets": ["embed_tokens"]},
    "bfloat16": {"rank": 16, "seed": 5, "dtype": torch.bfloat16, "targets": ["o_proj", "gate_proj"]},
}  # fmt: skip
"""What PEFT can save, by the adapter's name."""


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
