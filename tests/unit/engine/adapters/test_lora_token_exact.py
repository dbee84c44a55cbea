"""In float32 and greedy, a request with an adapter says token for token what transformers says with the checkpoint that
the adapter is merged into, whatever the other requests have."""

import random
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from quire_engine import LLM, BeamSearchParams, LoRARequest, SamplingParams
from support.adapters import Adapters, make_adapter, merge_adapter, stack_adapter
from support.oracle import load_reference, make_prompts

NUM_TOKENS = 16
GROUPED = ("deepseek-v3", "kimi-linear")
"""Whose router has no kernel for GPUs."""
MIXTURES = {"mixtral": ["w1", "w3", "w2"], "qwen3-moe": ["gate_proj", "up_proj", "down_proj"]}
"""Projections of experts, down last."""
NAMES = ["one", "", "eight", "stabilized", "", "patterns", "bfloat16", "one"]


def greedy(num_tokens: int = NUM_TOKENS) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=num_tokens, ignore_eos=True, logprobs=0)


def make_llm(adapters: Any, **settings: Any) -> LLM:
    return LLM(
        adapters.base,
        **{"dtype": "float32", "max_model_len": 256, "enable_lora": True, "max_loras": 5, "max_cpu_loras": 8,
           "kv_cache_memory_bytes": 8 << 20, **settings},
    )  # fmt: skip


def prompts_of(number: int) -> list[list[int]]:
    return make_prompts(number, 515, 40, seed=3)


def check(adapters: Any, llm: LLM, names: list[str], prompts: list[list[int]], num_tokens: int = NUM_TOKENS) -> None:
    outputs = llm.generate(
        prompts, greedy(num_tokens), use_tqdm=False, lora_request=[adapters.request(name) for name in names]
    )
    for name in dict.fromkeys(names):
        own = [i for i, one in enumerate(names) if one == name]
        expected = adapters.expected(name, [prompts[i] for i in own], num_tokens)
        for i, want in zip(own, expected, strict=True):
            completion = outputs[i].outputs[0]
            assert completion.token_ids == want.token_ids, (name, outputs[i].error)
            logprobs = [entry[t].logprob for entry, t in zip(completion.logprobs, completion.token_ids, strict=True)]
            assert logprobs == pytest.approx(want.logprobs, abs=2e-4)


@pytest.mark.parametrize(
    "settings", [{}, {"max_loras": 2}, {"max_num_batched_tokens": 16}, {"max_num_seqs": 3}], ids=str
)
def test_five_adapters_and_the_base_in_one_batch(adapters: Any, settings: dict[str, Any]) -> None:
    llm = make_llm(adapters, **settings)
    check(adapters, llm, NAMES, prompts_of(len(NAMES)))
    check(adapters, llm, NAMES[::-1], prompts_of(len(NAMES)))
    llm.shutdown()


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"max_loras": 2, "max_num_batched_tokens": 16},
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}},
        {"async_scheduling": True},
    ],
    ids=str,
)
def test_embeddings_and_heads_of_their_own(adapters: Any, settings: dict[str, Any]) -> None:
    """Of a tied base; the second time with prefixes from the cache."""
    names = [
        "tables",
        "",
        "head",
        "changed-tables",
        "embedding",
        "eight",
        "fewer-tokens",
        "changed-embedding",
        "tables",
    ]
    prompts = [prompt * 2 for prompt in make_prompts(len(names), 509, 40, seed=4)]
    llm = make_llm(adapters, **settings)
    for order in (1, -1):
        check(adapters, llm, names[::order], prompts[::order])
    scored = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
    for name in ("tables", "changed-tables", "fewer-tokens", ""):
        (output,) = llm.generate(prompts[:1], scored, use_tqdm=False, lora_request=adapters.request(name))
        model = load_reference(adapters.merged(name) if name else adapters.base)
        expected = model(torch.tensor(prompts[:1])).logits[0].log_softmax(-1).detach()
        for i, token_id in enumerate(prompts[0][1:]):
            assert output.prompt_logprobs[i + 1][token_id].logprob == pytest.approx(
                float(expected[i, token_id]), abs=2e-4
            )
    llm.shutdown()


