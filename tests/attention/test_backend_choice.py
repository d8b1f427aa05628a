# SPDX-License-Identifier: Apache-2.0
"""Rules that choose the published backend of a call, and the traces of the wrappers."""

from __future__ import annotations

import os
import types

import numpy as np
import pytest
import torch

from flashinfer import (
    BatchAttentionWithAttentionSinkWrapper,
    BatchDecodeWithPagedKVCacheWrapper,
    BatchPrefillWithPagedKVCacheWrapper,
    BatchPrefillWithRaggedKVCacheWrapper,
    append_paged_kv_cache,
    pod,
    single_prefill_with_kv_cache,
    utils,
)
from flashinfer._runtime.errors import ArgumentError
from flashinfer.attention import options
from flashinfer.dump import replay_main
from flashinfer.fi_trace import fi_trace
from flashinfer.jit.attention import gen_customize_single_decode_module, gen_single_prefill_module
from flashinfer.mla import BatchMLAPagedAttentionWrapper
from flashinfer.prefill.planning import choose_backend

from ..fresh_process import run_python

F16, BF16, FP8 = torch.float16, torch.bfloat16, torch.float8_e4m3fn
HOPPER = torch.device("cuda", 0)


@pytest.fixture
def hopper(monkeypatch) -> torch.device:
    """Pretend that the process has a Hopper GPU and compiles for it."""
    monkeypatch.setattr(utils, "is_sm90a_supported", lambda device: True)
    monkeypatch.setenv("FLASHINFER_CUDA_ARCH_LIST", "9.0a")
    return HOPPER


def planned_on(device, qo_lens, pos_encoding=0, mask_mode=options.CAUSAL, **members):
    """Return what choose_backend reads of a planned wrapper."""
    batch = types.SimpleNamespace(
        qo_indptr=np.cumsum([0, *qo_lens]), num_rows=sum(qo_lens), batch_size=len(qo_lens), fixed_split_size=-1,
        disable_split_kv=False,
    )  # fmt: skip
    return types.SimpleNamespace(
        _requested_backend="auto", _jit=None, _has_portable_variant=False, _max_total_num_rows=None, device=device,
        _num_qo_heads=8, _num_kv_heads=8, _planned=batch, _pos_encoding=pos_encoding, _mask_mode=lambda: mask_mode,
        _op="op", **members,
    )  # fmt: skip


@pytest.mark.parametrize(
    "arguments, dims, backend",
    [
        ((0, False, False, F16, F16), (), "fa3"),
        ((0, False, False, BF16, BF16), (192, 128), "fa3"),
        ((0, False, False, BF16, BF16), (96, 96), "fa3"),  # published kernels lack it, ours have it
        ((0, False, False, BF16, BF16), (512, 512), "fa2"),
        ((1, False, False, F16, F16), (), "fa2"),
        ((2, False, False, F16, F16), (), "fa3"),
        ((0, False, True, F16, F16), (), "fa2"),
        ((0, False, False, FP8, FP8), (128, 128), "fa3"),
        ((0, False, False, F16, FP8), (), "fa3"),
        ((0, False, False, F16, torch.uint8), (), "fa2"),
    ],
)
def test_the_backend_that_engines_ask_for_is_that_of_auto(monkeypatch, hopper, arguments, dims, backend):
    named = dict(zip(("head_dim_qk", "head_dim_vo"), dims, strict=False))
    assert utils.determine_attention_backend(hopper, *arguments, **named) == backend
    pos_encoding, _, has_mask, q, kv = arguments
    o = BF16 if q == FP8 else q
    planned = planned_on(hopper, [4096], pos_encoding, options.CUSTOM if has_mask else options.CAUSAL)
    assert choose_backend(planned, options.Dtypes(q, kv, o, o), *(dims or (128, 128))) == backend
    monkeypatch.setattr(utils, "is_sm90a_supported", lambda device: False)
    assert utils.determine_attention_backend(hopper, *arguments, **named) == "fa2"


