"""What every kernel's promise rests on: a row of a product is the same wherever it stands in its matrix."""

import torch
import triton
import triton.language as tl
from quire_kernels.gpu.interpreter import dot

ROWS, INNER, COLUMNS = 128, 64, 64


@triton.jit
def _dot_kernel(a, b, out, M: tl.constexpr, K: tl.constexpr, N: tl.constexpr):
    m_M, k_K, n_N = tl.arange(0, M), tl.arange(0, K), tl.arange(0, N)
    a_MK, b_KN = tl.load(a + m_M[:, None] * K + k_K[None, :]), tl.load(b + k_K[:, None] * N + n_N[None, :])
    out_MN = out + m_M[:, None] * N + n_N[None, :]
    if a.dtype.element_ty == tl.int8:
        tl.store(out_MN, tl.dot(a_MK, b_KN, tl.zeros([M, N], tl.int32), out_dtype=tl.int32))
    else:
        tl.store(out_MN, dot(a_MK, b_KN, tl.zeros([M, N], tl.float32)))


def multiply(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    out = torch.empty(ROWS, COLUMNS, dtype=torch.int32 if a.dtype == torch.int8 else torch.float32, device=a.device)
    _dot_kernel[(1,)](a, b, out, ROWS, INNER, COLUMNS)
    return out


def test_rows_do_not_depend_on_their_place(device: torch.device, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(*shape, generator=generator).to(device, dtype) for shape in ((ROWS, INNER), (INNER, COLUMNS)))
    product = multiply(a, b)
    torch.testing.assert_close(product.double(), a.double() @ b.double(), rtol=1e-5, atol=1e-5)
    for _ in range(4):
        order = torch.randperm(ROWS, generator=generator).to(device)
        assert torch.equal(multiply(a[order], b), product[order])
        repeated = a[order[:1]].repeat(ROWS, 1)
        assert torch.equal(multiply(repeated, b), product[order[:1]].expand(ROWS, -1)), "whatever the other rows are"


def test_sums_of_integers_are_exact(device: torch.device) -> None:
    generator = torch.Generator().manual_seed(0)
    a, b = (
        torch.randint(-128, 128, shape, generator=generator, dtype=torch.int8)
        for shape in ((ROWS, INNER), (INNER, COLUMNS))
    )
    assert torch.equal(multiply(a.to(device), b.to(device)).cpu(), a.int() @ b.int())


def test_products_of_fp8_are_added_in_float32(device: torch.device) -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = ((ROWS, INNER), (INNER, COLUMNS))
    a, b = (torch.randn(*shape, generator=generator).to(device, torch.float8_e4m3fn) for shape in shapes)
    tolerance = 2e-2 if device.type == "cuda" else 1e-5  # few bits within the tensor cores
    torch.testing.assert_close(multiply(a, b).double(), a.double() @ b.double(), rtol=tolerance, atol=tolerance)