@pytest.mark.parametrize("settings", [{}, {"async_scheduling": True}], ids=str)
def test_a_head_that_has_no_allowed_token(adapters: Any, settings: dict[str, Any]) -> None:
    """The request ends with an error that says so. Others are not disturbed."""
    llm, names = make_llm(adapters, **settings), ["", "fewer-tokens", "tables", "fewer-tokens"]
    for temperature in (0, 1):
        limited = SamplingParams(
            temperature=temperature, seed=1, max_tokens=4, ignore_eos=True, allowed_token_ids=[510, 513]
        )
        one_left = SamplingParams(temperature=temperature, max_tokens=4, ignore_eos=True, allowed_token_ids=[508, 513])
        outputs = llm.generate(
            prompts_of(len(names)), [limited, limited, limited, one_left], use_tqdm=False,
            lora_request=[adapters.request(name) for name in names],
        )  # fmt: skip
        for output in (outputs[0], outputs[2]):
            assert output.error is None
            assert {*output.outputs[0].token_ids} <= {510, 513}
        assert outputs[3].outputs[0].token_ids == [508] * 4
        assert outputs[1].error == "allowed_token_ids: no allowed token is left by the other parameters or the adapter"
        assert outputs[1].error_parameter == "allowed_token_ids"
        assert outputs[1].outputs[0].token_ids == []
    llm.shutdown()


@pytest.mark.skipif(torch.cuda.is_available(), reason="cuBLAS has other bits in steps of other lengths")
def test_rows_with_changed_tables_do_not_depend_on_others(adapters: Any) -> None:
    """In bfloat16, of which no kernel takes the odd rank as it is."""
    llm, prompts = make_llm(adapters, dtype="bfloat16"), prompts_of(6)
    names = ["changed-tables", "", "changed-embedding"] * 2
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=3)
    together = llm.generate(prompts, params, use_tqdm=False, lora_request=[adapters.request(name) for name in names])
    for prompt, name, output in zip(prompts, names, together, strict=True):
        llm.reset_prefix_cache()
        (alone,) = llm.generate([prompt], params, use_tqdm=False, lora_request=adapters.request(name))
        assert alone.outputs[0].logprobs == output.outputs[0].logprobs
    llm.shutdown()


def test_tables_of_an_untied_base(checkpoint: Any, tmp_path: Path) -> None:
    base = checkpoint("untied-mha")
    folders = {
        str(i): make_adapter(tmp_path / str(i), base, rank=2, seed=i, tables=tables)
        for i, tables in enumerate((["lm_head"], ["embed_tokens"], ["lm_head", "embed_tokens"]))
    }
    for i, targets in enumerate((["lm_head"], ["embed_tokens", "lm_head"]), 3):
        folders[str(i)] = make_adapter(tmp_path / str(i), base, rank=i, seed=i, targets=targets)
    adapters = Adapters(base, folders, lambda one: merge_adapter(tmp_path / f"merged-{one}", base, folders[one]))
    llm = make_llm(adapters)
    check(adapters, llm, ["0", "", "1", "2", "3", "4"], prompts_of(6), 8)
    llm.shutdown()


@pytest.mark.parametrize(
    ("name", "targets"),
    [
        ("phi3", ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"]),  # fused
        ("qwen2", ["q_proj", "k_proj", "v_proj", "down_proj"]),  # with biases
        ("glm4", ["q_proj", "k_proj", "v_proj", "gate_up_proj"]),  # in another order, of a part of each head
        ("deepseek-v3", ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "o_proj"]),  # in another order
        # Recurrent layers: Mamba-2, fused; Gated DeltaNet, by heads of keys, and with other names; gates of low rank.
        ("mamba2", ["in_proj", "out_proj"]),
        ("qwen3-next", ["in_proj_qkvz", "in_proj_ba", "out_proj"]),
        pytest.param(
            "gemma3n",
            ["q_proj", "k_proj", "gate_proj", "up_proj", "down_proj", "linear_left", "per_layer_input_gate"],
            marks=pytest.mark.slow,
        ),
        pytest.param("olmo-hybrid", ["q_proj", "g_proj", "a_proj", "o_proj"], marks=pytest.mark.slow),
        pytest.param(
            "kimi-linear",
            ["q_proj", "v_proj", "b_proj", "f_a_proj", "f_b_proj", "g_a_proj", "g_b_proj", "o_proj"],
            marks=pytest.mark.slow,
        ),
    ],
)
def test_other_layers(checkpoint: Any, tmp_path: Path, name: str, targets: list[str]) -> None:
    base, folders = checkpoint(name), {}
    for i in range(2):
        folders[str(i)] = make_adapter(tmp_path / str(i), base, rank=5 + 8 * i, targets=targets, seed=i)
    adapters = Adapters(base, folders, lambda one: merge_adapter(tmp_path / f"merged-{one}", base, folders[one]))
    llm = make_llm(adapters, device="cpu" if name in GROUPED else "auto")
    check(adapters, llm, ["0", "", "1"], prompts_of(3), 8)
    llm.shutdown()


