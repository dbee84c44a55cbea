"""Which checkpoints run with transformers' own code, found from `config.json` alone."""

import json
import logging
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from quire_engine import LLM
from quire_engine.errors import CheckpointError
from quire_engine.models import CheckpointConfig, check_checkpoint, read_checkpoint
from quire_engine.models.fallback.checkpoint import TransformersCheckpoint
from support.checkpoints import edit_json, make_small_checkpoint

TINYPY = Path(__file__).parents[4] / "model_repository" / "tinypy" / "1" / "model"
GPT2 = {"architectures": ["GPT2LMHeadModel"], "model_type": "gpt2", "vocab_size": 515, "n_embd": 60, "n_head": 6}


def folder_of(folder: Path, **fields: Any) -> Path:
    (folder / "config.json").write_text(json.dumps({**GPT2, **fields}))
    (folder / "tokenizer.json").symlink_to(TINYPY / "tokenizer.json")
    return folder


def test_fields_have_the_names_and_defaults_of_the_model(tmp_path: Path) -> None:
    assert read_checkpoint(folder_of(tmp_path, eos_token_id=7, dtype="bfloat16")) == TransformersCheckpoint(
        architecture="GPT2LMHeadModel",
        dtype="bfloat16",
        vocab_size=515,
        num_layers=12,
        hidden_size=60,
        head_size=10,
        max_position_embeddings=1024,
        eos_token_ids=(7,),
    )


def test_ours_comes_first_unless_told_otherwise(tmp_path: Path) -> None:
    folder = make_small_checkpoint(tmp_path)
    assert isinstance(read_checkpoint(folder), CheckpointConfig)
    assert isinstance(read_checkpoint(folder, "quire"), CheckpointConfig)
    assert isinstance(read_checkpoint(folder, "transformers"), TransformersCheckpoint)


def test_ours_alone_if_told_so(tmp_path: Path) -> None:
    with pytest.raises(
        CheckpointError, match=r"unknown architecture 'GPT2LMHeadModel'; known are .* Llama, .* each with ForCausalLM"
    ):
        read_checkpoint(folder_of(tmp_path), "quire")


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"architectures": ["T5ForConditionalGeneration"], "model_type": "t5"}, "is an encoder-decoder"),
        ({"architectures": ["WhisperForConditionalGeneration"], "model_type": "whisper"}, "is an encoder-decoder"),
        ({"architectures": ["BartForCausalLM"], "model_type": "bart", "is_encoder_decoder": True},
         "is an encoder-decoder"),
        ({"architectures": ["PaliGemmaForConditionalGeneration"], "model_type": "paligemma"}, "is a multi-modal model"),
        ({"architectures": ["FuyuForCausalLM"], "model_type": "fuyu"}, "is a multi-modal model"),
        ({**GPT2, "vision_config": {"hidden_size": 8}}, "is a model with vision_config, which takes more than text"),
        *(({"architectures": [name], "model_type": kind}, "is a model with layers of recurrent state")
          for name, kind in (("RwkvForCausalLM", "rwkv"), ("ZambaForCausalLM", "zamba"))),
        ({**GPT2, "layer_types": ["chunked_attention"]}, "is a model with layers of type 'chunked_attention'"),
        *(({"architectures": [name], "model_type": kind}, "is a model whose attention cannot be replaced")
          for name, kind in (("BloomForCausalLM", "bloom"), ("MptForCausalLM", "mpt"))),
    ],
)  # fmt: skip
def test_what_cannot_be_served_is_refused_by_name(fields: dict[str, Any], why: str, tmp_path: Path) -> None:
    message = (
        f"config.json: {fields['architectures'][0]} {why}.*; with transformers' own code decoders are served whose"
    )
    with pytest.raises(CheckpointError, match=message):
        check_checkpoint(folder_of(tmp_path, **fields))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"architectures": ["NoSuchForCausalLM"]},
         "unknown architecture 'NoSuchForCausalLM'; .* and transformers has no decoder of that name and model_type"),
        ({"model_type": "llama"}, "unknown architecture 'GPT2LMHeadModel'; .* no decoder of that name and model_type"),
        ({"model_type": None}, "unknown architecture 'GPT2LMHeadModel'"),
        ({"architectures": None, "model_type": None}, "architectures is missing, and model_type is None; one of"),
        ({"architectures": [], "model_type": "t5"}, "architectures is missing, and model_type is 't5'; one of the two"),
        ({"quantization": {"group_size": 64, "bits": 4}}, "quantization says that MLX has quantised the weights"),
        ({"n_embd": 0}, "n_embd is 0; it must be an integer from 1"),
        ({"vocab_size": "many"}, "vocab_size is 'many'"),
        ({"quantization_config": {"quant_method": "gptq"}}, "quantization_config says that the weights are quantised"),
        ({"rope_parameters": {"rope_type": "dynamic"}}, "rope_parameters.rope_type is 'dynamic'; it must be one that"),
        ({"rope_scaling": {"type": "longrope"}}, "rope_scaling.type is 'longrope'; it must be one that"),
    ],
)  # fmt: skip
def test_a_bad_field_is_named(fields: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=message):
        read_checkpoint(folder_of(tmp_path, **fields))


