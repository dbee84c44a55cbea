"""Families whose layers keep states: the same tokens however the work is cut, shared and repeated."""

import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from quire_engine import LLM, SamplingParams
from quire_engine.errors import CheckpointError
from quire_engine.executor.uniproc import UniProcExecutor
from quire_engine.kv_cache import KVCacheGroups
from quire_engine.messages import DraftTokens, EngineCoreRequest
from quire_engine.models import CheckpointConfig, check_checkpoint
from quire_engine.models.checkpoints.fields import MAX_POSITIONS
from quire_engine.models.options import MambaOptions, SelectiveOptions
from quire_engine.models.registry import ARCHITECTURES
from quire_engine.scheduler.request import Request
from safetensors.torch import load_file, save_file
from support.every_kind import core_of
from support.oracle import VOCAB_SIZE, generate_greedily, load_reference, make_prompts
from support.ranks import llm_of_thread_ranks
from support.scheduling import draft_always
from transformers import AutoConfig

NAMES = ("granite-hybrid", "falcon-h1", "jamba", "nemotron-h", "falcon-mamba")
"""Mamba-2 in some layers, and beside attention; Mamba in some layers; layers of one part each; and no attention."""
NUM_TOKENS, BLOCK_SIZE = 12, 4
PROMPTS = [*make_prompts(4, VOCAB_SIZE, max_length=60), [7, 5, 3, 9, 2] * 10]
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=0)
NUM_SCARCE_BLOCKS, NUM_SCARCE_STATES = 22, 9
"""In so many, requests that run together cannot all keep their blocks; without attention, blocks are states."""
TOLERANCE = 1e-5
"""Of log-probabilities: in plain torch, ops have other bits at other places of a tensor."""

Answers = list[tuple[list[int], list[float]]]


@contextmanager
def make_llm(folder: Path, **settings: Any) -> Iterator[LLM]:
    sizes = {"dtype": "float32", "max_model_len": 128, "block_size": BLOCK_SIZE, "max_num_seqs": 4}
    with llm_of_thread_ranks(folder, **{**sizes, **settings}) as llm:
        try:
            yield llm
        finally:
            core_of(llm).scheduler.check_integrity()


def generate(llm: LLM, prompts: list[list[int]]) -> Answers:
    """Tokens, and their log-probabilities."""
    answers = []
    for output in llm.generate(prompts, GREEDY, use_tqdm=False):
        (one,) = output.outputs
        assert one.logprobs is not None
        answers.append(
            (one.token_ids, [entry[i].logprob for entry, i in zip(one.logprobs, one.token_ids, strict=True)])
        )
    assert llm.get_stats().num_failed_steps == 0
    return answers


def assert_same(found: Answers, expected: Answers) -> None:
    assert [tokens for tokens, _ in found] == [tokens for tokens, _ in expected]
    for (_, logprobs), (_, want) in zip(found, expected, strict=True):
        assert logprobs == pytest.approx(want, abs=TOLERANCE)


@pytest.fixture(scope="module", params=NAMES)
def alone(request: pytest.FixtureRequest, checkpoint: Callable[[str], Path]) -> tuple[Path, Answers]:
    """A checkpoint, and what is generated after each prompt alone, computed at once."""
    folder = checkpoint(request.param)
    with make_llm(folder, enable_prefix_caching=False) as llm:
        return folder, [generate(llm, [prompt])[0] for prompt in PROMPTS]


@pytest.mark.slow
@pytest.mark.parametrize("size", [1, 7, 64])
def test_in_chunks_in_a_batch_and_from_a_cached_prefix(size: int, alone: tuple[Path, Answers]) -> None:
    folder, expected = alone
    with make_llm(folder, long_prefill_token_threshold=size) as llm:
        assert_same(generate(llm, PROMPTS), expected)
        before = llm.get_stats().prefix_cache_hits
        assert_same(generate(llm, PROMPTS[::-1]), expected[::-1])
        assert llm.get_stats().prefix_cache_hits > before
        longer = [*PROMPTS[-1], *expected[-1][0][:8]]
        assert generate(llm, [longer])[0][0][: NUM_TOKENS - 8] == expected[-1][0][8:]