@pytest.mark.parametrize(
    ("name", "targets"),
    [
        ("tied-gqa", ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]),
        ("qwen2", ["q_proj", "v_proj", "gate_proj"]),  # with biases
        ("phi3", ["qkv_proj", "gate_up_proj"]),  # fused
        ("qwen3-next", ["in_proj_qkvz", "in_proj_ba", "q_proj"]),  # in another order
        ("mixtral", ["v_proj", "w1", "w2"]),
    ],
)
def test_dora(checkpoint: Any, tmp_path: Path, name: str, targets: list[str]) -> None:
    """Beside LoRA and rows of the base."""
    base, folders = checkpoint(name), {}
    for i, has_norms in enumerate((True, False, True)):
        folders[str(i)] = make_adapter(
            tmp_path / str(i), base, rank=5 + 8 * i, targets=targets, seed=i, use_dora=has_norms
        )
    merged = cache(lambda one: merge_adapter(tmp_path / f"merged-{one}", base, folders[one]))
    adapters = Adapters(base, folders, merged)
    llm = make_llm(adapters, device="cpu")
    names = ["0", "", "1", "2", "0"]
    for order in (1, -1):
        check(adapters, llm, names[::order], prompts_of(5)[::order], 8)
    llm.shutdown()


@pytest.mark.parametrize(("quantization", "num_ranks"), [("int8", 1), ("int4", 1), ("int8", 2)])
def test_dora_of_quantised_layers(adapters: Any, tmp_path: Path, quantization: str, num_ranks: int) -> None:
    """Nearer to the merged model in float32 than the change that it makes."""
    folder = make_adapter(tmp_path / "adapter", adapters.base, rank=8, use_dora=True)
    llm = make_llm(adapters, device="cpu", quantization=quantization, tensor_parallel_size=num_ranks)
    (prompt,) = prompts_of(1)
    params, request = SamplingParams(temperature=0, max_tokens=1, logprobs=20), LoRARequest("dora", 1, str(folder))
    (output,) = llm.generate([prompt], params, use_tqdm=False, lora_request=request)
    merged = merge_adapter(tmp_path / "merged", adapters.base, folder)
    exact, base = (
        load_reference(one)(torch.tensor([prompt])).logits[0, -1].log_softmax(-1).detach()
        for one in (merged, adapters.base)
    )
    found = output.outputs[0].logprobs[0].items()
    distances = [sum(abs(one.logprob - float(to[t])) for t, one in found) / 20 for to in (exact, base)]
    assert distances[0] < 0.4 * distances[1]
    llm.shutdown()


@pytest.fixture(scope="module")
def mixture(checkpoint: Any, made: Any) -> Any:
    """By a mixture's name, adapters of its experts: "stacked" is "all" as PEFT writes it with `target_parameters`."""

    def of(name: str) -> Adapters:
        base, experts = checkpoint(name), MIXTURES[name]
        cases = {
            "all": {"rank": 3, "targets": [*experts, "q_proj"]}, "one": {"rank": 1, "targets": experts[:1]},
            "down": {"rank": 17, "targets": experts[2:]}, "none": {"rank": 8, "targets": ["q_proj", "o_proj"]},
            "pattern": {"rank": 2, "targets": experts, "rank_pattern": {r"experts\.1\.\w+": 40}, "use_rslora": True},
        }  # fmt: skip
        folders = {
            case: made(
                f"{name}-{case}", lambda folder, i=i, own=own: make_adapter(folder, base, seed=i, size=1.5, **own)
            )
            for i, (case, own) in enumerate(cases.items())
        }
        folders["stacked"] = made(f"{name}-stacked", lambda folder: stack_adapter(folder, folders["all"]))

        def merged(case: str) -> Path:
            case = "all" if case == "stacked" else case
            return made(f"{name}-merged-{case}", lambda folder: merge_adapter(folder, base, folders[case]))

        return Adapters(base, folders, merged)

    return of