@pytest.mark.parametrize(
    "qo_lens, backend",
    [([1] * 500, "fa2"), ([1] * 500 + [128], "fa3"), ([16] * 9 + [17, 300], "fa3"), ([0, 17, 100, 1], "fa2")],
)
def test_requests_that_decode_do_not_count(hopper, qo_lens, backend):
    """They run on the same kernel with both backends; the others fill tiles, or do not."""
    assert choose_backend(planned_on(hopper, qo_lens), options.Dtypes(BF16, BF16, BF16, BF16), 128, 128) == backend


def test_backends_of_variants(hopper):
    """A variant of ours suits all backends; one of a user may have hooks that only one of them has."""
    planned, dtypes = planned_on(hopper, [4096]), options.Dtypes(BF16, BF16, BF16, BF16)
    for has_variant, is_portable, backend in ((True, False, "fa2"), (True, True, "fa3"), (False, False, "fa3")):
        planned._jit, planned._has_portable_variant = (object() if has_variant else None), is_portable
        assert choose_backend(planned, dtypes, 128, 128) == backend
    assert BatchAttentionWithAttentionSinkWrapper._has_portable_variant


@pytest.mark.parametrize(
    "heads, dim, kv, pos_encoding, backend",
    [
        ((32, 8), 128, BF16, 0, "fa3"),
        ((34, 2), 128, BF16, 0, "fa2"),  # 17 rows are prefill tiles
        ((32, 8), 512, BF16, 0, "fa2"),
        ((32, 8), 128, FP8, 0, "fa2"),  # prompts of 16 bits do not share its module
        ((32, 8), 128, BF16, 1, "fa2"),
    ],
)
def test_module_of_pod(hopper, heads, dim, kv, pos_encoding, backend):
    part = types.SimpleNamespace(
        _dtypes=options.Dtypes(BF16, kv, BF16, BF16), _head_dim=dim, _num_qo_heads=heads[0], _num_kv_heads=heads[1],
        device=hopper, _pos_encoding=pos_encoding,
    )  # fmt: skip
    assert pod._DecodePart._module_backend(part) == backend


def test_the_mla_backend_that_engines_ask_for_is_that_of_auto(monkeypatch, hopper):
    planned = types.SimpleNamespace(
        _requested_backend="auto", _device_kind="cuda", _max_total_num_rows=None, device=hopper, _backend="fa2"
    )
    for target, backend in (("9.0a", "fa3"), ("8.0", "fa2"), ("8.0 9.0a", "fa3")):
        monkeypatch.setenv("FLASHINFER_CUDA_ARCH_LIST", target)
        assert utils.determine_mla_backend(hopper) == backend
        choose = BatchMLAPagedAttentionWrapper._choose_backend
        assert choose(planned, True, BF16, BF16, (512, 64)) == backend
    monkeypatch.setattr(utils, "is_sm90a_supported", lambda device: False)
    assert utils.determine_mla_backend(hopper) == "fa2"


def test_compile_targets_may_change_during_a_process(monkeypatch, hopper):
    call = (hopper, F16, F16, F16, 128, 128, 0)
    for target, serves in (("9.0a", True), ("8.0", False), ("9.0a", True)):
        monkeypatch.setenv("FLASHINFER_CUDA_ARCH_LIST", target)
        assert options.fa3_serves(*call) == serves
        assert utils.determine_attention_backend(hopper, 0, False, False, F16, F16) == ("fa3" if serves else "fa2")


@pytest.mark.parametrize(
    "arguments, is_supported",
    [
        ((0, False, False, F16, F16), True),
        ((0, False, False, FP8, FP8), True),
        ((1, False, False, F16, F16), False),
        ((2, False, False, F16, F16), False),
        ((0, True, False, F16, F16), False),
        ((0, False, True, F16, F16), False),
        ((0, False, False, F16, FP8), False),
        ((0, False, False, F16, torch.uint8), False),
    ],
)
def test_published_rules_of_fa3(arguments, is_supported):
    assert utils.is_fa3_backend_supported(*arguments) == is_supported


