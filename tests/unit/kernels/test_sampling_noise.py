"""The counter-based noise in plain torch: the published function, and nothing but its arguments."""

import math

import torch
from quire_kernels.sampling import _gumbel_noise_torch, _philox


def words(seed: int, position: int) -> list[int]:
    result: list[int] = _philox(torch.tensor([seed]), torch.tensor([position]), 1)[0].tolist()
    return result


def test_philox_known_answer() -> None:
    # From the reference implementation's kat_vectors: philox 4x32, 10 rounds, counter 0, key 0.
    assert words(0, 0) == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]


def test_philox_equals_plain_integers() -> None:
    def plain(seed: int, position: int, counter: int) -> list[int]:
        c, key = [counter, position, 0, 0], [seed & 0xFFFFFFFF, seed >> 32 & 0xFFFFFFFF]
        for _ in range(10):
            p0, p1 = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
            c = [p1 >> 32 ^ c[1] ^ key[0], p1 & 0xFFFFFFFF, p0 >> 32 ^ c[3] ^ key[1], p0 & 0xFFFFFFFF]
            key = [key[0] + 0x9E3779B9 & 0xFFFFFFFF, key[1] + 0xBB67AE85 & 0xFFFFFFFF]
        return c

    for seed in (1, 2**32 + 7, 2**64 - 1):
        signed = seed - 2**64 if seed >= 2**63 else seed
        got = _philox(torch.tensor([signed]), torch.tensor([2**31 + 5]), 3)[0].tolist()
        assert got == [word for counter in range(3) for word in plain(seed, 2**31 + 5, counter)]


def test_noise_does_not_depend_on_the_batch() -> None:
    seeds, positions = torch.arange(40) * 977 - 5, torch.arange(40) % 7
    together = _gumbel_noise_torch(seeds, positions, 30011)
    for row in (0, 17, 39):
        alone = _gumbel_noise_torch(seeds[row : row + 1], positions[row : row + 1], 30011)
        assert torch.equal(alone[0], together[row])
    assert torch.equal(_gumbel_noise_torch(seeds[:1], positions[:1], 77)[0], together[0, :77])


def test_noise_is_gumbel() -> None:
    noise = _gumbel_noise_torch(torch.tensor([12345]), torch.tensor([9]), 1_000_000)[0].double()
    assert torch.isfinite(noise).all()
    assert abs(float(noise.mean()) - 0.5772156649) < 0.005
    assert abs(float(noise.var()) - math.pi**2 / 6) < 0.01