OF_MIXTURE = ["all", "", "stacked", "one", "none", "", "down", "pattern", "stacked"]


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("mixtral", {}),
        ("mixtral", {"max_loras": 2, "max_num_batched_tokens": 16}),
        ("qwen3-moe", {"async_scheduling": True}),
        ("qwen3-moe", {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}}),
    ],
    ids=str,
)
def test_experts(mixture: Any, name: str, settings: dict[str, Any]) -> None:
    """The second time with prefixes from the cache."""
    adapters, prompts = mixture(name), [prompt * 2 for prompt in prompts_of(len(OF_MIXTURE))]
    llm = make_llm(adapters, device="cpu", **settings)
    for order in (1, -1):
        check(adapters, llm, OF_MIXTURE[::order], prompts[::order], 10)
    llm.shutdown()


def test_rows_beside_adapters_of_experts_keep_their_bits(mixture: Any) -> None:
    adapters, prompts, names = mixture("mixtral"), prompts_of(8), ["all", "", "", "stacked", "none", "", "down", "none"]
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, logprobs=5, prompt_logprobs=2)
    llm = make_llm(adapters, device="cpu", dtype="bfloat16")
    together = llm.generate(prompts, params, use_tqdm=False, lora_request=[adapters.request(name) for name in names])
    for prompt, name, output in zip(prompts, names, together, strict=True):
        llm.reset_prefix_cache()
        (alone,) = llm.generate([prompt], params, use_tqdm=False, lora_request=adapters.request(name))
        assert alone.outputs[0].logprobs == output.outputs[0].logprobs
    llm.shutdown()
    plain = LLM(adapters.base, device="cpu", dtype="bfloat16", max_model_len=256, kv_cache_memory_bytes=8 << 20)
    expected = plain.generate(prompts, params, use_tqdm=False)
    for name, output, want in zip(names, together, expected, strict=True):
        assert (output.outputs[0].logprobs == want.outputs[0].logprobs) == (name == "")


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_quantised_experts_take_adapters(mixture: Any, quantization: str) -> None:
    """The change that an adapter makes of the base's log-probabilities is that of the merged model in float32."""
    adapters, (prompt,) = mixture("mixtral"), prompts_of(1)
    llm = make_llm(adapters, device="cpu", quantization=quantization)
    params = SamplingParams(temperature=0, max_tokens=1, logprobs=20)
    outputs = [
        llm.generate([prompt], params, use_tqdm=False, lora_request=adapters.request(name))[0]
        for name in ("stacked", "all")
    ]
    found = outputs[0].outputs[0].logprobs[0]
    assert found.keys() == outputs[1].outputs[0].logprobs[0].keys()
    exact, base = (
        load_reference(folder)(torch.tensor([prompt])).logits[0, -1].log_softmax(-1).detach()
        for folder in (adapters.merged("all"), adapters.base)
    )
    distances = [sum(abs(one.logprob - float(to[t])) for t, one in found.items()) / 20 for to in (exact, base)]
    assert distances[0] < (0.4 if quantization == "int8" else 0.6) * distances[1]
    llm.shutdown()


@pytest.mark.skipif(torch.cuda.is_available(), reason="cuBLAS has other bits in steps of other lengths")
def test_rows_of_the_base_have_the_bits_of_an_engine_without_adapters(adapters: Any) -> None:
    """Alone, and beside rows with adapters: in steps that are recorded, and in those that are not."""
    prompts, names = prompts_of(8), ["one", "", "", "eight", "", "stabilized", "", ""]
    plain = LLM(adapters.base, dtype="float32", max_model_len=256, kv_cache_memory_bytes=8 << 20)
    params = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=5, prompt_logprobs=2)
    expected = plain.generate(prompts, params, use_tqdm=False)
    llm = make_llm(adapters, max_num_batched_tokens=96)
    for given in (None, [adapters.request(name) for name in names]):
        outputs = llm.generate(prompts, params, use_tqdm=False, lora_request=given)
        for output, want, name in zip(outputs, expected, names, strict=True):
            is_same = output.outputs[0].logprobs == want.outputs[0].logprobs
            assert is_same == (not name or given is None)
            assert (output.prompt_logprobs == want.prompt_logprobs) == is_same or len(output.prompt_token_ids) == 1


@pytest.mark.parametrize(
    "settings",
    [
        {"speculative_config": {"method": "suffix"}},
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3}},
        {"async_scheduling": True},
        {"enable_prefix_caching": False, "kv_cache_memory_bytes": 140_000, "max_num_seqs": 8},
    ],
    ids=str,
)
def test_however_steps_are_made(adapters: Any, settings: dict[str, Any]) -> None:
    llm = make_llm(adapters, **settings)
    prompts = [prompt * 2 for prompt in prompts_of(len(NAMES))]
    check(adapters, llm, NAMES, prompts, 24)
    llm.shutdown()


