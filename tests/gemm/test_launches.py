# SPDX-License-Identifier: Apache-2.0
"""Kept launches of the products: the second call of the same facts takes what the first one chose, without checks.

CPU tensors stand for those of a Hopper here, and the native functions are replaced: each test sees which calls go
straight to them, with which arguments, and that all others run the checks. First calls are computed by the CPU.
"""

from __future__ import annotations

import logging
from types import SimpleNamespace

import pytest
import torch

import flashinfer
from flashinfer import gemm, utils
from flashinfer._runtime import kept
from flashinfer._runtime.arch import capability_of, get_compute_capability
from flashinfer._runtime.errors import ArgumentError, BackendSupportedError
from flashinfer.autotuner import AutoTuner
from flashinfer.gemm import bf16 as family
from flashinfer.gemm import blockscale, decide, deepgemm, fp8, launch
from flashinfer.grouped_mm import core

from ..entered_files import entered_files
from ..hopper.devices import needs_hopper
from .references import BF16, E4M3, E5M2, FP16, FP32, block_scales, operand
from .stand_ins import Native

INT32 = torch.int32


KEPT = (family._mm_launches, family._bmm_launches, fp8._launches, blockscale._launches)
KEPT += (deepgemm._contiguous_launches, deepgemm._masked_launches, core._launches)


def forget():
    for launches in KEPT:
        launches.clear()


@pytest.fixture
def native_from_limits(monkeypatch):
    """Pretend that CPU tensors are on a Hopper; return what all native functions are replaced by."""
    function = Native()
    monkeypatch.setitem(capability_of, -1, 90)
    monkeypatch.setattr(AutoTuner, "_instance", AutoTuner(warmup=1, repeat=1))
    for functions in (launch.ordinary_product, blockscale._blockscale):
        for kind in ("bf16", "fp8", "fp8_block"):
            monkeypatch.setitem(functions, kind, function)
    forget()
    yield function
    forget()


@pytest.fixture
def native(native_from_limits, monkeypatch):
    """Let few rows take the native functions for the few weights of these tests too."""
    for name in ("SMALL_BF16", "SMALL_FP8"):
        monkeypatch.setattr(decide, name, 0)
    monkeypatch.setattr(fp8, "SMALL_FP8", 0)
    return native_from_limits


def bf16(*shape):
    return operand(*shape, dtype=BF16, device="cpu")


def e4m3(*shape):
    return operand(*shape, dtype=E4M3, device="cpu")


