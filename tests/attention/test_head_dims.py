# SPDX-License-Identifier: Apache-2.0
"""Head dimensions that differ for keys and values, with few and many rows, on a GPU: both kernels serve each pair, and
pairs that do not fit into shared memory are refused before anything is compiled."""

from __future__ import annotations

import re

import pytest
import torch

from flashinfer import BatchPrefillWithPagedKVCacheWrapper
from flashinfer._runtime.errors import ArgumentError
from flashinfer.aot import FAMILIES, gen_family_modules, left_out_lines
from flashinfer.jit.attention import gen_batch_mla_module, gen_batch_prefill_module, gen_mla_modules
from flashinfer.jit.context import current_compilation_context
from flashinfer.jit.cpp_ext import module_flags

from .inputs import Batch
from .reference import Attention
from .wrappers import close, workspace

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
#: More chunks of keys than of values and the reverse; powers of two, multiples of 16, beyond 256.
PAIRS = [(448, 256), (320, 256), (512, 128), (288, 64), (256, 192), (256, 448), (192, 128), (64, 256), (80, 48)]


@needs_gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("pair", PAIRS, ids=str)
def test_pairs(pair, dtype):
    qk, vo = pair
    for heads in ((2, 2), (8, 2), (10, 1)):
        for rows in (1, 3, 8, 40):
            batch = Batch([rows] * 2, [65] * 2, *heads, qk, vo, dtype=dtype, device="cuda")
            pages = batch.pages(16)
            wrapper = BatchPrefillWithPagedKVCacheWrapper(workspace("cuda"))
            wrapper.plan(batch.qo_indptr, *pages.table, *heads, qk, 16, head_dim_vo=vo, causal=True, q_data_type=dtype)
            result = wrapper.run(batch.q, batch.cache(pages), return_lse=True)
            close(result, batch.expected(Attention(causal=True)), 2e-3 if dtype == torch.float16 else 2e-2)


@pytest.fixture
def target(request, monkeypatch) -> str:
    monkeypatch.setenv("FLASHINFER_CUDA_ARCH_LIST", request.param)
    monkeypatch.setattr(current_compilation_context, "_known", None)
    return request.param


F16 = (torch.float16,) * 3


@pytest.mark.parametrize(
    "target, pair, limit",
    [
        ("9.0a", (1168, 1168), 232448),
        ("8.0", (896, 896), 166912),
        ("8.0", (1024, 64), 166912),  # only tiles of 128 rows are too large
        ("8.6", (512, 512), 101376),
        ("8.6 9.0a", (1168, 1168), 232448),  # the larger of both
        ("7.5", (320, 256), 65536),
    ],
    indirect=["target"],
)
def test_pairs_that_no_kernel_serves(target, pair, limit):
    text = f"must fit into {limit} bytes of shared memory .* got {pair[0]} and {pair[1]}, which need"
    with pytest.raises(ArgumentError, match=text):
        gen_batch_prefill_module("fa2", *F16, torch.int32, *pair, 0, False, False, False, device="cuda")


@pytest.mark.parametrize("target", ["8.6"], indirect=True)
def test_mla_where_it_does_not_fit(target):
    """Check that a list of default modules, which a warm-up builds, has none that cannot be built."""
    with pytest.raises(ArgumentError, match="got 576 and 512"):
        gen_batch_mla_module("fa2", *F16, torch.int32, 512, 64, False, device="cuda")
    assert not list(gen_mla_modules())


#: Target lists whose smallest block cannot hold the MLA kernels, and the targets that can.
LISTS = {
    "8.9 9.0a": ["90a"],
    "8.0 8.9 9.0a": ["80", "90a"],
    "7.5 8.0 8.9 9.0a 10.0a 11.0a 12.0f": ["80", "90a", "100a", "110a"],
}


@pytest.mark.parametrize("target", LISTS, indirect=True)
def test_mla_is_built_for_the_targets_that_hold_it(target):
    built = {spec.name: [f"{major}{minor}" for major, minor in spec.cuda_targets] for spec in gen_mla_modules()}
    # Two dtypes, with and without Hopper's own instructions; three of sparse attention; three of lists of rows, whose
    # blocks have fewer heads where memory is small.
    assert len(built) == 10
    lists = target.replace(".", "").split()
    for name, targets in built.items():
        is_list, is_hopper = name.startswith("sparse_mla"), name.endswith("fa3")
        assert targets == (lists if is_list else ["90a"] if is_hopper else LISTS[target]), name


@pytest.mark.parametrize("target", ["7.5 8.0 8.9 9.0a 10.0a 11.0a 12.0f"], indirect=True)
def test_list_of_many_targets_builds_every_family(target):
    """Check that each family has modules, and that flags, records and the log agree on what is left out."""
    assert all(any(gen_family_modules(family)) for family in FAMILIES)
    spec = gen_batch_prefill_module("fa2", *F16, torch.int32, 256, 256, 0, False, False, False, device="cuda")
    assert list(spec.left_out) == [(7, "5")]
    assert not any("sm_75" in flag for flag in module_flags(spec).cuda)
    assert any("sm_80" in flag for flag in module_flags(spec).cuda)
    (line,) = left_out_lines([spec])
    assert re.fullmatch(rf"{spec.name} is not built for 7.5: it needs \d+ bytes .*, and 65536 are there", line)


@pytest.mark.parametrize("target", ["9.0a"], indirect=True)
@pytest.mark.parametrize("pair", [*PAIRS, (512, 512), (576, 512)], ids=str)
def test_pairs_that_a_kernel_serves(target, pair):
    assert gen_batch_prefill_module("fa2", *F16, torch.int32, *pair, 0, False, False, False, device="cuda").name


@needs_gpu
def test_plan_refuses_before_a_build():
    batch = Batch([3], [65], 2, 2, 1168, 1168, dtype=torch.float16, device="cuda")
    pages = batch.pages(16)
    wrapper = BatchPrefillWithPagedKVCacheWrapper(workspace("cuda"))
    with pytest.raises(ArgumentError, match="got 1168 and 1168"):
        wrapper.plan(batch.qo_indptr, *pages.table, 2, 2, 1168, 16, q_data_type=torch.float16)
