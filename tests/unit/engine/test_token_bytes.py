"""The bytes of tokens: together those of the text, for each way in which tokenizers name them."""

import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from quire_engine import LLM, SamplingParams
from quire_engine.frontend.output_processor import OutputProcessor
from quire_engine.frontend.tokenizer import load_tokenizer, token_bytes
from quire_engine.messages import EngineCoreOutput, EngineCoreOutputs, EngineCoreRequest, FinishReason
from quire_engine.outputs import Logprob, RequestOutput
from support.checkpoints import edit_json
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast
from transformers.utils import logging

TINYPY = Path(__file__).parents[3] / "model_repository" / "tinypy" / "1" / "model"
BYTE_LEVEL = load_tokenizer(TINYPY)
SENTENCEPIECE = [
    decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0),
]  # fmt: skip


def tokenizer_of(names: Sequence[str], decoder: decoders.Decoder) -> PreTrainedTokenizerFast:
    backend = Tokenizer(models.WordLevel({name: i for i, name in enumerate(names)}, unk_token=names[0]))
    backend.decoder = decoder
    return PreTrainedTokenizerFast(tokenizer_object=backend)


def test_a_type_that_transformers_does_not_know_brings_no_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    shutil.copytree(TINYPY, tmp_path, dirs_exist_ok=True)
    edit_json(tmp_path / "config.json", model_type="mimo")
    logging.add_handler(caplog.handler)
    try:
        load_tokenizer(tmp_path)
    finally:
        logging.remove_handler(caplog.handler)
    assert not caplog.records


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=40))
def test_the_tokens_of_a_text_have_its_bytes(text: str) -> None:
    own = token_bytes(BYTE_LEVEL)
    assert b"".join(map(own, BYTE_LEVEL.encode(text, add_special_tokens=False))) == text.encode()


@pytest.mark.parametrize(
    ("decoder", "names", "expected"),
    [
        (decoders.Sequence(SENTENCEPIECE), ["▁the", "<0xE6>", "日", "<s>"], [b" the", b"\xe6", "日".encode(), b"<s>"]),
        (decoders.Metaspace(), ["▁the", "<0xE6>", "é"], [b" the", b"<0xE6>", "é".encode()]),
        (decoders.ByteLevel(), ["Ġthe", "æ", "Ĺ", "日 <x>"], [b" the", b"\xe6", b"\x97", "日 <x>".encode()]),
        # Of an unknown decoder: the text that it makes.
        (decoders.BPEDecoder("</w>"), ["the</w>", "日"], [b"the", "日".encode()]),
    ],
    ids=["SentencePiece", "Metaspace", "byte level", "another"],
)
def test_bytes_by_decoder(decoder: decoders.Decoder, names: list[str], expected: list[bytes]) -> None:
    own = token_bytes(tokenizer_of(names, decoder))
    assert [own(i) for i in range(len(names))] == expected
    assert own(len(names)) == b"", "a vocabulary may be larger than the tokenizer's"


# -- log-probabilities ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def llm() -> LLM:
    return LLM(str(TINYPY), kv_cache_memory_bytes=16 << 20)


def own_bytes(entry: Logprob) -> bytes:
    assert entry.decoded_token is not None
    return entry.decoded_token.encode() if entry.token_bytes is None else bytes(entry.token_bytes)


def test_logprobs_have_the_tokens_own_bytes(llm: LLM) -> None:
    """ "日" takes three tokens here, which all have the text of one replacement character."""
    text = "日本 = 'é'"
    params = SamplingParams(structured_outputs={"choice": [text]}, max_tokens=40, logprobs=2, prompt_logprobs=0)
    (output,) = llm.generate(text, params, use_tqdm=False)
    first, *others = [next(iter(entry.values())) if entry else None for entry in output.prompt_logprobs or ()]
    assert first is None
    assert b"".join(own_bytes(entry) for entry in others if entry) == text.encode()[1:]
    completion = output.outputs[0]
    assert completion.text == text
    sampled = [next(iter(entry.values())) for entry in completion.logprobs or ()]
    assert b"".join(map(own_bytes, sampled)).startswith(text.encode())
    assert [entry.token_bytes for entry in sampled[:3]] == [[0xE6], [0x97], [0xA5]]


def test_a_tokens_offset_is_where_its_text_begins(llm: LLM) -> None:
    text = "日本 = 'é'"
    params = SamplingParams(structured_outputs={"choice": [text]}, max_tokens=40, logprobs=1)
    (output,) = llm.generate("x", params, use_tqdm=False)
    position, data = 0, text.encode()
    for entries in output.outputs[0].logprobs or ():
        sampled, *others = entries.values()
        assert sampled.text_offset == len(data[:position].decode(errors="ignore"))
        assert [other.text_offset for other in others] == [None] * len(others)
        position = min(position + len(own_bytes(sampled)), len(data))


@pytest.mark.parametrize("at_once", [1, 9])
def test_offsets_with_byte_fallback(at_once: int) -> None:
    """Such a decoder makes a replacement character of each byte, until the character is whole."""
    names = ["▁a", "<0xE6>", "<0x97>", "<0xA5>", "b", "é"]
    processor = OutputProcessor(tokenizer_of(names, decoders.Sequence(SENTENCEPIECE)))
    params = SamplingParams(logprobs=0, max_tokens=9)
    found: list[RequestOutput] = []
    request = EngineCoreRequest("r", [0], params)
    processor.add_request(request, found.append)
    token_ids = [4, 1, 2, 3, 5, 1, 2, 3, 4]
    for i in range(0, len(token_ids), at_once):
        new = token_ids[i : i + at_once]
        reason = FinishReason.LENGTH if i + at_once >= len(token_ids) else None
        logprobs = [[(token_id, -1.0, 1)] for token_id in new]
        processor.process(EngineCoreOutputs([EngineCoreOutput("r", new, reason, logprobs=logprobs)]))
    assert "".join(output.outputs[0].text for output in found) == "b日é日b"
    entries = [
        entry for output in found for position in output.outputs[0].logprobs or () for entry in position.values()
    ]
    assert [entry.text_offset for entry in entries] == [0, 1, 1, 1, 2, 3, 3, 3, 4]