def calls():
    """Return ordinary calls of each function: name, arguments, and the shape and dtype of the result."""
    x, w, x8, w8 = bf16(8, 256), bf16(64, 256), e4m3(256, 256), e4m3(2, 64, 256)
    one = torch.ones(())
    rows, blocks = block_scales(x8, 1, 128), block_scales(w8, 128, 128)
    x8_2, rows_2 = x8.view(2, 128, 256), rows.view(2, 128, 2)
    groups, counts, indptr = (torch.tensor(x, dtype=INT32) for x in ([0] * 256, [128, 7], [0, 2, 6]))
    mm, bmm, bmm8 = flashinfer.mm_bf16, flashinfer.bmm_bf16, flashinfer.bmm_fp8
    blockscaled, grouped = gemm.fp8_blockscale_gemm_sm90, gemm.group_deepgemm_fp8_nt_groupwise
    fp32, auto, shape, batch = {"out_dtype": FP32}, {"backend": "auto"}, (8, 64), (1, 8, 64)
    return {
        "mm_bf16": (mm, (x, w.T), {}, shape, BF16),
        "mm_bf16 to fp32": (mm, (x, w.T), fp32, shape, FP32),
        "mm_bf16 with bias": (mm, (x, w.T, bf16(64), True), {}, shape, BF16),
        "mm_bf16 auto": (mm, (x, w.T), auto, shape, BF16),
        "mm_bf16 auto with bias": (mm, (x, w.T, bf16(64), True), auto, shape, BF16),
        "bmm_bf16": (bmm, (x[None], w.T[None]), {}, batch, BF16),
        "bmm_bf16 auto": (bmm, (x[None], w.T[None]), auto, batch, BF16),
        "bmm_bf16 to fp32": (bmm, (x[None], w.T[None]), fp32, batch, FP32),
        "bmm_fp8": (bmm8, (x8[None, :8], w8[:1].mT, one, one, FP16), {}, batch, FP16),
        "bmm_fp8 auto": (bmm8, (x8[None, :8], w8[:1].mT, one, one, BF16), auto, batch, BF16),
        "bmm_fp8 of a batch": (bmm8, (x8_2, w8.mT, one, one, BF16), {"backend": "cudnn"}, (2, 128, 64), BF16),
        "fp8_blockscale": (blockscaled, (x, w8[0], None, blocks[0]), {}, shape, BF16),
        "fp8_blockscale of codes": (blockscaled, (x8, w8[0], rows.T, blocks[0]), {"out_dtype": FP16}, (256, 64), FP16),
        "group_deepgemm": (grouped, (x8, w8, rows, blocks, groups), {}, (256, 64), BF16),
        "batch_deepgemm": (
            *(gemm.batch_deepgemm_fp8_nt_groupwise, (x8_2, w8, rows_2, blocks, counts, 64), {}, (2, 128, 64), BF16),
        ),
        "grouped_mm_bf16": (flashinfer.grouped_mm_bf16, (bf16(6, 256), bf16(2, 64, 256), indptr), {}, (6, 64), BF16),
    }


CALLS = sorted(calls())


def on(device, value):
    return value.to(device) if isinstance(value, torch.Tensor) else value


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("is_given", [False, True])
def test_second_calls_go_straight(native, name, is_given):
    function, args, kwargs, shape, dtype = calls()[name]
    assert not (function(*args, **kwargs) == 1).all() and not native.calls
    given = torch.zeros(shape, dtype=dtype) if is_given else None
    result = function(*args, **kwargs, out=given)
    assert result is given or not is_given
    assert result.shape == shape and result.dtype is dtype and result.is_contiguous()
    assert (result == 1).all(), "was not made by the native function"
    ((out, *operands),) = native.calls
    assert out is result
    passed = [x for x in operands if isinstance(x, torch.Tensor)]
    assert all(any(x is y for y in args) for x in passed), "views take time"
    assert sum(isinstance(x, torch.Tensor) for x in args) == len(passed)


@pytest.mark.parametrize("name, file", [("mm_bf16", "bf16"), ("bmm_fp8", "fp8"), ("fp8_blockscale", "blockscale")])
def test_later_calls_enter_one_file(native, name, file):
    """Then follow csrc/gemm_sm90.cu and gemm/sm90/choose.h, before a kernel."""
    function, args, kwargs, shape, dtype = calls()[name]
    function(*args, **kwargs)
    out = torch.empty(shape, dtype=dtype)
    entered = entered_files(lambda: function(*args, **kwargs, out=out))
    assert entered == ["_runtime/codegen_wrapper.py", f"gemm/{file}.py"]