@pytest.mark.parametrize("name", ["dtype", "torch_dtype"])
@pytest.mark.parametrize("impl", ["quire", "transformers"])
def test_float64_is_served_in_float32(name: str, impl: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder = make_small_checkpoint(tmp_path)
    edit_json(folder / "config.json", dtype=None, torch_dtype=None)
    edit_json(folder / "config.json", **{name: "float64"})
    with caplog.at_level(logging.INFO, logger="quire_engine"):
        assert read_checkpoint(folder, impl).dtype == "float32"
    assert f"{name} is float64; it is served in float32" in caplog.text


def test_a_type_says_which_decoder_it_is_where_no_architecture_does(tmp_path: Path) -> None:
    folder = make_small_checkpoint(tmp_path)
    expected = [read_checkpoint(folder, impl) for impl in ("auto", "quire", "transformers")]
    edit_json(folder / "config.json", architectures=None)
    assert [read_checkpoint(folder, impl) for impl in ("auto", "quire", "transformers")] == expected
    (tmp_path / "gpt2").mkdir()
    assert read_checkpoint(folder_of(tmp_path / "gpt2", architectures=[])).architecture == "GPT2LMHeadModel"


def test_layer_types_decide_whether_there_are_recurrent_layers(tmp_path: Path) -> None:
    fields = {"architectures": ["GraniteMoeHybridForCausalLM"], "model_type": "granitemoehybrid", "hidden_size": 64,
              "num_attention_heads": 4, "num_hidden_layers": 2}  # fmt: skip
    for name in ("layer_types", "layers_block_type"):
        (tmp_path / name).mkdir()
        folder = folder_of(tmp_path / name, **fields, **{name: ["attention", "attention"]})
        assert isinstance(read_checkpoint(folder, "transformers"), TransformersCheckpoint)
        edit_json(folder / "config.json", **{name: ["mamba", "attention"]})
        with pytest.raises(CheckpointError, match="is a model with layers of recurrent state"):
            read_checkpoint(folder, "transformers")


def test_latent_attention_is_refused_by_name(tmp_path: Path) -> None:
    fields = {"architectures": ["LongcatFlashForCausalLM"], "model_type": "longcat_flash", "kv_lora_rank": 16}
    with pytest.raises(CheckpointError, match="LongcatFlashForCausalLM is a model with latent attention"):
        read_checkpoint(folder_of(tmp_path, **fields))


@pytest.mark.parametrize("impl", ["quire", "transformers"])
def test_weights_of_other_quantisers_are_refused_by_name(impl: str, tmp_path: Path) -> None:
    folder = make_small_checkpoint(tmp_path)
    (folder / "hf_quant_config.json").write_text(json.dumps({"quantization": {"quant_algo": None}}))
    check_checkpoint(folder, model_impl=impl)
    (folder / "hf_quant_config.json").write_text(json.dumps({"quantization": {"quant_algo": "W4A16_AWQ"}}))
    ours = r"quantization.quant_algo is 'W4A16_AWQ'; it must be FP8 or NVFP4"
    theirs = r"modelopt has quantised the weights \('W4A16_AWQ'\)"
    with pytest.raises(CheckpointError, match=f"hf_quant_config.json: {ours if impl == 'quire' else theirs}"):
        check_checkpoint(folder, model_impl=impl)
    (folder / "hf_quant_config.json").unlink()
    for name in ("quantization", "quantization_config"):
        edit_json(folder / "config.json", **{name: {"group_size": 64, "bits": 4}})
        with pytest.raises(CheckpointError, match=f"{name} says that MLX has quantised the weights"):
            check_checkpoint(folder, model_impl=impl)
        edit_json(folder / "config.json", **{name: None})


def test_a_gguf_file_beside_a_configuration_is_named_with_its_mend(tmp_path: Path) -> None:
    folder = make_small_checkpoint(tmp_path)
    (folder / "model.safetensors").unlink()
    (folder / "a-Q4.gguf").write_bytes(b"GGUF")
    with pytest.raises(CheckpointError, match=r"only safetensors are read; to serve 'a-Q4.gguf', give the path of"):
        check_checkpoint(folder)
    (folder / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"a-Q4.gguf: truncated; it has 4 bytes"):
        check_checkpoint(folder)


def test_a_family_of_ours_with_a_type_that_transformers_lacks(tmp_path: Path) -> None:
    folder = make_small_checkpoint(tmp_path)
    edit_json(folder / "config.json", model_type="my_llama")
    with pytest.raises(CheckpointError, match="model_type is 'my_llama'; transformers, which model_impl asks for, has"):
        read_checkpoint(folder, "transformers")


def test_files_of_weights_are_looked_at_before_anything_is_loaded(tmp_path: Path) -> None:
    folder = folder_of(tmp_path)
    with pytest.raises(CheckpointError, match=r"there is no model\.safetensors"):
        check_checkpoint(folder)
    (folder / "model.safetensors").write_bytes(b"short")
    with pytest.raises(CheckpointError, match="truncated"):
        check_checkpoint(folder)


def test_nothing_is_imported_to_find_out(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from quire_engine.models import read_checkpoint; "
        f"read_checkpoint(Path({str(folder_of(tmp_path))!r})); "
        "print({'torch', 'transformers'} & sys.modules.keys())"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tensor_parallel_size": 2}, "tensor_parallel_size is 2; it must be 1, as GPT2LMHeadModel runs with"),
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size is 2; it must be 1, as GPT2LMHeadModel runs with"),
        ({"quantization": "int8"}, "quantization is 'int8'; it must be unset, as GPT2LMHeadModel runs with"),
        ({"speculative_config": {"method": "draft_model", "model": "/drafts", "num_speculative_tokens": 2}},
         "method is 'draft_model'; GPT2LMHeadModel runs with transformers' own code, for which only"),
        ({"model_impl": "tgi"}, "model_impl is 'tgi'; it must be one of auto, quire, transformers"),
    ],
)  # fmt: skip
def test_settings_that_need_a_family_of_ours_are_refused(
    settings: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        LLM(folder_of(tmp_path), **settings)