def test_the_other_ways_to_ask(adapters: Any) -> None:
    """Grammars, beams, embeddings, streams, several sequences, after a sleep: with the adapter as with the merged."""
    (prompt,) = prompts_of(1)
    merged = LLM(adapters.merged("eight"), dtype="float32", max_model_len=256, kv_cache_memory_bytes=8 << 20)
    llm, request = make_llm(adapters), adapters.request("eight")
    beams = BeamSearchParams(beam_width=3, max_tokens=6)
    structured = SamplingParams(temperature=0, max_tokens=12, structured_outputs={"regex": "[0-9]{12}"})
    seeded = SamplingParams(temperature=0.9, seed=7, n=2, max_tokens=10)
    for _ in range(2):
        (found,) = llm.beam_search([prompt], beams, lora_request=request)
        (wanted,) = merged.beam_search([prompt], beams)
        assert [one.tokens for one in found.sequences] == [one.tokens for one in wanted.sequences]
        for params in (structured, seeded):
            (output,) = llm.generate([prompt], params, use_tqdm=False, lora_request=request)
            (want,) = merged.generate([prompt], params, use_tqdm=False)
            assert [one.token_ids for one in output.outputs] == [one.token_ids for one in want.outputs]
        *_, last = llm.stream(prompt, structured, lora_request=request)
        assert last.finished
        llm.sleep(2)
        llm.wake_up()
    (vector,) = llm.encode([prompt], pooling_task="embed", use_tqdm=False, lora_request=request)
    (wanted_vector,) = merged.encode([prompt], pooling_task="embed", use_tqdm=False)
    torch.testing.assert_close(vector.outputs.data, wanted_vector.outputs.data, atol=1e-4, rtol=1e-4)
    (base_vector,) = llm.encode([prompt], pooling_task="embed", use_tqdm=False)
    assert (base_vector.outputs.data - wanted_vector.outputs.data).abs().max() > 1e-2


def test_200_adapters_and_few_places(adapters: Any, tmp_path: Path) -> None:
    """Zipf's traffic: each request has its own adapter's tokens, whatever else was loaded and evicted meanwhile."""
    rng = random.Random(1)
    names = [str(i) for i in range(200)]
    numbers = rng.choices(range(200), [1 / (i + 1) for i in range(200)], k=120)
    used = sorted(set(numbers))
    folders = {
        names[i]: make_adapter(tmp_path / names[i], adapters.base, rank=1 + i % 7, targets=["q_proj", "v_proj"], seed=i)
        for i in used
    }
    llm = make_llm(adapters, max_loras=3, max_cpu_loras=8, max_num_seqs=12)
    requests = [LoRARequest(names[i], i + 1, str(folders[names[i]])) for i in numbers]
    prompts, params = prompts_of(120), greedy(4)
    together = llm.generate(prompts, params, use_tqdm=False, lora_request=requests)
    stats = llm.get_stats().adapters
    assert stats is not None
    assert stats.num_evictions > 10
    alone = make_llm(adapters, max_loras=1)
    for i in rng.sample(range(120), 12):
        (want,) = alone.generate([prompts[i]], params, use_tqdm=False, lora_request=requests[i])
        assert together[i].outputs[0].token_ids == want.outputs[0].token_ids


def test_quantised_layers_take_adapters(adapters: Any) -> None:
    """The base in int8, adapters as they are: nearer to the merged model in float32 than the change that they make."""
    llm = make_llm(adapters, quantization="int8")
    (prompt,) = prompts_of(1)
    params = SamplingParams(temperature=0, max_tokens=1, logprobs=20)
    for name in ("eight", "stabilized"):
        (output,) = llm.generate([prompt], params, use_tqdm=False, lora_request=adapters.request(name))
        (base,) = llm.generate([prompt], params, use_tqdm=False)
        model = load_reference(adapters.merged(name))
        merged = model(torch.tensor([prompt])).logits[0, -1].log_softmax(-1).detach()

        def distance(one: Any, merged: torch.Tensor = merged) -> float:
            return sum(abs(entry.logprob - float(merged[t])) for t, entry in one.outputs[0].logprobs[0].items()) / 20

        assert distance(output) < 0.15 * distance(base)