@pytest.mark.parametrize("name", CALLS)
def test_what_native_code_leaves_is_computed_by_the_checked_way(native, name):
    function, args, kwargs, shape, _ = calls()[name]
    expected = function(*args, **kwargs)
    native.takes = False
    result = function(*args, **kwargs)
    assert native.calls, "the native function was not asked"
    assert result.shape == shape and result.dtype is expected.dtype
    rows = slice(7) if name == "batch_deepgemm" else slice(None)  # others are not written
    torch.testing.assert_close(result[..., rows, :], expected[..., rows, :], rtol=0, atol=0)


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("wrong", [None, 3, "shape"])
def test_errors_are_those_of_the_checks(native, name, wrong, monkeypatch):
    def refuse(*args):
        raise ArgumentError("native code refuses this")

    function, args, kwargs, *_ = calls()[name]
    function(*args, **kwargs)  # a launch is kept
    args = (args[0][..., :-1] if wrong == "shape" else wrong, *args[1:])
    for functions in (launch.ordinary_product, blockscale._blockscale):
        for kind in ("bf16", "fp8", "fp8_block"):
            monkeypatch.setitem(functions, kind, refuse)
    texts = []
    for _ in range(2):
        with pytest.raises(Exception) as failure:
            function(*args, **kwargs)
        texts.append((failure.type, str(failure.value)))
        forget()
    assert texts[0] == texts[1]
    assert "native code" not in texts[0][1]


@pytest.mark.parametrize("probe, answer", [("get_compute_capability", (8, 0)), ("device_support_pdl", False)])
@pytest.mark.parametrize("backend", ["cudnn", "auto"])
def test_a_replaced_probe_is_asked(native, monkeypatch, probe, answer, backend):
    a, b = bf16(8, 256), bf16(64, 256).T
    flashinfer.mm_bf16(a, b, backend=backend)
    with monkeypatch.context() as patches:
        patches.setattr(utils, probe, lambda device: answer)
        flashinfer.mm_bf16(a, b, backend=backend)
        flashinfer.mm_bf16(bf16(9, 256), b, backend=backend)
        assert not native.calls and len(family._mm_launches) == 1, "what was chosen meanwhile is not kept"
    flashinfer.mm_bf16(a, b, backend=backend)
    assert len(native.calls) == 1


@pytest.mark.parametrize("backend", ["cudnn", "auto"])
def test_compiled_calls_do_not_go_straight(native, backend):
    a, b = bf16(8, 256), bf16(64, 256).T
    flashinfer.mm_bf16(a, b, backend=backend)
    compiled = torch.compile(lambda a, b: flashinfer.mm_bf16(a, b, backend=backend), backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(a, b), a @ b, rtol=2**-6, atol=2**-6)
    assert not native.calls


@pytest.mark.parametrize("capability", [80, 90, 100])
def test_many_rows_go_to_torch(native, monkeypatch, capability):
    monkeypatch.setitem(capability_of, -1, capability)
    a, b, made = bf16(64, 256), bf16(64, 256).T, []
    real = torch.mm
    monkeypatch.setattr(torch, "mm", lambda *args, **kwargs: made.append(args) or real(*args, **kwargs))
    out = torch.empty(64, 64, dtype=BF16)
    for backend in ("cudnn", "cublaslt", "cutile"):
        flashinfer.mm_bf16(a, b, backend=backend)
        made.clear()
        assert flashinfer.mm_bf16(a, b, backend=backend).equal(real(a, b))
        assert flashinfer.mm_bf16(a, b, out=out, backend=backend) is out
        assert out.equal(real(a, b))
        assert len(made) == 2 and not native.calls


@pytest.fixture
def torch_calls(monkeypatch):
    """Return the list of products of torch that were called; they compute nothing."""
    made = []

    def product(a, b, *scales, out=None, out_dtype=BF16, use_fast_accum=True):
        made.append((a, b))
        return torch.empty(*a.shape[:-1], b.shape[-1], dtype=out_dtype) if out is None else out

    for name in ("mm", "bmm", "_scaled_mm"):
        monkeypatch.setattr(torch, name, product)
    return made


