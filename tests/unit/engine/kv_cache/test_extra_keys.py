"""What keeps equal tokens apart: cache salt, adapter, and what stands behind placeholder tokens."""

import itertools

import pytest
from quire_engine.kv_cache import KVCacheManager
from quire_engine.kv_cache.hashing import PartKey, encode_extra_keys, part_keys
from quire_engine.messages import PromptPart
from quire_engine.sampling_params import SamplingParams
from quire_engine.scheduler.request import Request
from support.scheduling import make_request

BLOCK_SIZE = 4


def request_with(
    *, salt: str | None = None, lora: str | None = None, images: list[PartKey] | None = None, length: int = 13
) -> Request:
    request = make_request(range(length), params=SamplingParams(cache_salt=salt))
    request.lora_id = lora
    request.prompt_parts = [PromptPart(start, number, digest) for digest, start, number in images or []]
    return request


def num_shared(first: Request, second: Request) -> int:
    """How many blocks the second request finds of the first."""
    manager = KVCacheManager(16, BLOCK_SIZE)
    manager.allocate_slots(first, first.num_tokens)
    shared = len(manager.get_computed_blocks(second))
    manager.check_integrity()
    return shared


@pytest.mark.parametrize("keys", [{}, {"salt": "a"}, {"lora": "a"}, {"images": [(b"x" * 32, 5, 3)]}], ids=str)
def test_equal_keys_share(keys: dict[str, object]) -> None:
    assert num_shared(request_with(**keys), request_with(**keys)) == 3  # type: ignore[arg-type]


def test_different_salts_and_adapters_share_nothing() -> None:
    keys: list[dict[str, str]] = [
        {},
        {"salt": "a"},
        {"salt": "b"},
        {"lora": "a"},
        {"lora": "b"},
        {"salt": "a", "lora": "a"},
    ]
    for first, second in itertools.permutations(keys, 2):
        assert num_shared(request_with(**first), request_with(**second)) == 0  # type: ignore[arg-type]


def test_image_parts_the_blocks_from_where_it_begins() -> None:
    plain, cat, dog = request_with(), request_with(images=[(b"cat", 6, 2)]), request_with(images=[(b"dog", 6, 2)])
    assert num_shared(plain, cat) == num_shared(cat, dog) == 1
    moved = request_with(images=[(b"cat", 5, 2)])
    assert num_shared(cat, moved) == 1


def test_image_over_several_blocks_is_in_the_hash_of_each() -> None:
    def overlapped(part: PromptPart) -> list[bool]:
        return [part_keys([part], start, start + BLOCK_SIZE) != [] for start in (0, 4, 8)]

    assert overlapped(PromptPart(3, 6, b"cat")) == [True, True, True]
    assert overlapped(PromptPart(4, 4, b"cat")) == [False, True, False]


def test_nothing_to_tell_apart_is_nothing_to_hash() -> None:
    assert encode_extra_keys() == b""


def test_no_two_different_keys_encode_alike() -> None:
    texts = [None, "", "a", "b", "ab", "L", "S", "aL\x01\0\0\0\0\0\0\0b", "\0" * 8]
    images: list[list[PartKey]] = [
        [],
        [(b"a", 0, 1)],
        [(b"a", -1, 1)],
        [(b"a", 0, 1), (b"b", 1, 1)],
        [(b"ab", 0, 1)],
    ]
    encoded = {encode_extra_keys(*keys) for keys in itertools.product(texts, texts, images)}
    assert len(encoded) == len(texts) ** 2 * len(images)
