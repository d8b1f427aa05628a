# SPDX-License-Identifier: Apache-2.0
"""The published helpers of stochastic rounding (flashinfer/mamba/conversion.cuh), against exact arithmetic."""

from __future__ import annotations

import math

import pytest
import torch

from ..emulation.build import Library, compile_emulated

COUNT = 3000


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Library:
    return compile_emulated("emulated_conversion.cpp", tmp_path_factory)


def philox(seed: int, offset: int, rounds: int) -> list[int]:
    """Philox-4x32 as its authors describe it, on Python's integers."""
    low = (1 << 32) - 1
    c0, c1, c2, c3 = offset & low, offset >> 32 & low, 0, 0
    k0, k1 = seed & low, seed >> 32 & low
    for _ in range(rounds):
        a, b = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = b >> 32 ^ c1 ^ k0, b & low, a >> 32 ^ c3 ^ k1, a & low
        k0, k1 = k0 + 0x9E3779B9 & low, k1 + 0xBB67AE85 & low
    return [c0, c1, c2, c3]


def unsigned(x: torch.Tensor) -> list[int]:
    return [value & 0xFFFFFFFF for value in x.tolist()]


def test_random_words(library):
    """The known answer of the authors for zeros, and others with words above 32 bits."""
    seeds, offsets = [0, 1, 1 << 40, -1, 12345], [0, 7, 1 << 33, 99, (1 << 62) + 5]
    given = torch.tensor(seeds), torch.tensor(offsets)
    words, first = torch.zeros(len(seeds), 4, dtype=torch.int32), torch.zeros(len(seeds), 2, dtype=torch.int32)
    library.call("philox", len(seeds), *(x.data_ptr() for x in (*given, words, first)))
    assert unsigned(words[0]) == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    for i, (seed, offset) in enumerate(zip(seeds, offsets, strict=True)):
        assert unsigned(words[i]) == philox(seed, offset, 10)
        assert unsigned(first[i]) == [philox(seed, offset, 10)[0], philox(seed, offset, 7)[0]]


def numbers(count: int, most: float, generator: torch.Generator) -> torch.Tensor:
    """Numbers of all magnitudes up to beyond ``most``, and those at the edges."""
    x = torch.randn(count, generator=generator) * 2.0 ** torch.randint(-30, int(math.log2(most)) + 2, (count,))
    edges = [0.0, -0.0, most, -most, most * 1.01, 2.0**-14, 2.0**-14 * 0.999, 2.0**-6, 2.0**-9, 1e30]
    x[: len(edges)] = torch.tensor(edges)
    x[-3:] = torch.tensor([math.inf, -math.inf, math.nan])
    return x


def words(count: int, generator: torch.Generator) -> torch.Tensor:
    return torch.randint(-(1 << 31), (1 << 31) - 1, (count,), generator=generator).to(torch.int32)


def stepped(x: float, random: int, bits: int, least: int, mantissa: int) -> float:
    """Round |x| to steps of a format: down after ``random`` / 2 ** ``bits`` of a step has been added."""
    step = 2.0 ** (max(math.frexp(x)[1] - 1, least) - mantissa)
    return math.copysign(math.floor(abs(x) / step + random / 2.0**bits) * step, x)


def expected_half(x: float, random: int) -> float:
    if not math.isfinite(x):
        return x
    y = stepped(x, random & 0x1FFF, 13, -126, 10) if x else x
    return math.copysign(0.0, x) if abs(y) < 2.0**-14 else math.copysign(math.inf, x) if abs(y) >= 65536 else y


def expected_e4m3(x: float, random: int) -> float:
    if math.isnan(x):
        return x
    y = stepped(x, random & 0xFFFF, 16, -6, 3) if x and abs(x) < 448 else math.copysign(min(abs(x), 448.0), x)
    return math.copysign(min(abs(y), 448.0), x)


def same(got: torch.Tensor, expected: list[float]) -> None:
    torch.testing.assert_close(
        got.double(), torch.tensor(expected, dtype=torch.float64), rtol=0, atol=0, equal_nan=True
    )


def test_halves(library):
    generator = torch.Generator().manual_seed(3)
    x, bits = numbers(2 * COUNT, 65504.0, generator), words(COUNT, generator)
    one, two = torch.zeros(COUNT, dtype=torch.float16), torch.zeros(COUNT, dtype=torch.int32)
    library.call("halves", COUNT, *(t.data_ptr() for t in (x, bits, one, two)))
    pairs = two.view(torch.float16).view(COUNT, 2)
    first, second, random = x[::2].tolist(), x[1::2].tolist(), unsigned(bits)
    low = [expected_half(value, r) for value, r in zip(first, random, strict=True)]
    same(one, low)
    same(pairs[:, 0], low)
    same(pairs[:, 1], [expected_half(value, r >> 16) for value, r in zip(second, random, strict=True)])


def test_e4m3(library):
    generator = torch.Generator().manual_seed(4)
    x, bits = numbers(4 * COUNT, 448.0, generator), words(COUNT, generator)
    four = torch.zeros(COUNT, dtype=torch.int32)
    library.call("e4m3", COUNT, *(t.data_ptr() for t in (x, bits, four)))
    got = four.view(torch.uint8).view(torch.float8_e4m3fn).float().view(COUNT, 4)
    for i, select in enumerate(
        (lambda r: r, lambda r: int(f"{r & 0xFFFF:016b}"[::-1], 2), lambda r: r >> 16,
         lambda r: int(f"{r >> 16:016b}"[::-1], 2))
    ):  # fmt: skip
        random = [select(r) for r in unsigned(bits)]
        same(got[:, i], [expected_e4m3(value, r) for value, r in zip(x[i::4].tolist(), random, strict=True)])