@pytest.mark.slow
def test_preempted_and_replayed(alone: tuple[Path, Answers], monkeypatch: pytest.MonkeyPatch) -> None:
    folder, expected = alone
    num_blocks = 5 if folder.name == "falcon-mamba" else NUM_SCARCE_BLOCKS
    monkeypatch.setattr(UniProcExecutor, "determine_num_blocks", lambda _: num_blocks)
    if folder.name != "falcon-mamba":
        monkeypatch.setattr(KVCacheGroups, "num_states", lambda *_: NUM_SCARCE_STATES)
    with make_llm(folder, max_num_batched_tokens=16) as llm:
        assert_same(generate(llm, PROMPTS * 2), expected * 2)
        assert llm.get_stats().num_preemptions > 0
        core, tokens = core_of(llm), expected[-1][0]
        core.add_request(
            EngineCoreRequest(
                "again", PROMPTS[-1], GREEDY, output_token_ids=tokens[:5], is_replay=True, num_preemptions=1
            )
        )
        replayed: list[int] = []
        while core.has_requests():
            for output in core.step().outputs:
                replayed += output.new_token_ids
        assert replayed == tokens[5:]


class HalfRight:
    """Drafts the next tokens of each prompt's answer, and wrong ones in the place of every third."""

    def __init__(self, answers: list[list[int]]) -> None:
        self.answers = {tuple(prompt): answer for prompt, answer in zip(PROMPTS, answers, strict=True)}

    def propose(self, request: Request, max_tokens: int) -> DraftTokens:
        tokens = list(request.all_token_ids)
        first = len(tokens) - request.num_prompt_tokens
        answer = self.answers[tuple(tokens[: request.num_prompt_tokens])]
        drafts = [(answer[i] + (i % 3 == 2)) % VOCAB_SIZE for i in range(first, min(first + max_tokens, len(answer)))]
        return DraftTokens(len(tokens), drafts, [1.0] * len(drafts))

    def forget(self, request: Request) -> None:
        pass


