# SPDX-License-Identifier: Apache-2.0
"""The general CUDA GEMM kernel, run on the CPU: all kernels, without a GPU.

The kernel headers are compiled by the host compiler against an emulated device (``tests/emulation``). Copies arrive
late, threads run in random order and memory starts as NaN, so that index errors and missing barriers show as wrong
results.
"""

from __future__ import annotations

import ctypes

import pytest
import torch

from ..emulation.build import Library, compile_emulated

BATCHED, CONTIGUOUS, MASKED, PACKED = range(4)
CHUNKS, COLUMNS, ANY = range(3)
SMALL, NARROW, MEDIUM, LARGE = range(4)
F32, F16, BF16, E4M3, E5M2 = ELEMENTS = (
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
)


@pytest.fixture(scope="module")
def library(tmp_path_factory) -> Library:
    """Compile the kernels for SM80."""
    return compile_emulated("emulated_gemm.cpp", tmp_path_factory, arch=800)


def matrix(x: torch.Tensor) -> list[int]:
    return [x.data_ptr(), ELEMENTS.index(x.dtype), x.stride(0) if x.ndim == 3 else 0, x.stride(-2), x.stride(-1)]


def scale(x: torch.Tensor | None, rows: int, depth: int) -> list[int]:
    if x is None:
        return [0, 0, 0, 0, 1, 1]
    if x.numel() == 1:
        return [x.data_ptr(), 0, 0, 0, rows, depth]
    return [x.data_ptr(), x.stride(0) if x.ndim == 3 else 0, x.stride(-2), x.stride(-1), rows, depth]


def run(library, out, a, b, *, a_scale=None, b_scale=None, bias=None, groups=None, weights=None, grouping=BATCHED,
        granularity=(1, 128, 128), alpha=1.0, beta=0.0) -> tuple[int, int]:  # fmt: skip
    """Compute into ``out`` and return loads and tile of the kernel that did it."""
    (gm, gn, gk), batch = granularity, b.shape[0] if b.ndim == 3 else 1
    if grouping == PACKED:
        batch = len(groups) - 1
    fields = [*matrix(a), *matrix(b), *matrix(out), *scale(a_scale, gm, gk), *scale(b_scale, gn, gk)]
    fields += [0 if bias is None else bias.data_ptr(), ELEMENTS.index(BF16 if bias is None else bias.dtype)]
    fields += [a.shape[-2], b.shape[-2], a.shape[-1], batch, grouping]
    fields += [*(0 if x is None else x.data_ptr() for x in (groups, weights)), b.shape[0]]
    packed = (ctypes.c_int64 * len(fields))(*fields)
    code = library.call("gemm", ctypes.addressof(packed), alpha, beta)
    assert code < 100, f"status {code // 100}"
    return code // 10, code % 10


def numbers(*shape: int, dtype: torch.dtype) -> torch.Tensor:
    """Return random numbers of a dtype."""
    return torch.randn(*shape).to(dtype)


def close(out: torch.Tensor, expected: torch.Tensor, size: torch.Tensor) -> None:
    """Compare with the fp64 result; ``size`` is the sum of the magnitudes of what is added."""
    rounding = {F32: 2**-24, F16: 2**-11, BF16: 2**-8}[out.dtype]
    error = (out.double() - expected).abs()
    assert bool((error <= rounding * expected.abs() + 2**-21 * size).all()), error.max()  # also false for NaN


