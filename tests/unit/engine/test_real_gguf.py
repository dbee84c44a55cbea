"""Real GGUF files: their tokens are transformers', and they answer. They are large: with `QUIRE_SEQUENCES`."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from quire_engine import LLM, SamplingParams
from quire_engine.frontend.tokenizer import load_tokenizer
from quire_engine.models import CheckpointConfig
from support.every_kind import core_of
from support.real_models import gemma3_gguf, smollm2_gguf
from transformers import AutoTokenizer

pytestmark = pytest.mark.skipif("QUIRE_SEQUENCES" not in os.environ, reason="large downloads")
TEXTS = (
    "The quick brown fox, jumped over the lazy dog's back.\n\nIt's 12345 o'clock!  ",
    "    def f(x):\n        return x\n\t\n",
    "日本語のテキスト、中文文本。한국어 텍스트 ",
    "naïve café ☃ 🦉🏳️\u200d🌈👩\u200d👩\u200d👧 ᎣᏏᏲ မြန်မာ ",
    "a  b   c" + " " * 40 + "d",
    "<|im_start|>user\nHi<|im_end|>\n",
    "<start_of_turn>user\nHi<end_of_turn>\n<b>x</b>",
    *("", " ", "x" * 300, "\r\n\t \x00"),
)


@pytest.mark.parametrize("get", [smollm2_gguf, gemma3_gguf])
def test_tokens_are_those_of_transformers(get: Callable[[], Path]) -> None:
    file = get()
    ours, theirs = load_tokenizer(file), AutoTokenizer.from_pretrained(str(file.parent), gguf_file=file.name)
    for text in (*TEXTS, Path(__file__).read_text()):
        ids = theirs.encode(text)
        assert ours.encode(text) == ids
        assert ours.decode(ids) == theirs.decode(ids)
    assert (ours.bos_token, ours.eos_token, ours.chat_template) == (
        theirs.bos_token, theirs.eos_token, theirs.chat_template
    )  # fmt: skip


def test_smollm2_chats_from_its_file() -> None:
    llm = LLM(smollm2_gguf(), max_model_len=512, kv_cache_memory_bytes=2**26, weight_cache_dir="")
    (output,) = llm.chat(
        [{"role": "user", "content": "What is the capital of France?"}],
        SamplingParams(temperature=0, max_tokens=40), use_tqdm=False,
    )  # fmt: skip
    core_of(llm).shutdown()
    assert "Paris" in output.outputs[0].text
    assert output.outputs[0].finish_reason == "stop"


def test_gemma_continues_from_its_file() -> None:
    config = CheckpointConfig.from_folder(gemma3_gguf())
    assert set(config.weight_format.types.values()) == {"Q4_K", "Q5_0", "Q6_K", "Q8_0"}
    llm = LLM(gemma3_gguf(), max_model_len=512, kv_cache_memory_bytes=2**26, weight_cache_dir="")
    (output,) = llm.generate("1, 2, 3, 4, 5,", SamplingParams(temperature=0, max_tokens=8), use_tqdm=False)
    core_of(llm).shutdown()
    assert output.outputs[0].text == " 6, 7, 8"
