"""Block hashes: equal exactly when everything that a block's content depends on is equal."""

import pytest
from quire_engine.kv_cache.hashing import NONE_HASH, hash_block_tokens


def chain(token_ids: list[int], block_size: int) -> list[bytes]:
    hashes = [NONE_HASH]
    for start in range(0, len(token_ids), block_size):
        hashes.append(hash_block_tokens(hashes[-1], token_ids[start : start + block_size]))
    return hashes[1:]


def test_hash_is_the_same_in_every_process() -> None:
    # Spelled out, as blocks may be shared between processes and outlive them.
    assert (
        hash_block_tokens(NONE_HASH, [1, 2, 3, 4]).hex()
        == "b2ba0b47882934e2f3284338ceb62ac638f47b44237bb7528af4d0ce79c9eafa"
    )


def test_hash_has_256_bits() -> None:
    assert len(NONE_HASH) == len(hash_block_tokens(NONE_HASH, [1])) == 32


def test_equal_prefixes_have_equal_chains_up_to_the_first_difference() -> None:
    first, second = chain([1, 2, 3, 4, 5, 6], 2), chain([1, 2, 3, 9, 5, 6], 2)
    assert first[0] == second[0]
    assert first[1] != second[1]
    assert first[2] != second[2], "an equal block behind a different prefix must not be equal"


@pytest.mark.parametrize("other", [[4, 3, 2, 1], [1, 2, 3, 4 + 2**32], [1, 2, 3, 5], [0x0201, 0, 3, 4]])
def test_different_tokens_have_different_hashes(other: list[int]) -> None:
    assert hash_block_tokens(NONE_HASH, [1, 2, 3, 4]) != hash_block_tokens(NONE_HASH, other)


def test_extra_keys_tell_equal_tokens_apart() -> None:
    hashes = {hash_block_tokens(NONE_HASH, [1, 2], extra) for extra in (b"", b"lora-1", b"lora-2")}
    assert len(hashes) == 3


def test_tokens_of_a_tuple_and_of_a_list_hash_alike() -> None:
    assert hash_block_tokens(NONE_HASH, (1, 2)) == hash_block_tokens(NONE_HASH, [1, 2])