@pytest.mark.slow
@pytest.mark.parametrize("num_drafts", [1, 5])
def test_rejected_drafts_leave_no_trace(num_drafts: int, alone: tuple[Path, Answers]) -> None:
    folder, expected = alone
    drafting = {"method": "ngram", "num_speculative_tokens": num_drafts}
    with make_llm(folder, speculative_config=drafting) as llm:
        draft_always(core_of(llm).scheduler, HalfRight([tokens for tokens, _ in expected]), VOCAB_SIZE, num_drafts)
        assert_same(generate(llm, PROMPTS), expected)
        assert_same(generate(llm, PROMPTS), expected)
        drafts = llm.get_stats().drafts
    assert drafts is not None
    assert drafts.num_draft_tokens > drafts.num_accepted_tokens > 0


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_the_states_matter(name: str, checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    """Where states decay at once, other tokens follow."""
    folder = tmp_path / name
    folder.mkdir()
    for file in checkpoint(name).iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    with make_llm(folder) as llm:
        before = generate(llm, PROMPTS)
    tensors = load_file(folder / "model.safetensors")
    for tensor_name in tensors:
        if tensor_name.endswith(".A_log"):
            tensors[tensor_name].fill_(12.0)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with make_llm(folder) as llm:
        after = generate(llm, PROMPTS)
    assert [tokens for tokens, _ in before] != [tokens for tokens, _ in after]


def config_of(folder: Path, architecture: str, **fields: Any) -> CheckpointConfig:
    sizes = {"vocab_size": 32, "hidden_size": 64, "intermediate_size": 24, "num_hidden_layers": 2}
    values = {"architectures": [architecture], **sizes, **fields}
    (folder / "config.json").write_text(json.dumps({name: one for name, one in values.items() if one is not None}))
    return CheckpointConfig.from_folder(folder)


LARGE: dict[str, Any] = {"hidden_size": 4096, "num_attention_heads": 32}


@pytest.mark.parametrize(
    ("architecture", "given"),
    [
        ("BambaForCausalLM", LARGE), ("FalconH1ForCausalLM", {**LARGE, "mamba_d_ssm": 1024}),
        ("FalconMambaForCausalLM", {}), ("GraniteMoeHybridForCausalLM", LARGE), ("JambaForCausalLM", LARGE),
        ("Mamba2ForCausalLM", {"hidden_size": 4096}), ("MambaForCausalLM", {}),
        ("NemotronHForCausalLM", {"num_hidden_layers": None}),
    ],
)  # fmt: skip
def test_what_is_missing_is_what_transformers_takes(architecture: str, given: dict[str, Any], tmp_path: Path) -> None:
    """The defaults cover the sizes of a layer's state and the eps of norms."""
    config = config_of(tmp_path, architecture, intermediate_size=None, **given)
    theirs = AutoConfig.for_model(ARCHITECTURES[architecture], **{"hidden_size": 64, **given})
    state = next(layer.state for layer in config.options.layers if layer.state is not None)

    def field(*names: str) -> Any:
        return next(getattr(theirs, name) for name in names if hasattr(theirs, name))

    assert config.rms_norm_eps == field("rms_norm_eps", "layer_norm_epsilon")
    assert config.tie_word_embeddings == theirs.tie_word_embeddings
    if architecture not in ("FalconMambaForCausalLM", "MambaForCausalLM", "Mamba2ForCausalLM"):
        assert (config.num_kv_heads, config.max_position_embeddings) == (
            theirs.num_key_value_heads, theirs.max_position_embeddings,
        )  # fmt: skip
    assert (state.state_size, state.conv_size, state.conv_bias) == (
        field("mamba_d_state", "ssm_state_size", "state_size"), field("mamba_d_conv", "conv_kernel"),
        field("mamba_conv_bias", "use_conv_bias"),
    )  # fmt: skip
    if isinstance(state, SelectiveOptions):
        assert state.dt_rank == field("mamba_dt_rank", "time_step_rank")
        assert state.num_channels == 2 * theirs.hidden_size
    else:
        assert isinstance(state, MambaOptions)
        assert (state.num_heads, state.head_size, state.num_groups) == (
            field("mamba_n_heads", "mamba_num_heads", "num_heads"),
            field("mamba_d_head", "mamba_head_dim", "head_dim"), field("mamba_n_groups", "n_groups"),
        )  # fmt: skip
        assert state.dt_limits == (0.0, math.inf)


HEADS = {"num_attention_heads": 4}
GRANITE = {"mamba_n_heads": 8, "shared_intermediate_size": 8, **HEADS}
FALCON = {"mamba_n_heads": 8, "mamba_d_head": 16, "num_key_value_heads": 2, **HEADS}


@pytest.mark.parametrize(
    ("architecture", "fields", "message"),
    [
        ("GraniteMoeHybridForCausalLM", {**GRANITE, "position_embedding_type": "alibi"},
         "position_embedding_type is 'alibi'; it must be one of rope, nope"),
        ("GraniteMoeHybridForCausalLM", {**GRANITE, "layer_types": ["mamba", "conv"]},
         "layer_types is ['mamba', 'conv']; it must be one of full_attention, attention, linear_attention, mamba for "
         "each of 2 layers"),
        ("GraniteMoeHybridForCausalLM", {**GRANITE, "hidden_act": "gelu"}, "hidden_act is 'gelu'; it must be silu"),
        ("GraniteMoeHybridForCausalLM", {**GRANITE, "mamba_n_heads": 7}, "mamba_n_heads is 7; it must be a divisor of"),
        ("GraniteMoeHybridForCausalLM", {**GRANITE, "mamba_n_groups": 3}, "it must be a divisor of mamba_n_heads=8"),
        ("GraniteMoeForCausalLM", {**HEADS, "num_local_experts": 0}, "num_local_experts is 0; it must be above 0"),
        ("BambaForCausalLM", {**GRANITE, "attn_layer_indices": [2]},
         "attn_layer_indices is [2]; it must be a list of layers' numbers, below 2"),
        ("FalconH1ForCausalLM", {**FALCON, "ssm_multipliers": [1.0]},
         "ssm_multipliers is [1.0]; it must be a list of 5 finite numbers above 0"),
        ("FalconH1ForCausalLM", {**FALCON, "attention_in_multiplier": 2, "attention_bias": True},
         "attention_bias is True; it must be false, as attention_in_multiplier is 2.0"),
        ("FalconH1ForCausalLM", {**FALCON, "time_step_limit": [0.1, 0]},
         "time_step_limit is [0.1, 0]; it must be two numbers from 0 on, the lower first"),
        ("JambaForCausalLM", {**HEADS, "attn_layer_period": 2, "attn_layer_offset": 2},
         "attn_layer_offset is 2; it must be an integer from 0 to 1"),
        ("MambaForCausalLM", {"conv_kernel": 1}, "conv_kernel is 1; it must be an integer from 2"),
        ("NemotronHForCausalLM", {"hybrid_override_pattern": "MX"},
         "hybrid_override_pattern is 'MX'; it must be one of M, *, -, E for each layer"),
        ("NemotronHForCausalLM", {"n_group": 3}, "n_group is 3; it must be a divisor of n_routed_experts=8"),
        ("NemotronHForCausalLM", {"moe_latent_size": 8, "mlp_bias": True},
         "mlp_bias is True; it must be false, as moe_latent_size is given"),
        ("NemotronHForCausalLM", {"n_shared_experts": 2}, "n_shared_experts is 2; it must be an integer from 1 to 1"),
    ],
)  # fmt: skip
def test_what_cannot_be_served_is_refused(
    architecture: str, fields: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(CheckpointError) as refused:
        config_of(tmp_path, architecture, **fields)
    assert message in str(refused.value)


@pytest.mark.parametrize(
    ("name", "ranks", "message"),
    [
        ("falcon-mamba", 7, "the number of Mamba's channels, 96, is no multiple of it"),
        ("mamba2", 3, "the number of Mamba's groups, 2, is neither a multiple nor a divisor of it"),
        ("mamba2", 4, "the number of Mamba's heads, 6, is no multiple of it; .* it must be 1 or 2$"),
        ("granite-hybrid", 2, None),
        ("falcon-mamba", 2, None),
    ],
)
def test_how_states_can_be_divided(
    name: str, ranks: int, message: str | None, checkpoint: Callable[[str], Path]
) -> None:
    config = CheckpointConfig.from_folder(checkpoint(name))
    if message is None:
        config.check_parallel(ranks)
        return
    with pytest.raises(ValueError, match=message):
        config.check_parallel(ranks)


def test_a_model_without_attention_has_any_length(checkpoint: Callable[[str], Path]) -> None:
    for name, longest in (("mamba", MAX_POSITIONS), ("jamba", 512)):
        assert CheckpointConfig.from_folder(checkpoint(name)).longest_model_len == longest
    with make_llm(checkpoint("mamba"), max_model_len=1000) as llm:
        assert core_of(llm).ready.max_model_len == 1000


@pytest.mark.parametrize(
    "name", ["granite-hybrid-dense", "nemotron-h-latent", "falcon-h1-norm", "lfm3-plain", "zamba2-plain"]
)
def test_what_else_these_families_have(name: str, checkpoint: Callable[[str], Path]) -> None:
    """No experts and rotated attention; experts of latent vectors; a norm with the gate, and biases; no gates and no
    norms of outputs; one shared block, with biases, and without products of attention."""
    folder = checkpoint(name)
    model = load_reference(folder)
    expected = [generate_greedily(model, prompt, NUM_TOKENS) for prompt in PROMPTS[:3]]
    for settings in ({}, {"tensor_parallel_size": 2}):
        with make_llm(folder, **settings) as llm:
            answers = generate(llm, PROMPTS[:3])
        for (tokens, logprobs), want in zip(answers, expected, strict=True):
            assert tokens == want.token_ids
            assert logprobs == pytest.approx(want.logprobs, abs=1e-4)


@pytest.mark.parametrize(
    ("name", "now", "before"),
    [
        ("mamba", "backbone.embeddings.", "backbone.embedding."),
        ("granite-hybrid", ".block_sparse_moe.input_linear.", ".block_sparse_moe.input_linear."),
        ("nemotron-h", "backbone.layers.3.mixer.experts.0.up_proj.", "backbone.layers.3.mixer.experts.0.up_proj."),
    ],
)
def test_names_of_the_tensors_in_published_checkpoints(
    name: str, now: str, before: str, checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    """Those that transformers writes too, and others that it reads; layers of multi-token prediction are skipped."""
    for file in checkpoint(name).iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    tensors = load_file(tmp_path / "model.safetensors")
    assert any(now in one for one in tensors)
    tensors = {one.replace(now, before): tensor for one, tensor in tensors.items()}
    if name == "nemotron-h":
        tensors["mtp.layers.0.norm.weight"] = torch.ones(4)
    save_file(tensors, tmp_path / "model.safetensors")
    check_checkpoint(tmp_path)
