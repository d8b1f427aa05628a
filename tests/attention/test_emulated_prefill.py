# SPDX-License-Identifier: Apache-2.0
"""The Hopper prefill kernel on the CPU (tests/emulation), against a reference in float64."""

from __future__ import annotations

import pytest
import torch

from .emulated_cases import CAP, CAUSAL, CUSTOM, LENGTHS, Case, compiled


@pytest.fixture(scope="module")
def d128(tmp_path_factory):
    return compiled(tmp_path_factory, (128, 128), "rows", "pages")


@pytest.fixture(scope="module")
def d64(tmp_path_factory):
    """Three consumer warpgroups."""
    return compiled(tmp_path_factory, (64, 64), "rows", "cap")


@pytest.fixture(scope="module")
def d96(tmp_path_factory):
    """The last slab of columns is half empty."""
    return compiled(tmp_path_factory, (96, 96), "rows", "masks")


@pytest.fixture(scope="module")
def d256(tmp_path_factory):
    """Results are staged in the memory of the query; warpgroups take no turns."""
    return compiled(tmp_path_factory, (256, 256), "pages", "masks", "hooks")


@pytest.fixture(scope="module")
def mixed(tmp_path_factory):
    """Requests of few rows are in a decode list, which the first blocks of the launch run before prefill items."""
    return compiled(tmp_path_factory, (128, 128), "pages", "mixed")


@pytest.fixture(scope="module")
def e4m3(tmp_path_factory):
    """Keys and values are converted on the way."""
    return compiled(tmp_path_factory, (128, 128), "rows", "pages", dtypes=(torch.bfloat16, torch.float8_e4m3fn))


@pytest.fixture(scope="module")
def e5m2(tmp_path_factory):
    """Keys and values have different widths; a part of a slab of keys is empty, and steps have 96 keys."""
    return compiled(tmp_path_factory, (176, 128), "rows", dtypes=(torch.float16, torch.float8_e5m2))


@pytest.mark.parametrize("mask_mode", [0, CAUSAL])
def test_ragged(d128, mask_mode):
    case = Case(d128, *LENGTHS, (4, 2), mask_mode=mask_mode)
    case.check()
    assert case.items > 2 * case.blocks  # blocks run several items


@pytest.mark.parametrize("seed", [2, 3])
def test_group_that_does_not_divide_a_tile(d128, seed):
    """Consumers copy the queries."""
    Case(d128, [61, 50], [70, 140], (3, 1), mask_mode=CAUSAL).check(seed=seed)


@pytest.mark.parametrize("window", [0, 100])
def test_window(d128, window):
    Case(d128, [150, 30], [400, 30], (1, 1), mask_mode=CAUSAL, window=window).check()


def test_split_keys(d128):
    """Items write partial states, and the last merge."""
    case = Case(d128, [40, 20], [700, 90], (2, 1), mask_mode=CAUSAL, split=192)
    case.check()
    assert case.items == 4 + 1


@pytest.mark.parametrize("layout", ["NHD", "HND"])
@pytest.mark.parametrize("page_size", [1, 16, 64])
def test_pages(d128, page_size, layout):
    """Pages of one row are copied by cp.async, others by TMA. Rows that were never written are NaN."""
    Case(d128, *LENGTHS, (4, 2), mask_mode=CAUSAL, page_size=page_size, layout=layout).check()


def test_pages_with_gaps(d128):
    Case(d128, [20], [77], (2, 2), page_size=8, gap=3).check()


def test_soft_cap(d64):
    Case(d64, *LENGTHS, (6, 2), mask_mode=CAUSAL).check(soft_cap=CAP)


def test_custom_mask(d96):
    Case(d96, [50, 20], [190, 131], (2, 1), mask_mode=CUSTOM).check()


@pytest.mark.parametrize("page_size", [5, 32])
def test_hooks(d256, page_size):
    Case(d256, [40, 3, 25], [150, 0, 25], (4, 2), mask_mode=CAUSAL, page_size=page_size).check(has_hooks=True)


def test_published_form_of_a_variant(tmp_path_factory):
    """Rows of several heads are in a tile; each has the place that the constructor of its variant reads."""
    kernel = compiled(tmp_path_factory, (64, 64), "pages", "form")
    Case(kernel, *LENGTHS, (6, 2), mask_mode=CAUSAL, page_size=16).check()