def product(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the exact product, and that of the magnitudes."""
    a, b = a.double(), b.double().mT
    return a @ b, a.abs() @ b.abs()


#: dtypes, m, n, k, and the kernel: every one that serves batches without block scales.
DENSE = [
    (F16, F16, 5, 40, 136, (CHUNKS, SMALL)),
    (F16, F16, 64, 40, 600, (CHUNKS, NARROW)),
    (BF16, BF16, 66, 40, 328, (CHUNKS, MEDIUM)),
    (F16, F16, 140, 136, 200, (CHUNKS, LARGE)),
    (E4M3, E4M3, 17, 35, 1808, (CHUNKS, SMALL)),
    (E4M3, E4M3, 40, 33, 1296, (CHUNKS, NARROW)),
    (E5M2, E4M3, 50, 65, 208, (CHUNKS, MEDIUM)),
    (E4M3, E5M2, 130, 136, 144, (CHUNKS, LARGE)),
    (BF16, BF16, 3, 7, 91, (ANY, SMALL)),
    (F16, F16, 65, 70, 99, (ANY, MEDIUM)),
    (E4M3, E4M3, 2, 33, 77, (ANY, SMALL)),
    (E5M2, E5M2, 40, 33, 150, (ANY, MEDIUM)),
    (F32, F32, 70, 65, 75, (ANY, MEDIUM)),
]


@pytest.mark.parametrize("a_type, b_type, m, n, k, kernel", DENSE)
def test_dense(library, a_type, b_type, m, n, k, kernel):
    a, b, out = numbers(m, k, dtype=a_type), numbers(n, k, dtype=b_type), torch.full((m, n), torch.nan)
    assert run(library, out, a, b) == kernel
    close(out, *product(a, b))


@pytest.mark.parametrize("m, n, size", [(9, 40, SMALL), (40, 40, NARROW), (40, 72, MEDIUM), (150, 136, LARGE)])
def test_weights_by_columns(library, m, n, size):
    """Read a row-major (k, n) matrix; K ends inside of a step."""
    a, b, out = numbers(m, 152, dtype=BF16), numbers(152, n, dtype=BF16).mT, torch.full((m, n), torch.nan)
    assert run(library, out, a, b) == (COLUMNS, size)
    close(out, *product(a, b))


def strided(x: torch.Tensor, how: str) -> torch.Tensor:
    """Return the same numbers with other strides or another alignment."""
    *batch, rows, columns = x.shape
    if how == "columns":
        return x.mT.contiguous().mT
    if how == "every second":
        return torch.stack((x, x), -1).flatten(-2)[..., ::2]
    if how == "unaligned":
        return torch.cat((x.flatten()[:1], x.flatten()))[1:].view(x.shape)
    assert how == "wide rows"  # a multiple of 16 bytes
    return torch.cat((x, x.new_zeros(*batch, rows, 32 - columns % 16)), -1)[..., :columns]


@pytest.mark.parametrize("dtype", [F32, BF16, E4M3])
@pytest.mark.parametrize("a_form, b_form", [("wide rows", "columns"), ("columns", "unaligned"), ("every second",) * 2])
def test_any_strides(library, dtype, a_form, b_form):
    a, b = strided(numbers(2, 37, 67, dtype=dtype), a_form), strided(numbers(2, 70, 67, dtype=dtype), b_form)
    out = torch.full((2, 70, 37), torch.nan).mT  # neighbours in memory are rows
    assert run(library, out, a, b) == (ANY, MEDIUM)
    close(out, *product(a, b))


def dequantized(x: torch.Tensor, scale: torch.Tensor, rows: int, depth: int) -> torch.Tensor:
    """Multiply by the scales of blocks."""
    scale = scale.repeat_interleave(rows, -2)[..., : x.shape[-2], :]
    return x.double() * scale.repeat_interleave(depth, -1)[..., : x.shape[-1]]


#: dtype, m, n, k, granularity, kernel: steps of one block, blocks of several steps, blocks that end inside of steps.
SCALED = [
    (E4M3, 20, 40, 300, (1, 128, 128), (ANY, SMALL)),  # K ends inside of a chunk
    (E4M3, 20, 40, 304, (1, 128, 128), (CHUNKS, SMALL)),
    (E4M3, 40, 40, 400, (1, 1, 128), (CHUNKS, NARROW)),
    (E4M3, 40, 72, 400, (1, 1, 128), (CHUNKS, MEDIUM)),
    (E5M2, 140, 130, 400, (128, 128, 256), (CHUNKS, LARGE)),
    (E4M3, 70, 65, 208, (3, 5, 48), (CHUNKS, MEDIUM)),
    (E4M3, 50, 40, 100, (1, 16, 20), (ANY, MEDIUM)),
    (E4M3, 5, 40, 100, (2, 64, 7), (ANY, SMALL)),
    (BF16, 70, 40, 200, (1, 32, 64), (ANY, MEDIUM)),
    (F32, 40, 70, 50, (2, 1, 16), (ANY, MEDIUM)),
]


@pytest.mark.parametrize("dtype, m, n, k, granularity, kernel", SCALED)
def test_block_scales(library, dtype, m, n, k, granularity, kernel):
    gm, gn, gk = granularity
    a, b = numbers(m, k, dtype=dtype), numbers(n, k, dtype=dtype)
    a_scale, b_scale = torch.rand(-(-k // gk), -(-m // gm)).mT + 0.5, torch.rand(-(-n // gn), -(-k // gk)) + 0.5
    out = torch.full((m, n), torch.nan)
    assert run(library, out, a, b, a_scale=a_scale, b_scale=b_scale, granularity=granularity) == kernel
    close(out, *product(dequantized(a, a_scale, gm, gk), dequantized(b, b_scale, gn, gk)))


def test_a_tensor_scale_beside_block_scales(library):
    a, b = numbers(6, 256, dtype=E4M3), numbers(40, 256, dtype=E4M3)
    a_scale, b_scale, out = torch.tensor([0.25]), torch.rand(40, 2), torch.full((6, 40), torch.nan)
    run(library, out, a, b, a_scale=a_scale, b_scale=b_scale, granularity=(1, 1, 128))
    close(out, *product(a.double() * 0.25, dequantized(b, b_scale, 1, 128)))


@pytest.mark.parametrize("out_type", [F32, F16, BF16])
@pytest.mark.parametrize("n", [40, 43])  # in vectors, and one by one
def test_epilogue(library, out_type, n):
    """alpha, tensor scales, beta and bias; a result that is not wide stays inside of its rows."""
    a, b, bias = numbers(18, 64, dtype=E4M3), numbers(n, 64, dtype=E5M2), numbers(n, dtype=BF16)
    a_scale, b_scale = torch.tensor([0.5]), torch.tensor([1.25])
    whole = torch.randn(18, 64).to(out_type)
    before = whole.clone()
    run(library, whole[:, :n], a, b, a_scale=a_scale, b_scale=b_scale, bias=bias, alpha=-1.5, beta=0.75)
    expected, size = product(a.double() * 0.5, b.double() * 1.25)
    old = 0.75 * before[:, :n].double()
    close(whole[:, :n], -1.5 * expected + old + bias.double(), 1.5 * size + old.abs() + bias.double().abs())
    assert torch.equal(whole[:, n:], before[:, n:])


def test_no_k(library):
    """A product over nothing is beta d + bias."""
    out, bias = torch.ones(3, 40), torch.arange(40.0)
    run(library, out, torch.empty(3, 0), torch.empty(40, 0), bias=bias, beta=2.0)
    assert torch.equal(out, (bias + 2).expand(3, 40))


def test_every_fp8_code(library):
    """Multiply each code by one: NaN and infinity are kept, subnormal numbers are exact."""
    codes = torch.arange(256, dtype=torch.uint8)
    for dtype in (E4M3, E5M2):
        a = torch.zeros(256, 16, dtype=torch.uint8)
        a[:, 3] = codes
        b = torch.zeros(1, 16).to(E4M3)
        b[0, 3] = 1.0
        out = torch.empty(256, 1)
        run(library, out, a.view(dtype), b)
        assert torch.equal(out[:, 0].nan_to_num(1e9, 2e9, 3e9), codes.view(dtype).float().nan_to_num(1e9, 2e9, 3e9))


@pytest.mark.parametrize("dtype", [BF16, E4M3])
@pytest.mark.parametrize("m, n, size", [(40, 68, MEDIUM), (12, 34, SMALL)])
def test_operands_by_columns(library, dtype, m, n, size):
    """Rows that are neighbours in memory are loaded in words; the last ones do not fill a word."""
    a, b = numbers(150, m, dtype=dtype)[:, : m - 1].mT, numbers(150, n + 4, dtype=dtype)[:, : n - 1].mT
    out = torch.full((m - 1, n - 1), torch.nan)
    assert run(library, out, a, b) == (ANY, size)
    close(out, *product(a, b))


@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("mean, size", [(4, SMALL), (50, MEDIUM), (70, LARGE)])
def test_packed(library, scaled, mean, size):
    """Groups of any number of rows, empty ones too; more of them than lanes of a warp; matrices in any order."""
    groups = 40 if size == SMALL else 3
    lengths = torch.randint(0, 2 * mean, (groups,)) if size == SMALL else torch.tensor([mean + 30, 0, 2 * mean - 30])
    indptr = torch.cat((torch.zeros(1), lengths.cumsum(0))).int()
    m, weights = int(indptr[-1]) + 5, torch.randint(0, 4, (groups,)).int()
    a, b, out = numbers(m, 128, dtype=E4M3), numbers(4, 136, 128, dtype=E4M3), torch.full((m, 136), 7.0)
    a_scale = torch.rand(m, 1) if scaled else None
    b_scale = torch.rand(4, 2, 1) if scaled else None
    used = run(library, out, a, b, a_scale=a_scale, b_scale=b_scale, groups=indptr, weights=weights, grouping=PACKED)
    assert used == (CHUNKS, size)
    if scaled:
        a, b = dequantized(a, a_scale, 1, 128), dequantized(b, b_scale, 128, 128)
    for group in range(groups):
        rows = slice(int(indptr[group]), int(indptr[group + 1]))
        close(out[rows], *product(a[rows], b[weights[group]]))
    assert bool((out[m - 5 :] == 7).all())


def test_masked(library):
    counts = torch.tensor([0, 33, 70, 1, 64], dtype=torch.int32)
    a, b = numbers(5, 70, 72, dtype=F16), numbers(5, 65, 72, dtype=F16)
    out = torch.full((5, 70, 65), 7.0)
    assert run(library, out, a, b, groups=counts, grouping=MASKED) == (CHUNKS, MEDIUM)
    for group, count in enumerate(counts.tolist()):
        close(out[group, :count], *product(a[group, :count], b[group]))
        assert bool((out[group, count:] == 7).all())


@pytest.mark.parametrize("n, size", [(40, MEDIUM), (136, LARGE)])
def test_contiguous(library, n, size):
    """Blocks of 128 rows; one has no group, and the last rows of another have none."""
    rows = torch.tensor([2, -1, 0]).repeat_interleave(128)[:300].int()
    rows[100:128] = -1
    a, b, out = numbers(300, 64, dtype=BF16), numbers(3, n, 64, dtype=BF16), torch.full((300, n), 7.0)
    assert run(library, out, a, b, groups=rows, grouping=CONTIGUOUS) == (CHUNKS, size)
    for group in range(3):
        close(out[rows == group], *product(a[rows == group], b[group]))
    assert bool((out[rows < 0] == 7).all())


@pytest.mark.parametrize("bad", [4, -1, 1 << 30])
def test_matrices_that_are_not_there(library, bad):
    """Rows of a group that names no matrix are left alone; the CPU refuses them."""
    indptr, weights = torch.tensor([0, 20, 53, 60]).int(), torch.tensor([1, bad, 2]).int()
    a, b, out = numbers(60, 72, dtype=BF16), numbers(4, 40, 72, dtype=BF16), torch.full((60, 40), 7.0)
    run(library, out, a, b, groups=indptr, weights=weights, grouping=PACKED)
    close(out[:20], *product(a[:20], b[1]))
    close(out[53:], *product(a[53:], b[2]))
    assert bool((out[20:53] == 7).all())
