"""The setting `speculative_config`: vLLM's keys, checked at the start."""

from pathlib import Path
from typing import Any

import msgspec
import pytest
from quire_engine.config import EngineConfig, EngineCoreConfig, SpeculativeConfig
from quire_engine.config.speculative_config import MTP_ALIASES


def config_of(value: Any, **settings: Any) -> EngineConfig:
    return EngineConfig.from_settings({"model": "/m", "speculative_config": value, **settings})


def speculative(value: Any) -> SpeculativeConfig:
    found = config_of(value).scheduler.speculative_config
    assert found is not None
    return found


@pytest.mark.parametrize("value", [None, {}])
def test_nothing_is_asked_for(value: Any) -> None:
    scheduler = config_of(value).scheduler
    assert scheduler.speculative_config is None
    assert (scheduler.max_draft_tokens, scheduler.max_num_sampled_rows) == (0, 64)


@pytest.mark.parametrize(
    ("value", "most", "lookup"),
    [
        ({"method": "ngram"}, 16, (5, 5)),
        ({"method": "ngram", "prompt_lookup_max": 4}, 16, (4, 4)),
        ({"method": "ngram", "prompt_lookup_min": 2}, 16, (2, 2)),
        ({"method": "ngram", "prompt_lookup_min": 2, "prompt_lookup_max": 4, "num_speculative_tokens": 3}, 3, (2, 4)),
        ({"method": "suffix"}, 12, (5, 5)),
        ({"method": "suffix", "suffix_decoding_max_tree_depth": 256}, 128, (5, 5)),
        ({"method": "suffix", "suffix_decoding_max_spec_factor": 4.0}, 19, (5, 5)),
        ({"method": "suffix", "suffix_decoding_max_spec_factor": 0.01}, 1, (5, 5)),
        ({"method": "suffix", "suffix_decoding_max_spec_factor": 1e308}, 23, (5, 5)),
        ({"method": "suffix", "num_speculative_tokens": 7, "suffix_decoding_max_tree_depth": 12}, 6, (5, 5)),
        ({"method": "draft_model", "model": "/d"}, 8, (5, 5)),
        ({"method": "eagle3", "model": "/d", "num_speculative_tokens": 3}, 3, (5, 5)),
        ({"method": "medusa", "model": "/d"}, 8, (5, 5)),
        ({"method": "mtp"}, 8, (5, 5)),
        ({"method": "mtp", "model": "/d"}, 8, (5, 5)),
    ],
)
def test_what_is_left_out_has_a_value_that_works(value: Any, most: int, lookup: tuple[int, int]) -> None:
    config = speculative(value)
    assert (config.max_draft_tokens, config.lookup_range) == (most, lookup)


def test_vllms_keys_that_ask_for_nothing_here_are_passed_over() -> None:
    neutral = {"disable_by_batch_size": 32, "draft_tensor_parallel_size": 1, "disable_logprobs": False,
               "num_speculative_tokens": None}  # fmt: skip
    assert speculative({"method": "suffix", **neutral}) == speculative({"method": "suffix"})


@pytest.mark.parametrize(
    ("value", "told"),
    [
        ("suffix", r" is 'suffix'; it must be an object, such as"),
        ({"num_speculative_tokens": 3}, r": method is missing; it must be one of ngram, suffix"),
        ({"method": "magic"}, r": method is 'magic'; it must be one of ngram, suffix"),
        ({"method": ["ngram"]}, r": method is \['ngram'\]; it must be one of"),
        ({"method": "ngram", "prompt_lokup_max": 3}, r": unknown key 'prompt_lokup_max'; .* 'prompt_lookup_max'"),
        ({"method": "ngram", "num_speculative_tokens": 0}, r": num_speculative_tokens is 0; .* from 1 to 128"),
        ({"method": "ngram", "num_speculative_tokens": True}, r": num_speculative_tokens is True"),
        ({"method": "ngram", "num_speculative_tokens": 129}, r": num_speculative_tokens is 129"),
        ({"method": "ngram", "prompt_lookup_min": 4, "prompt_lookup_max": 3}, r": prompt_lookup_min is 4; .*_max=3"),
        ({"method": "suffix", "suffix_decoding_max_tree_depth": 1}, r": suffix_decoding_max_tree_depth is 1"),
        ({"method": "suffix", "suffix_decoding_max_cached_requests": -1}, r": suffix_decoding_max_cached_.* is -1"),
        ({"method": "suffix", "suffix_decoding_max_spec_factor": 0}, r": suffix_decoding_max_spec_factor is 0"),
        ({"method": "suffix", "suffix_decoding_min_token_prob": 1.1}, r": suffix_decoding_min_token_prob is 1.1"),
        ({"method": "suffix", "prompt_lookup_max": 3}, r": prompt_lookup_max is 3; .* it is of 'ngram'"),
        ({"method": "ngram", "suffix_decoding_max_tree_depth": 8}, r": suffix_.* is 8; .* 'suffix'"),
        ({"method": "suffix", "draft_tensor_parallel_size": 2}, r": draft_tensor_parallel_size is 2; .* or 1"),
        ({"method": "eagle3"}, r": model is None; .* a checkpoint folder, with method 'eagle3'"),
        ({"method": "medusa", "model": ""}, r": model is ''; .* a checkpoint folder"),
        ({"method": "draft_model", "model": ["/d"]}, r": model is \['/d'\]; .* a checkpoint folder"),
        ({"method": "ngram", "model": "/d"}, r": model is '/d'; .* left out with method 'ngram': it has none"),
        ({"method": "gemma4_assistant"}, r": model is None; .* a checkpoint folder, with method 'gemma4_assistant'"),
        ({"method": "deepsek_mtp"}, r": method is 'deepsek_mtp'; it must be one of .*, mtp$"),
        ({"method": "suffix", "model": "/d"}, r": model is '/d'; .* left out with method 'suffix'"),
        ({"method": "suffix", "acceptance": "rejection"}, r": acceptance is 'rejection'; .* 'exact' with method 'suff"),
        ({"method": "ngram", "acceptance": "rejection"}, r": acceptance is 'rejection'; .* 'exact' with method 'ngr"),
        ({"model": "/d", "acceptance": "typical"}, r": acceptance is 'typical'; .* one of exact, rejection"),
        ({"model": "/d", "num_speculative_tokens": 0}, r": num_speculative_tokens is 0; .* from 1 to 128"),
        ({"model": "/d", "prompt_lookup_max": 3}, r": prompt_lookup_max is 3; .* it is of 'ngram'"),
        ({"modle": "/d"}, r": unknown key 'modle'; did you mean 'model'"),
        ({"acceptance": "rejection"}, r": method is missing; .* draft_model, eagle3, medusa"),
    ],
)  # fmt: skip
def test_a_bad_one_is_refused_by_name(value: Any, told: str) -> None:
    with pytest.raises(ValueError, match=f"^speculative_config{told}"):
        config_of(value)


