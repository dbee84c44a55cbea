"""Text of real tokenizers: streamed, it is what decoding it all at once gives.

`QUIRE_SEQUENCES` says for how many sequences. With it, tokenizers that are large to download are tested as well.
"""

import os
import random
from collections.abc import Iterator
from os.path import commonprefix

import pytest
from quire_engine.frontend.detokenizer import IncrementalDetokenizer
from quire_engine.frontend.tokenizer import TokenDecoder, load_tokenizer
from quire_engine.sampling_params import SamplingParams
from support.real_models import LARGE_DOWNLOADS, REAL_TOKENIZERS, real_tokenizer

NUM_SEQUENCES = int(os.environ.get("QUIRE_SEQUENCES", "300"))
NAMES = [name for name in REAL_TOKENIZERS if "QUIRE_SEQUENCES" in os.environ or name not in LARGE_DOWNLOADS]
TEXTS = (
    "The quick brown fox, jumped over the lazy dog's back.\n\nIt's 12345 o'clock!  ",
    "    def f(x):\n        return x\n\t\n",
    "日本語のテキスト、中文文本。한국어 텍스트 ",
    "naïve café ☃ 🦉🏳️‍🌈👩‍👩‍👧 ᎣᏏᏲ မြန်မာ ",
    "\N{REPLACEMENT CHARACTER}☃\N{REPLACEMENT CHARACTER}\N{REPLACEMENT CHARACTER}🦉 a\N{REPLACEMENT CHARACTER} ",
)


@pytest.fixture(scope="module", params=NAMES)
def tokenizer(request: pytest.FixtureRequest) -> Iterator[object]:
    try:
        yield load_tokenizer(real_tokenizer(request.param))
    except RuntimeError as error:
        pytest.skip(str(error))


def sequences(tokenizer: object, decoder: TokenDecoder, number: int) -> Iterator[list[int]]:
    """Token ids: any, of texts, of pieces of characters, of special tokens, and all of these mixed."""
    rng = random.Random(0)
    size = len(tokenizer)  # type: ignore[arg-type]
    vocabulary = tokenizer.get_vocab()  # type: ignore[attr-defined]
    special = sorted(decoder.special_ids)
    pieces = sorted(decoder.byte_ids) or [token_id for name, token_id in vocabulary.items() if len(name) == 1]
    texts = [tokenizer.encode(text, add_special_tokens=False) for text in TEXTS]  # type: ignore[attr-defined]
    spaces = [vocabulary[name] for name in ("▁", "Ġ", "▁▁", "ĠĠ") if name in vocabulary]
    bytes_of = [tokenizer.encode(c, add_special_tokens=False) for c in "☃🦉é日\ufffdမ"]  # type: ignore[attr-defined]
    for _ in range(number):
        weights = rng.choice([(1, 0, 0, 0, 0, 0), (1, 1, 1, 1, 1, 1), (0, 0, 1, 0, 0, 0), (0, 1, 0, 1, 1, 0),
                              (1, 0, 2, 1, 0, 0), (0, 0, 0, 0, 1, 2), (0, 0, 0, 0, 0, 1)])  # fmt: skip
        token_ids: list[int] = []
        length = rng.randrange(1, 40)
        while len(token_ids) < length:
            match rng.choices(range(6), weights)[0]:
                case 0:
                    token_ids.append(rng.randrange(size))
                case 1:
                    text = rng.choice(texts)
                    start = rng.randrange(len(text) or 1)
                    token_ids += text[start : start + rng.randrange(1, 9)]
                case 2:
                    token_ids.append(rng.choice(pieces))
                case 3:
                    token_ids.append(rng.choice(special or pieces))
                case 4:
                    token_ids.append(rng.choice(spaces or pieces))
                case 5:
                    token_ids += rng.choice(bytes_of)
        yield token_ids[:length]


def test_streamed_text_is_that_of_all_tokens(tokenizer: object) -> None:
    decoder = TokenDecoder(tokenizer)  # type: ignore[arg-type]
    rng = random.Random(1)
    for token_ids in sequences(tokenizer, decoder, NUM_SEQUENCES):
        split = rng.choice([0, rng.randrange(len(token_ids) + 1)])
        prompt, output = token_ids[:split], token_ids[split:]
        skip = rng.random() < 0.5
        detokenizer = IncrementalDetokenizer(
            lambda token_ids, skip=skip: decoder.decode(token_ids, skip),  # type: ignore[misc]
            SamplingParams(),
            prompt,
            byte_ids=decoder.byte_ids,
            skipped_ids=decoder.special_ids if skip else frozenset(),
        )
        streamed, rest = "", output
        while rest:
            size = rng.choice([1, 1, 1, rng.randrange(1, 6)])
            group, rest = rest[:size], rest[size:]
            if len(group) > 1:
                assert detokenizer.extend(group)
            else:
                detokenizer.append(group[0])
            streamed += detokenizer.next_delta(finished=False)
        detokenizer.finish()
        streamed += detokenizer.next_delta(finished=True)
        whole, before = decoder.decode(token_ids, skip), decoder.decode(prompt, skip)
        expected = whole[len(commonprefix([whole, before])) :]  # noqa: RUF071
        assert (streamed, detokenizer.text) == (expected, expected), (prompt, output, skip)
        assert detokenizer.token_ids == output