@pytest.mark.parametrize(
    "dims, is_supported", [((128, 128), True), ((192, 128), True), ((96, 96), False), ((128, 64), False)]
)
def test_published_head_dims_of_fa3(dims, is_supported):
    assert utils.is_fa3_prefill_head_dim_supported(*dims) == is_supported


def test_cutlass_has_no_8_bit_floats():
    assert utils.is_cutlass_backend_supported(0, False, False, F16, F16)
    assert not utils.is_cutlass_backend_supported(0, False, False, FP8, FP8)


@pytest.mark.parametrize("layout, name", [("NHD", "gqa_paged_decode"), ("HND", "batch_decode_paged_hnd_pair")])
def test_trace_of_a_wrapper_knows_its_layout(layout, name):
    wrapper = BatchDecodeWithPagedKVCacheWrapper(torch.empty(16, dtype=torch.uint8), layout)
    shape = (5, 16, 2, 64) if layout == "NHD" else (5, 2, 16, 64)
    cache = (torch.empty(shape, device="meta"), torch.empty(shape, device="meta"))
    made = fi_trace(wrapper.run, q=torch.empty(3, 4, 64, device="meta"), paged_kv_cache=cache)
    assert made["name"] == f"{name}_h4_kv2_d64_ps16"
    assert made["tags"] == ["fi_api:flashinfer.decode.BatchDecodeWithPagedKVCacheWrapper.run"]
    assert made["inputs"]["kv_indptr"]["optional"]


@pytest.mark.parametrize("layout", ["NHD", "HND"])
def test_trace_of_pages_of_one_token(layout):
    """Check caches of SGLang, which have no page axis."""
    wrapper = BatchPrefillWithPagedKVCacheWrapper(torch.empty(16, dtype=torch.uint8), layout)
    q, half, both = (torch.empty(shape, device="meta") for shape in ((3, 4, 64), (50, 2, 64), (50, 2, 2, 64)))
    made = fi_trace(wrapper.run, q=q, paged_kv_cache=(half, half))
    prefix = "gqa_paged_prefill" if layout == "NHD" else "batch_prefill_paged_hnd_pair"
    assert made["name"] == f"{prefix}_h4_kv2_d64_ps1"
    assert made["axes"]["page_size"]["value"] == 1 and len(made["inputs"]["k_cache"]["shape"]) == 4
    made = fi_trace(wrapper.run, q=q, paged_kv_cache=both)
    assert made["name"] == f"batch_prefill_paged_{layout.lower()}_h4_kv2_d64_ps1"
    rows, ids = torch.empty(3, 2, 64, device="meta"), torch.empty(3, dtype=torch.int32, device="meta")
    made = fi_trace(append_paged_kv_cache, append_key=rows, append_value=rows, batch_indices=ids, positions=ids,
                    paged_kv_cache=(half, half), kv_indices=ids, kv_indptr=ids, kv_last_page_len=ids[1:],
                    kv_layout=layout)  # fmt: skip
    assert made["axes"]["page_size"]["value"] == 1
    with pytest.raises(ArgumentError, match=r"k_cache must have shape \(num_pages, .*, got \(2, 64\)"):
        fi_trace(wrapper.run, q=q, paged_kv_cache=(half[0], half[0]))