def test_e4m3_ragged(e4m3):
    Case(e4m3, *LENGTHS, (4, 2), mask_mode=CAUSAL).check()


@pytest.mark.parametrize("page_size, layout", [(1, "NHD"), (16, "HND")])
def test_e4m3_pages(e4m3, page_size, layout):
    """Items of one step and of several: queries are loaded in turn with the keys that are under way."""
    Case(e4m3, [300, 2, 0, 129], [301, 5, 0, 270], (2, 1), page_size=page_size, layout=layout).check(seed=page_size)


def test_e4m3_queries_of_any_size(e4m3):
    """Products of scores are in fp16: rows of queries beyond its range, and numbers far below the largest of a row."""
    case = Case(e4m3, [70, 40], [90, 130], (3, 1), mask_mode=CAUSAL)
    rows = torch.arange(110)[:, None, None] % 7
    case.q = (case.q.double() * 2.0 ** (16 - 20 * rows)).to(torch.bfloat16)
    case.q[:, :, ::5] *= 2.0**-20
    case.sm_scale *= 2.0**-12
    case.check()


@pytest.mark.parametrize("page_size", [0, 16])
def test_e4m3_numbers_are_exact(e4m3, page_size):
    """The output of one key is its value, for all numbers of the type, subnormal ones included; NaN stays NaN."""
    case = Case(e4m3, [3, 2], [1, 1], (2, 1), page_size=page_size)
    case.values = torch.arange(256, dtype=torch.uint8).view(2, 1, 128).view(torch.float8_e4m3fn)
    o, _ = case.run()
    for rows, value in zip(o.split([3, 2]), case.values, strict=True):
        assert torch.equal(rows.nan_to_num(999), value.to(torch.bfloat16).nan_to_num(999).expand_as(rows))


def test_e5m2(e5m2):
    Case(e5m2, *LENGTHS, (3, 1), mask_mode=CAUSAL).check()


@pytest.mark.parametrize("mask_mode", [0, CAUSAL])
def test_decode_and_prefill_in_one_launch(mixed, mask_mode):
    """Decode tiles of 2 and 16 rows, split and whole, next to prefill tiles; more shares than teams."""
    lengths = [1, 300, 0, 8, 1, 400, 1, 1], [700, 300, 30, 65, 1, 520, 0, 200]
    Case(mixed, *lengths, (4, 2), mask_mode=mask_mode, page_size=16, blocks=4).check(seed=mask_mode)


@pytest.mark.parametrize("page_size", [16, 64])
def test_decode_and_prefill_with_a_window(mixed, page_size):
    """Decode requests that outweigh the prefill; the first items of most blocks are those of tickets."""
    lengths = [*[1] * 9, 520], [*range(100, 1000, 100), 700]
    Case(mixed, *lengths, (2, 1), mask_mode=CAUSAL, page_size=page_size, window=333, blocks=4).check()


def pod(mixed, prompt_keys: int, reading: int, by_head: bool) -> int:
    """Run a prompt of dense keys and requests that decode in one launch, compare both, and return the status."""
    prompt = Case(mixed, [290], [prompt_keys], (4, 2), mask_mode=CAUSAL, blocks=4)
    batch = Case(mixed, [1] * 7, [700, 30, 65, 1, 520, 0, 200], (4, 2), page_size=16, blocks=4)
    (first, *got_first, _kept), (second, *got_second, _held) = prompt.call(), batch.call()
    addresses = first.data_ptr(), second.data_ptr()
    status = prompt.library.call("run_pod", *addresses, reading, int(by_head), prompt.sm_scale)
    if status == 0:
        prompt.compare(*got_first)
        batch.compare(*got_second)
    return status


@pytest.mark.parametrize("reading, by_head, keys", [(1, False, 328), (3, True, 320)])
def test_dense_prompt_beside_decode(mixed, reading, by_head, keys):
    """The keys of the prompt are one page; its items are computed, not listed."""
    assert pod(mixed, keys, reading, by_head) == 0


def test_dense_prompt_of_any_number_of_keys(mixed):
    """Boxes of less than 8 rows do not share a launch."""
    assert pod(mixed, 300, 1, False) > 0
