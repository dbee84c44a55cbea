"""What is to draft for a model is checked along with it, before anything is loaded."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from quire_engine import LLM
from quire_engine.errors import CheckpointError
from quire_engine.models import check_checkpoint
from safetensors.torch import load_file, save_file
from support.checkpoints import POINTER, edit_json, make_small_checkpoint


@pytest.fixture
def target(tmp_path: Path) -> Path:
    return make_small_checkpoint(tmp_path / "target")


@pytest.fixture
def draft(tmp_path: Path) -> Path:
    return make_small_checkpoint(tmp_path / "draft")


def refusal(target: Path, draft: Path, method: str = "draft_model") -> str:
    with pytest.raises(CheckpointError) as raised:
        check_checkpoint(target, drafts=(method, str(draft)))
    message = str(raised.value)
    assert "\n" not in message
    return message


def test_a_smaller_model_with_the_same_vocabulary_is_fine(target: Path, draft: Path) -> None:
    """It needs no tokenizer, and nothing else of it has to be like the target's."""
    (draft / "tokenizer.json").unlink()
    tensors = load_file(draft / "model.safetensors")
    kept = {name: tensor for name, tensor in tensors.items() if ".layers.1." not in name}
    assert len(kept) < len(tensors)
    save_file(kept, draft / "model.safetensors")
    edit_json(draft / "config.json", num_hidden_layers=1, max_position_embeddings=32, eos_token_id=3)
    config = check_checkpoint(target, drafts=("draft_model", str(draft)))
    assert (config.num_layers, config.max_position_embeddings) == (2, 64), "that of the target"


@pytest.mark.parametrize("method", ["draft_model", "eagle3", "medusa"])
def test_a_folder_that_is_not_there_is_named(method: str, target: Path, tmp_path: Path) -> None:
    message = refusal(target, tmp_path / "nowhere", method)
    assert message.startswith(f"speculative_config: model: there is no folder {tmp_path / 'nowhere'}; give ")


@pytest.mark.parametrize("method", ["draft_model", "eagle3", "medusa"])
def test_a_folder_without_a_configuration_is_refused(method: str, target: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    assert f"{tmp_path / 'empty'}" in refusal(target, tmp_path / "empty", method)
    assert "config.json" in refusal(target, tmp_path / "empty", method)


def test_another_vocabulary_is_refused(target: Path, draft: Path) -> None:
    edit_json(draft / "config.json", vocab_size=31)
    assert refusal(target, draft) == (
        f"{draft / 'config.json'}: vocab_size is 31; a model that drafts must have the vocabulary of the one that it "
        "drafts for, which has 32 tokens"
    )


@pytest.mark.parametrize("name", ["mamba2", "lfm2-moe"])
def test_a_model_with_recurrent_layers_drafts_for_none(name: str, checkpoint: Callable[[str], Path]) -> None:
    message = refusal(checkpoint("qwen3"), checkpoint(name))
    assert message.startswith(f"{checkpoint(name) / 'config.json'}: ")
    assert "has recurrent layers; a model that drafts must have attention alone" in message


def test_no_model_drafts_for_one_without_attention(checkpoint: Callable[[str], Path]) -> None:
    message = refusal(checkpoint("mamba2"), checkpoint("qwen3"))
    assert message == (
        "speculative_config: method is 'draft_model'; Mamba2ForCausalLM has no attention, and such a method uses the "
        "blocks of its keys and values: draft with ngram, suffix or medusa"
    )
    assert check_checkpoint(checkpoint("lfm2-moe"), drafts=("draft_model", str(checkpoint("qwen3"))))
    drafts = {"method": "draft_model", "model": str(checkpoint("qwen3")), "num_speculative_tokens": 2}
    with pytest.raises(ValueError, match=re.escape(message)):
        LLM(checkpoint("mamba2"), speculative_config=drafts, max_model_len=64)


def test_its_weights_are_checked_too(target: Path, draft: Path) -> None:
    tensors = load_file(draft / "model.safetensors")
    save_file({**tensors, "model.norm.weight": torch.ones(15)}, draft / "model.safetensors")
    assert str(draft) in refusal(target, draft)
    assert "model.norm.weight" in refusal(target, draft)
    (draft / "model.safetensors").write_text(POINTER)
    assert f"{draft / 'model.safetensors'} is a git-LFS pointer" in refusal(target, draft)
    (draft / "model.safetensors").unlink()
    assert str(draft) in refusal(target, draft)


def test_a_model_is_no_head_and_a_head_is_no_model(target: Path, draft: Path) -> None:
    for method in ("eagle3", "medusa"):
        assert str(draft) in refusal(target, draft, method)
    fields = json.loads((draft / "config.json").read_text())
    del fields["num_attention_heads"]
    (draft / "config.json").write_text(json.dumps({**fields, "architectures": ["LlamaForCausalLMEagle3"]}))
    assert f"{draft / 'config.json'}" in refusal(target, draft)


def test_what_is_wrong_with_the_model_itself_is_said_first(target: Path, draft: Path) -> None:
    edit_json(draft / "config.json", vocab_size=31)
    (target / "model.safetensors").write_text(POINTER)
    assert str(target) in refusal(target, draft)