def test_a_choice_does_not_depend_on_earlier_layouts(native_from_limits, torch_calls):
    """Check weights that our kernel streams if they are K-major, after calls with the others, and the other way."""
    space = torch.empty(3072 * 3072, dtype=BF16)
    by_rows, by_columns = space.view(3072, 3072), space.view(3072, 3072).T
    a = torch.empty(4, 3072, dtype=BF16)
    for order in ((by_rows, by_columns), (by_columns, by_rows)):
        forget()
        for b in order * 2:
            native_from_limits.calls.clear()
            flashinfer.mm_bf16(a, b)
        flashinfer.mm_bf16(a, by_columns)
        assert native_from_limits.calls, "K-major weights are ours"
        native_from_limits.takes = False  # as for rows
        torch_calls.clear()
        assert flashinfer.mm_bf16(a, by_rows).shape == (4, 3072)
        native_from_limits.takes = True


def test_any_number_of_many_rows_has_one_choice(native_from_limits, torch_calls):
    b = bf16(64, 256).T
    for m in (64, 65, 66, 1000):
        flashinfer.mm_bf16(bf16(m, 256), b)
    assert len(family._mm_launches) == 2
    torch_calls.clear()
    assert flashinfer.mm_bf16(bf16(77, 256), b).shape == (77, 64) and len(torch_calls) == 1


TO_TORCH = ["mm_bf16", "bmm_bf16", "bmm_fp8"]
OURS = ["mm_bf16 to fp32", "mm_bf16 with bias", "bmm_bf16 to fp32", "bmm_fp8 of a batch"]


@pytest.mark.parametrize("name", [*TO_TORCH, *OURS])
def test_few_weights_go_to_torch_or_are_ours(native_from_limits, torch_calls, name):
    """Products with a bias, of another dtype, or batches of fp8 are ours for any weights."""
    function, args, kwargs, shape, dtype = calls()[name]
    function(*args, **kwargs)
    for out in (None, torch.empty(shape, dtype=dtype)):
        torch_calls.clear()
        native_from_limits.calls.clear()
        result = function(*args, **kwargs, out=out)
        assert result.shape == shape and (result is out or out is None)
        assert (len(torch_calls), len(native_from_limits.calls)) == ((1, 0) if name in TO_TORCH else (0, 1))


def test_gradients_and_autocast_change_nothing(native):
    a, b = bf16(64, 256).requires_grad_(), bf16(64, 256).T
    flashinfer.mm_bf16(a.detach(), b)
    assert not flashinfer.mm_bf16(a, b).requires_grad
    with torch.no_grad():
        assert flashinfer.mm_bf16(a, b).equal(torch.mm(a, b))
    with torch.autocast("cpu", dtype=FP16):
        assert torch.mm(a, b).dtype is FP16
        assert flashinfer.mm_bf16(a, b).dtype is BF16


