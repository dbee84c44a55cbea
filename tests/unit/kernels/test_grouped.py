"""Weights of 4 and 8 bits in groups, on every instruction set of the machine (see conftest.py), against plain torch."""

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from quire_kernels import (
    GroupedCodes,
    cpu,
    embedding,
    linear,
    pack_experts,
    pack_grouped,
    pack_linear,
    record,
    routed_experts,
    stack_linear,
    topk_softmax,
)
from quire_kernels.activation import activate_and_mul
from support import emulated_instructions
from support.full import pairs

SCALES = ("float16", "bfloat16", "float32", "super")
OFFSETS = ("none", "zeros", "float16", "float32", "super")
#             N    K   group: padding of panels, several blocks of activations, the last of them short, all group sizes
SHAPES = [(70, 288, 32), (64, 512, 16), (33, 256, 128), (100, 576, 64), (5, 16, 16)]
FORMS = pairs(
    (shape, bits, scales, offsets)
    for shape, bits, scales, offsets in itertools.product(SHAPES, ("4", "table", "8"), SCALES, OFFSETS)
    if shape[1] % 256 == 0 or "super" not in (scales, offsets)
)


@pytest.fixture(autouse=True)
def _inference() -> Iterator[None]:
    with torch.inference_mode():
        yield


def make_codes(
    shape: tuple[int, int, int], bits: str = "4", scales: str = "float16", offsets: str = "none"
) -> GroupedCodes:
    (rows, columns, size), generator = shape, torch.Generator().manual_seed(sum(shape))

    def rand(per: int) -> torch.Tensor:
        return torch.rand(rows, columns // per, generator=generator)

    def integers(low: int, high: int) -> torch.Tensor:
        return torch.randint(low, high, (rows, columns // size), generator=generator)

    parts: dict[str, Any] = {}
    for name, kind in (("scales", scales), ("offsets", offsets)):
        if kind == "super":
            parts |= {name: integers(-60, 64).to(torch.int8), f"super_{name}": (rand(256) * 1e-3).half()}
        elif kind == "zeros":
            parts["zeros"] = integers(0, 16).to(torch.uint8)
        elif kind != "none":
            parts[name] = (rand(size) * 0.02).to(getattr(torch, kind))
    if bits == "table":
        parts["table"] = torch.randint(0, 256, (16,), generator=generator).to(torch.uint8)
    codes = torch.randint(0, 256 if bits == "8" else 16, (rows, columns), generator=generator).to(torch.uint8)
    return GroupedCodes(
        codes=codes, bits=8 if bits == "8" else 4, group_size=size, zero=8 if bits == "4" else 128, **parts
    )


def quantized(x_TK: torch.Tensor, bits: int) -> torch.Tensor:
    """Activations as the C++ kernel has them: of 8 or 16 bits, with a scale for each 128 columns; float64."""
    blocks = []
    for block in x_TK.float().split(cpu.ACTIVATION_GROUP, dim=1):
        scale = block.abs().amax(1, keepdim=True).clamp_min(1e-10) / 127
        rounded = (block / scale).round()
        rest = ((block / scale - rounded) * 256).round().clamp(max=127) / 256 if bits == 16 else 0.0
        blocks.append((rounded + rest).double() * scale.double())
    return torch.cat(blocks, dim=1)


def rows_of(columns: int, rows: int = 15, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(rows, columns, generator=torch.Generator().manual_seed(columns)).to(dtype)


@pytest.mark.parametrize(("shape", "bits", "scales", "offsets"), FORMS)
def test_linear_of_every_form(
    shape: tuple[int, int, int], bits: str, scales: str, offsets: str, cpu_kernels: str
) -> None:
    codes, x = make_codes(shape, bits, scales, offsets), rows_of(shape[1])
    bias = torch.linspace(-1, 1, shape[0])
    for activation_bits in (8, 16):
        weight = pack_grouped(codes, bias, dtype=torch.float32, activation_bits=activation_bits)
        out = linear(x, weight)
        given = x.double() if cpu_kernels == "torch" else quantized(x, activation_bits)
        expected = given @ codes.dequantize().double().t() + bias
        error = (out - expected).norm() / expected.norm()
        assert error < 2e-6
        if cpu_kernels != "torch":
            for row in (0, 7, 14):
                assert torch.equal(linear(x[row : row + 1], weight)[0], out[row])


@pytest.mark.parametrize("shape", SHAPES)
def test_codes_may_be_in_pairs(shape: tuple[int, int, int], cpu_kernels: str) -> None:
    codes = make_codes(shape, "4", "float16", "zeros")
    paired = replace(codes, codes=codes.codes[:, ::2] | codes.codes[:, 1::2] << 4, are_paired=True)
    assert paired.shape == codes.shape == shape[:2]
    assert torch.equal(paired.dequantize(), codes.dequantize())
    ours, theirs = (pack_grouped(one, dtype=torch.float32) for one in (paired, codes))
    assert torch.equal(ours.data, theirs.data)


@pytest.mark.parametrize("bits", ["4", "table", "8"])
@pytest.mark.parametrize("rows", [0, 1, 2, 5, 6, 7, 12, 13, 64, 200])
def test_a_row_is_the_same_in_any_batch(rows: int, bits: str, cpu_kernels: str) -> None:
    weight = pack_grouped(make_codes((70, 576, 32), bits, offsets="zeros"), dtype=torch.bfloat16)
    x = rows_of(576, 200, torch.bfloat16)
    tolerance = 1e-2 if cpu_kernels == "torch" else 0
    torch.testing.assert_close(linear(x[:rows], weight), linear(x, weight)[:rows], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("form", FORMS[:: len(FORMS) // 20])
def test_embedding_reads_the_dequantised_rows(form: tuple[Any, str, str, str], cpu_kernels: str) -> None:
    codes, ids = make_codes(*form), torch.tensor([0, form[0][0] - 1, 3])
    expected = codes.dequantize()[ids]
    torch.testing.assert_close(embedding(ids, pack_grouped(codes, dtype=torch.float32)), expected, rtol=1e-6, atol=1e-6)
    rounded = embedding(ids, pack_grouped(codes, dtype=torch.bfloat16))
    torch.testing.assert_close(rounded.float(), expected, rtol=1e-2, atol=1e-4)


def test_gated_and_stacked(cpu_kernels: str) -> None:
    codes, x = make_codes((72, 256, 32), offsets="float16"), rows_of(256)
    whole = linear(x, pack_grouped(codes, dtype=torch.float32))
    gated = linear(x, pack_grouped(codes, dtype=torch.float32, gated=True, activation="gelu_tanh"))
    torch.testing.assert_close(gated, activate_and_mul(whole, "gelu_tanh"), rtol=1e-5, atol=1e-5)
    others = [make_codes((33, 256, 16), "8", "super", "super"), make_codes((40, 256, 128), "table")]
    weights = [pack_grouped(one, dtype=torch.float32) for one in (codes, *others)] + [pack_linear(torch.randn(7, 256))]
    stack = stack_linear(weights)
    expected = torch.cat([linear(x, one) for one in weights], dim=1)
    assert torch.equal(linear(x, stack), expected)
    assert linear(x, stack, torch.bfloat16).dtype == torch.bfloat16
    if cpu_kernels != "torch":
        with record(15) as recording:
            out = linear(x, stack)
        recording.run(4)  # fewer rows than it was recorded with
        assert torch.equal(out[:4], expected[:4])


@pytest.mark.parametrize("kinds", list(itertools.product(["4", "8", "table", "int8", "bfloat16"], repeat=2)), ids=str)
@pytest.mark.parametrize("tokens", [1, 40])
def test_experts_of_two_kinds(tokens: int, kinds: tuple[str, str], cpu_kernels: str) -> None:
    """As the linears of each expert, in C++ bit for bit."""

    def weight(kind: str, expert: int, rows: int, columns: int, **options: Any) -> Any:
        if kind in ("int8", "bfloat16"):
            matrix = torch.randn(rows, columns, generator=torch.Generator().manual_seed(expert)).bfloat16()
            return pack_linear(matrix * 0.1, quantize=kind == "int8", **options)
        codes = make_codes((rows, columns, 32), kind, offsets="float16")
        return pack_grouped(replace(codes, codes=codes.codes.roll(expert, 0)), dtype=torch.bfloat16, **options)

    gate_up = [weight(kinds[0], expert, 192, 288, gated=True) for expert in range(3)]
    down = [weight(kinds[1], expert, 288, 96) for expert in range(3)]
    experts = pack_experts(gate_up, down, torch.arange(3))
    x = rows_of(288, tokens, torch.bfloat16)
    weights, ids = topk_softmax(rows_of(3, tokens), 2, renormalize=False)
    out = routed_experts(x, weights, ids, experts)
    for token in range(tokens):
        expected = torch.zeros(288)
        for share, expert in zip(weights[token], ids[token], strict=True):
            result = linear(linear(x[token : token + 1], gate_up[expert]), down[expert], torch.float32)[0]
            expected = torch.addcmul(expected, share.expand(288), result)
        tolerance = 2e-2 if cpu_kernels == "torch" else 1e-2
        torch.testing.assert_close(
            out[token].float(), expected, rtol=tolerance, atol=tolerance * float(expected.abs().max())
        )
    if cpu_kernels != "torch" and tokens > 1:
        assert torch.equal(routed_experts(x[3:4], weights[3:4], ids[3:4], experts)[0], out[3])


def test_zeros_are_subtracted_before_the_scale_as_awq_and_gptq_do() -> None:
    codes = make_codes((8, 64, 32), scales="float16", offsets="zeros")
    codes = replace(codes, zero=0)
    assert codes.zeros is not None
    values = codes.codes.float() - codes.zeros.float().repeat_interleave(32, 1)
    assert torch.equal(codes.dequantize(), values * codes.scales.float().repeat_interleave(32, 1))


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"bits": 5}, "5 bits"),
        ({"zero": 256}, "zero 256"),
        ({"codes": torch.zeros(8, 256)}, "torch.float32"),
        ({"group_size": 24}, "group_size is 24"),
        ({"group_size": 0}, "group_size is 0"),
        ({"scales": torch.ones(8, 7)}, "scales has shape"),
        ({"scales": torch.ones(8, 8, dtype=torch.int8)}, "super-scales"),
        ({"super_scales": torch.ones(8, 1).half()}, "super-scales"),
        ({"zeros": torch.ones(8, 8, dtype=torch.uint8), "offsets": torch.ones(8, 8)}, "both zeros and offsets"),
        ({"bits": 8, "table": torch.zeros(16, dtype=torch.uint8)}, "a table"),
        ({"table": torch.zeros(8, dtype=torch.uint8)}, "a table"),
    ],
    ids=str,
)
def test_parts_that_do_not_fit_are_rejected(changes: dict[str, Any], said: str) -> None:
    codes = make_codes((8, 256, 32))
    with pytest.raises((TypeError, ValueError), match=said):
        replace(codes, **changes)


@pytest.mark.parametrize(
    ("name", "rows", "shape", "bits"),
    pairs(
        (*instructions, *form)
        for instructions, form in itertools.product(
            [*itertools.product(["amx"], [1, 15, 16, 17, 32, 33, 47, 100]), *itertools.product(["avx_vnni"], [1, 7])],
            [
                *itertools.product([(70, 256, 16), (40, 288, 32), (33, 320, 64), (64, 384, 128)], ("4", "table", "8")),
                *itertools.product([(70, 256, 0), (33, 100, 0), (32, 4, 0)], ("int8",)),
            ],
        )
    ),
)
def test_integers_have_the_same_bits_without_the_instructions(
    shape: tuple[int, int, int], bits: str, name: str, rows: int
) -> None:
    """With tiles that overlap, and columns behind the last whole tile."""
    handle, rest = cpu.library(), emulated_instructions.NEEDED[name]
    if handle is None or not handle.quire_select(rest.encode()):
        pytest.skip(f"this processor has no {rest}")
    x, results = rows_of(shape[1], rows), []
    try:
        for activation_bits in (8, 16):
            if bits == "int8":
                matrix = torch.randn(shape[:2], generator=torch.Generator().manual_seed(shape[1]))
                weight = pack_linear(matrix, quantize=True, activation_bits=activation_bits, gated=shape[0] % 2 == 0)
            else:
                codes = make_codes(shape, bits, "float16", "float32")
                weight = pack_grouped(codes, dtype=torch.float32, activation_bits=activation_bits)
            assert handle.quire_select(rest.encode())
            expected = linear(x, weight)
            is_native = handle.quire_select(name.encode())
            if not is_native and not emulated_instructions.select(handle, name):
                pytest.skip("there is no C compiler for the emulator")
            before = emulated_instructions.count()
            results.append(torch.equal(linear(x, weight), expected))
            has_some = name == "avx_vnni" or (rows * activation_bits >= 16 * 8 and shape[2] != 16)
            assert (emulated_instructions.count() > before) == (has_some and not is_native)
    finally:
        handle.quire_select(str(cpu.status().instruction_set).encode())
    assert results == [True, True]
