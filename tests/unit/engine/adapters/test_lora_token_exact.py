"""In float32 and greedy, a request with an adapter says token for token what transformers says with the checkpoint that
the adapter is merged into, whatever the other requests have."""

from typing import Any

import pytest
from quire_engine import LLM, SamplingParams
from support.oracle import make_prompts

NUM_TOKENS = 16
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