@pytest.mark.parametrize(
    "change",
    [
        {"out": torch.empty(8, 64, dtype=FP16)},
        {"out": torch.empty(8, 63, dtype=BF16)},
        {"backend": "nothing"},
        {"backend": "cublaslt", "pdl": True},
        {"out_dtype": torch.int32},
    ],
)
@pytest.mark.parametrize("rows", [8, 64])
def test_what_no_backend_takes_is_refused(native, change, rows):
    flashinfer.mm_bf16(bf16(rows, 256), bf16(64, 256).T)
    native.takes = "backend" in change  # native code compares shapes and dtypes, and knows no backends
    if "out" in change:
        change = {"out": change["out"].repeat(rows // 8, 1)}
    with pytest.raises((ValueError, BackendSupportedError)):
        flashinfer.mm_bf16(bf16(rows, 256), bf16(64, 256).T, **change)


def test_what_native_code_would_take_is_refused(native):
    """Check an output of another dtype than asked for, and what tinygemm refuses after a call that it takes."""
    a, b = bf16(8, 256), bf16(64, 256).T
    for backend in ("cudnn", "tinygemm"):
        flashinfer.mm_bf16(a, b, backend=backend)
        with pytest.raises(ArgumentError, match="out must be"):
            flashinfer.mm_bf16(a, b, out=torch.empty(8, 64, dtype=FP16), backend=backend)
    with pytest.raises(ArgumentError, match="a must be contiguous"):
        flashinfer.mm_bf16(bf16(8, 512)[:, :256], b, backend="tinygemm")
    assert not native.calls


def test_the_log_tells_the_choice(native, monkeypatch, caplog):
    monkeypatch.setattr(kept, "knobs", SimpleNamespace(log_level=3))
    logger = logging.getLogger("flashinfer.api")
    monkeypatch.setattr(logger, "propagate", True)
    with caplog.at_level(logging.INFO, "flashinfer.api"):
        for _ in range(3):
            flashinfer.mm_bf16(bf16(8, 256), bf16(64, 256).T)
    (line,) = set(caplog.messages)
    assert line.startswith("mm_bf16 (8, ") and line.endswith("-> launch_own (with_torch=False)")


def cuda_calls():
    """Return the ordinary calls on a GPU, and calls of the same functions that are not."""
    ordinary = {
        name: (function, tuple(on("cuda", x) for x in args), kwargs)
        for name, (function, args, kwargs, *_) in calls().items()
    }
    wide, w = bf16(64, 512).cuda(), bf16(64, 256).cuda()
    x8, w8, one = e4m3(1, 64, 256).cuda(), e4m3(1, 64, 256).cuda().mT, torch.full((), 0.5, device="cuda")
    large = bf16(40960, 256).cuda()  # few rows are ours
    unaligned = e4m3(1, 64, 272).cuda()[..., 1:257]
    return ordinary | {
        "mm_bf16 of a view": (flashinfer.mm_bf16, (wide[:8, 256:], w.T), {}),
        "mm_bf16 of unaligned rows": (flashinfer.mm_bf16, (wide[:8, 1:257], w.T), {}),
        "mm_bf16 of row-major weights": (flashinfer.mm_bf16, (wide[:8, :256], w.T.contiguous()), {}),
        "mm_bf16 of many weights": (flashinfer.mm_bf16, (wide[:8, :256], large.T), {}),
        "bmm_bf16 of many weights": (flashinfer.bmm_bf16, (wide[None, :8, :256], large.T[None]), {}),
        "bmm_fp8 of many weights": (flashinfer.bmm_fp8, (x8[:, :8], large.to(E4M3).T[None], one, one, BF16), {}),
        "mm_bf16 through torch": (flashinfer.mm_bf16, (wide[:, :256], w.T), {}),
        "bmm_bf16 through torch": (flashinfer.bmm_bf16, (wide[None, :, :256], w.T[None]), {}),
        "bmm_fp8 through torch": (flashinfer.bmm_fp8, (x8, w8, one, one, BF16), {}),
        "bmm_fp8 of an unaligned address": (flashinfer.bmm_fp8, (unaligned, w8, one, one, BF16), {}),
        "bmm_fp8 of e5m2": (flashinfer.bmm_fp8, (x8.float().to(E5M2), w8, one, one, BF16), {}),
        "bmm_fp8 of row-major weights": (flashinfer.bmm_fp8, (x8, w8.contiguous(), one, one, FP16), {}),
        "bmm_fp8 of unaligned rows": (flashinfer.bmm_fp8, (e4m3(1, 64, 257).cuda()[..., 1:], w8, one, one, BF16), {}),
    }


@needs_hopper
@pytest.mark.parametrize("is_given", [False, True])
def test_same_bits_as_checked_calls(monkeypatch, is_given):
    for name, (function, args, kwargs) in cuda_calls().items():
        monkeypatch.undo()
        function(*args, **kwargs)
        result = function(*args, **kwargs)
        monkeypatch.setattr(utils, "get_compute_capability", lambda device: get_compute_capability(device))
        expected = function(*args, **kwargs, out=torch.zeros_like(result) if is_given else None)
        rows = slice(7) if name == "batch_deepgemm" else slice(None)
        assert result.shape == expected.shape and result.dtype is expected.dtype, name
        assert result[..., rows, :].equal(expected[..., rows, :]), name