FORWARD = """
import torch
import flashinfer
q, k = torch.randn(3, 4, 64).half(), torch.randn(9, 2, 64).half()
wrapper = flashinfer.BatchPrefillWithRaggedKVCacheWrapper(torch.empty(1 << 20, dtype=torch.uint8))
wrapper.begin_forward(torch.tensor([0, 3]), torch.tensor([0, 9]), 4, 2, 64)
wrapper.forward_return_lse(q, k, k, causal=True, sm_scale=0.3)
wrapper = flashinfer.BatchDecodeWithPagedKVCacheWrapper(torch.empty(1 << 20, dtype=torch.uint8))
table = (torch.tensor([0, 6, 9], dtype=torch.int32), torch.arange(9).int(), torch.ones(2).int())
wrapper.plan(*table, 4, 2, 64, 1)
table[0][1] = 2
flashinfer.fast_decode_plan(wrapper, *table, 4, 2, 64, 1)
wrapper.run(q[:2], (k, k))
wrapper = flashinfer.MultiLevelCascadeAttentionWrapper(2, torch.empty(1 << 20, dtype=torch.uint8))
tables = ([torch.tensor(row).int() for row in rows] for rows in ([[0, 2], [0, 1, 2]], [[0, 4], [0, 1, 2]]))
pages = [torch.arange(4).int(), torch.arange(2).int()]
wrapper.plan(*tables, pages, [torch.ones(n).int() for n in (1, 2)], 4, 2, 64, 1)
wrapper.run(q[:2], (k.unsqueeze(1), k.unsqueeze(1)))
"""


def test_all_that_engines_call_is_logged_and_replayed(tmp_path, capsys):
    """Check replays of logged calls: arguments of forward() and of fast_decode_plan replace those of the plan, so a
    replay without them would compute something else. Levels of a cascade are planned one by one after all are known.
    """
    variables = {"LOGLEVEL": "10", "LOGDEST": str(tmp_path / "log"), "DUMP_DIR": str(tmp_path / "dumps")}
    env = {**os.environ, **{f"FLASHINFER_{name}": value for name, value in variables.items()}}
    run_python(["-c", FORWARD], env=env, check=True)
    log = (tmp_path / "log").read_text()
    assert log.index("Wrapper.forward (") < log.index("\n    0.3\n") < log.index("Wrapper.run (")
    assert replay_main(tmp_path / "dumps", "cpu") == 0
    assert "Summary: 20 passed, 0 failed/mismatch" in capsys.readouterr().out


def test_trace_of_the_ragged_wrapper():
    wrapper = BatchPrefillWithRaggedKVCacheWrapper(torch.empty(16, dtype=torch.uint8))
    q, k, v = (torch.empty(9, heads, dim, device="meta") for heads, dim in ((4, 192), (2, 192), (2, 128)))
    made = fi_trace(wrapper.run, q=q, k=k, v=v)
    assert made["name"] == "batch_prefill_ragged_nhd_h4_kv2_d192_dv128"


def test_cuda_needs_whole_fragments():
    dtypes = (torch.float16,) * 3
    gen_single_prefill_module("fa2", *dtypes, 80, 80, 1, False, False, False, device="cpu")
    with pytest.raises(ArgumentError, match=r"head dimensions must be multiples of 16 on cuda .*, got 64 and 40"):
        gen_single_prefill_module("fa2", *dtypes, 64, 40, 0, False, False, False, device="cuda")
    with pytest.raises(ArgumentError, match=r"head_dim_qk must be a multiple of 32 with ROPE_LLAMA on cuda .*, got 80"):
        gen_single_prefill_module("fa2", *dtypes, 80, 80, 1, False, False, False, device="cuda")


@pytest.mark.parametrize("hook", ["", "REGISTER_KEY_TRANSFORM(params, k, { return k; })"])
def test_a_hook_on_keys_is_called(hook):
    """Check that key hooks are called: CUDA kernels call them only if the variant declares one."""
    arguments = ("probe", *(torch.float16,) * 3, 64, 64, [], [], ["sm_scale"], ["double"], "Probe", hook)
    spec = gen_customize_single_decode_module(*arguments, device="cuda")
    (text,) = (text for path, text in spec.generated.items() if path.name == "attention_variant.inc")
    assert ("#define FLASHINFER_VARIANT_CHANGES_KEYS" in text) == bool(hook)


@pytest.mark.parametrize("sm_scale", [0.0, -0.125, float("nan")])
def test_scales_are_positive(device, sm_scale):
    q, k = torch.randn(2, 3, 4, 64, dtype=torch.float16, device=device)
    with pytest.raises(ArgumentError, match=r"sm_scale must be a positive number.*, got .*"):
        single_prefill_with_kv_cache(q, k, k, sm_scale=sm_scale)