def test_a_model_alone_is_a_draft_model() -> None:
    config = speculative({"model": "/d"})
    assert (config.method, config.acceptance) == ("draft_model", "exact")
    assert config.checkpoint == ("draft_model", "/d")
    assert speculative({"method": "medusa", "model": "/d", "acceptance": "rejection"}).checkpoint == ("medusa", "/d")
    assert speculative({"method": "ngram"}).checkpoint is None
    assert speculative({"method": "mtp", "acceptance": "rejection"}).checkpoint == ("mtp", None)
    assert config_of({"model": "/d"}).scheduler.draft_checkpoint == ("draft_model", "/d")
    assert config_of(None).scheduler.draft_checkpoint is None


@pytest.mark.parametrize("name", MTP_ALIASES)
def test_vllms_other_names_of_multi_token_prediction_are_known(name: str) -> None:
    assert speculative({"method": name, "num_speculative_tokens": 1}).method == "mtp"


def test_the_path_of_what_drafts_is_relative_to_the_same_folder_as_the_models(tmp_path: Path) -> None:
    def path_of(path: str, base_dir: Path | None) -> str | None:
        settings = {"model": "m", "speculative_config": {"model": path}}
        found = EngineConfig.from_settings(settings, base_dir).scheduler.speculative_config
        assert settings == {"model": "m", "speculative_config": {"model": path}}, "it is the caller's"
        assert found is not None
        return found.model

    assert path_of("../draft", tmp_path / "1") == str(tmp_path / "draft")
    assert path_of("/d", tmp_path) == "/d"
    assert path_of("draft", None) == "draft"
    with pytest.raises(ValueError, match="model is ''"):
        path_of("", tmp_path)


@pytest.mark.parametrize("method", ["eagle3", "dflash"])
def test_what_reads_hidden_states_of_several_layers_drafts_in_one_stage(method: str) -> None:
    drafting = {"method": method, "model": "/d"}
    with pytest.raises(
        ValueError, match=f"^speculative_config: method is '{method}' with pipeline_parallel_size=2; it reads .* use"
    ):
        config_of(drafting, pipeline_parallel_size=2)
    config_of(drafting, tensor_parallel_size=2)


def test_other_models_draft_in_several_stages() -> None:
    for method in ("medusa", "draft_model"):
        config_of({"method": method, "model": "/d"}, pipeline_parallel_size=2)
    config_of({"method": "mtp"}, pipeline_parallel_size=2)


def test_the_ranks_are_told() -> None:
    config = config_of({"method": "ngram", "prompt_lookup_max": 3})
    sent = msgspec.json.decode(msgspec.json.encode(config.core), type=EngineCoreConfig)
    assert sent.scheduler.speculative_config == config.scheduler.speculative_config
    assert msgspec.to_builtins(config.settings())["speculative_config"]["method"] == "ngram"


@pytest.mark.parametrize(
    ("settings", "rows"),
    [
        ({}, 64 * 8),
        ({"max_num_seqs": 4}, 4 * 8),
        ({"max_num_seqs": 4, "max_num_batched_tokens": 17}, 4 * 4),
        ({"max_num_seqs": 100}, 100 * 5),
        ({"max_num_seqs": 600}, 600),
        ({"max_num_seqs": 600, "max_num_batched_tokens": 64}, 600),
    ],
)
def test_rows_are_bounded_by_memory_and_by_the_step(settings: dict[str, int], rows: int) -> None:
    drafting = {"method": "ngram", "num_speculative_tokens": 7}
    assert config_of(drafting, **settings).scheduler.max_num_sampled_rows == rows
