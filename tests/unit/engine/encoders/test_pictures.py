"""Images in prompts, against transformers in float32: the same tokens, log-probabilities and expanded prompts."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from quire_engine import LLM, SamplingParams
from quire_engine.encoders.family import find_family
from quire_engine.errors import RequestError
from support.oracle import load_reference
from support.pictures import PICTURES, expand, generate, image_of
from transformers import AutoTokenizer

NUM_TOKENS = 4
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=0)
SIZES = ((40, 90), (28, 28), (130, 61))


@pytest.fixture
def folder(name: str, picture_checkpoint: Callable[[str], Path]) -> Path:
    return picture_checkpoint(name)


@contextmanager
def closing_llm(folder: Path, **settings: Any) -> Iterator[LLM]:
    llm = LLM(folder, **{"dtype": "float32", "max_model_len": 768, "kv_cache_memory_bytes": 2**22, **settings})
    try:
        yield llm
        assert llm.get_stats().num_failed_steps == 0
    finally:
        llm.shutdown()


# Where tokens that are sampled mean something else to transformers once all are computed again, rows are compared.
@pytest.mark.parametrize("name", [name for name, own in PICTURES.items() if not own.get("rows_alone")])
def test_exact(name: str, folder: Path) -> None:
    tokenizer, family = AutoTokenizer.from_pretrained(folder), find_family(folder)
    assert family is not None
    images = [image_of(*size, seed=number) for number, size in enumerate(SIZES)]
    around = PICTURES[name].get("around", "{}")
    placeholder = around.format(tokenizer.convert_ids_to_tokens(family.placeholder_id))
    prompts = [
        ("def f({}):", images[:1]),
        ("{}{} # both\n", images[1:]),
        ("a {} b {} c {} d", images),
        ("no picture", []),
        ("again: {}", images[:1]),
    ]
    with closing_llm(folder) as llm:
        outputs = llm.generate(
            [{"prompt": text.format(*[placeholder] * len(own)), "multi_modal_data": {"image": own}} if own else text
             for text, own in prompts], GREEDY, use_tqdm=False
        )  # fmt: skip
    model = load_reference(folder)
    for output, (text, own) in zip(outputs, prompts, strict=True):
        expanded = text.format(*(around.format(expand(name, folder, image)) for image in own))
        assert output.prompt_token_ids == tokenizer.encode(expanded)
        token_ids, logprobs = generate(folder, output.prompt_token_ids, own, NUM_TOKENS, model, name)
        (completion,) = output.outputs
        assert completion.token_ids == token_ids
        assert completion.logprobs is not None
        found = [entry[i].logprob for entry, i in zip(completion.logprobs, token_ids, strict=True)]
        assert found == pytest.approx(logprobs, abs=1e-4)


@pytest.mark.parametrize("name", ["gemma3"])
def test_rows_that_see_each_other_are_computed_in_one_step(name: str, folder: Path) -> None:
    """With any budget and after any hit in the prefix cache, which may end within an image."""
    placeholder = AutoTokenizer.from_pretrained(folder).convert_ids_to_tokens(find_family(folder).placeholder_id)
    prompt = {
        "prompt": f"def f({placeholder}):\n  a = {placeholder}",
        "multi_modal_data": {"image": [image_of(*size, seed=number) for number, size in enumerate(SIZES[:2])]},
    }
    found = []
    for budget in (512, 5):
        with closing_llm(folder, max_num_batched_tokens=budget, max_num_seqs=2, block_size=16) as llm:
            for _ in range(2):
                outputs = llm.generate([prompt, {**prompt, "prompt": f"# {prompt['prompt']}"}], GREEDY, use_tqdm=False)
                found.append([output.outputs[0].token_ids for output in outputs])
            assert outputs[0].num_cached_tokens
    assert found == [found[0]] * 4
    settings = {"max_num_batched_tokens": 3, "max_num_seqs": 2}
    with closing_llm(folder, **settings) as llm, pytest.raises(RequestError, match="an image has 4 tokens"):
        llm.generate([prompt], GREEDY, use_tqdm=False)
