"""How many bytes checkpoints take."""

import json
from pathlib import Path

from benchmarks.harness.checkpoint_size import draft_bytes_per_token, kv_bytes_per_token


def make_config(folder: Path, **fields: int) -> Path:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(fields))
    return folder


def test_cache_of_models_that_draft(tmp_path: Path) -> None:
    target = make_config(
        tmp_path / "target", hidden_size=64, num_hidden_layers=6, num_attention_heads=4, num_key_value_heads=2
    )
    drafts = make_config(tmp_path / "drafts", num_hidden_layers=1, num_key_value_heads=2, head_dim=8)
    assert kv_bytes_per_token(target) == 2 * 6 * 2 * 16 * 2
    assert draft_bytes_per_token("draft_model", drafts, target) == 2 * 1 * 2 * 8 * 2
    assert draft_bytes_per_token("eagle3", drafts, target) == 2 * 1 * 2 * 8 * 2 + 3 * 64 * 2
    assert draft_bytes_per_token("mtp", target, target) == 2 * 1 * 2 * 16 * 2 + 64 * 2
    assert draft_bytes_per_token("medusa", tmp_path / "heads", target) == 0
