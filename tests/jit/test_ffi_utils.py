# SPDX-License-Identifier: Apache-2.0
"""csrc/tvm_ffi_utils.h: error classes and texts, tensor views, dtype dispatch, all through one CPU module."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from flashinfer._runtime.errors import ArgumentError, InternalError
from flashinfer.jit import env as jit_env
from flashinfer.jit import gen_jit_spec

from ..bad_arguments import pattern
from .toolbox import run_python

float32, float16, bfloat16 = torch.float32, torch.float16, torch.bfloat16
e4m3, e5m2, int32, int64 = torch.float8_e4m3fn, torch.float8_e5m2, torch.int32, torch.int64


@pytest.fixture(scope="module")
def spec(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(vars(jit_env), "FLASHINFER_JIT_DIR", tmp_path_factory.mktemp("ffi"))
        patch.setenv("FLASHINFER_JIT_DEBUG", "1")  # half the compile time
        made = gen_jit_spec("ffi_probe", [Path(__file__).with_name("ffi_probe.cu")], backend="cpu")
        made.build()
        made.library = made.jit_library_path
    return made


@pytest.fixture(scope="module")
def probe(spec):
    return spec.load(spec.library)


# ------------------------------------------------------------------------------------------------ errors


@pytest.mark.parametrize(
    "kind, error, text",
    [
        (0, ValueError, "value must be another.*, got 7"),
        (1, TypeError, "type 7"),
        (2, RuntimeError, "runtime 7"),
        (3, ArgumentError, "argument 7"),
        (5, InternalError, "invariant 7"),
        (6, InternalError, r"7 vs\. 1000.*must be a thousand"),
        (7, RuntimeError, "probe: CPU kernel failed with status 7"),
    ],
)
def test_errors_arrive_as_their_class(probe, kind, error, text):
    with pytest.raises(error, match=text) as caught:
        probe.fail(kind, 7)
    assert type(caught.value) is error


@pytest.mark.parametrize("base", [ValueError, RuntimeError, AssertionError])
def test_argument_errors_are_what_callers_catch(probe, base):
    with pytest.raises(base, match="argument 1"):
        probe.fail(3, 1)


def test_log_and_throw_logs_first(probe, capfd):
    with pytest.raises(ValueError, match="logged 7"):
        probe.fail(4, 7)
    assert "logged 7" in capfd.readouterr().err
    with pytest.raises(ValueError, match="value must be another, got 7"):
        probe.fail(0, 7)
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("kind, error, text", [(8, InternalError, "internal 7"), (9, NotImplementedError, "missing 7")])
def test_other_classes_are_logged_and_arrive(probe, capfd, kind, error, text):
    """The tutorial throws these two by name; a caller that catches RuntimeError catches both."""
    with pytest.raises(RuntimeError, match=text) as caught:
        probe.fail(kind, 7)
    assert type(caught.value) is error and text in capfd.readouterr().err


def test_success_is_silent(probe):
    probe.fail(7, 0)
    probe.fail(6, 1000)


# ------------------------------------------------------------------------------------------------ tensors


def test_typed_pointer_of_a_view(probe):
    x = torch.arange(12.0).view(3, 4)
    assert probe.first(x) == 0
    assert probe.first(x[1:]) == 4
    assert probe.first(x[2, 3:]) == 11
    assert probe.same_pointer(x[1:])


def test_optional_tensor(probe):
    assert probe.optional_size(None) == -1
    assert probe.optional_size(torch.ones(5)) == 5
    with pytest.raises(ValueError, match="must be float32, got float64"):
        probe.optional_size(torch.ones(5, dtype=torch.float64))


def test_wrong_argument_type_is_a_type_error(probe):
    with pytest.raises(TypeError):
        probe.first("text")


def test_allocation(probe):
    y = torch.from_dlpack(probe.zeros(torch.ones(2, 3)))
    assert torch.equal(y, torch.zeros(2, 3))


def test_cpu_has_no_stream(probe):
    assert not probe.has_stream(torch.ones(1))


def test_call_without_torch(spec):
    """Call with tensors of any DLPack producer."""
    code = f"""
import sys
sys.modules["torch"] = None
import numpy, tvm_ffi
probe = tvm_ffi.load_module({str(spec.library)!r})
print(probe.first(tvm_ffi.from_dlpack(numpy.full(3, 2.5, dtype=numpy.float32))))
"""
    done = run_python(code)
    assert done.stdout == "2.5\n", done.stderr


# ------------------------------------------------------------------------------------------------ checks

X, OTHER = torch.zeros(2, 3), torch.zeros(4, 3, dtype=float16)
TRANSPOSED = torch.zeros(3, 2).t()


@pytest.mark.parametrize(
    "what, x, text",
    [
        (2, torch.zeros(3), "probe: x must have 2 dimensions.*, got 1"),
        (3, torch.zeros(3), "probe: x must have 2 to 3 dimensions.*, got 1"),
        (4, X, r"probe: x.shape[0] must be 4 (other.shape[0]).*, got 2"),
        (5, X, "probe: x must have 1 element.*, got 6"),
        (6, X, "probe: x must have shape (4, 3) (the shape of other).*, got (2, 3)"),
        (6, torch.zeros(4), "probe: x must have shape (4, 3) (the shape of other).*, got (4,)"),
        (7, X, "probe: x must be float16 or bfloat16.*, got float32"),
        (8, X, "probe: x must be float16 (the dtype of other).*, got float32"),
        (9, TRANSPOSED, "probe: x.stride(-1) must be 1.*, got 2"),
        (10, TRANSPOSED, "x must be contiguous"),
    ],
)
def test_expect_names_op_argument_and_both_values(probe, what, x, text):
    with pytest.raises(ArgumentError, match=pattern(text)):
        probe.expect(what, x, OTHER)


@pytest.mark.parametrize(
    "what, x",
    [(0, X), (1, X), (2, X), (3, X), (3, torch.zeros(1, 2, 3)), (4, torch.zeros(4)), (5, torch.zeros(1, 1))]
    + [(6, torch.zeros(4, 3)), (7, torch.zeros(1, dtype=bfloat16)), (8, torch.zeros(1, dtype=float16))]
    + [(9, X[:, :2]), (9, torch.zeros(5, 3)[:, :1]), (10, X)],
)
def test_expect_lets_pass(probe, what, x):
    probe.expect(what, x, OTHER)


@pytest.mark.parametrize(
    "what, x, text",
    [
        (1, X, "x must be a CUDA tensor, got one on cpu"),
        (2, TRANSPOSED, "x must be contiguous"),
        (3, TRANSPOSED, "x.stride(-1) must be 1.*, got 2"),
        (4, X, "x must be a CUDA tensor, got one on cpu"),
        (5, X, "x must be float16.*, got float32"),
        (6, torch.zeros(3), "x must have 2 dimensions.*, got 1"),
        (7, X, "x must have shape (4, 3).*, got (2, 3)"),
        (8, X, "x must be float16.*, got float32"),
        (10, X, "must be a CUDA tensor"),
        (11, X, "must be a CUDA tensor"),
    ],
)
def test_macros_give_the_same_errors(probe, what, x, text):
    with pytest.raises(ArgumentError, match=pattern(text)):
        probe.check(what, x, OTHER)


@pytest.mark.parametrize(
    "what, x", [(0, X), (2, X), (3, X), (5, OTHER), (6, X), (7, torch.zeros(4, 3)), (8, OTHER), (9, X)]
)
def test_macros_let_pass(probe, what, x):
    probe.check(what, x, OTHER)


def test_invariant_on_dtypes(probe):
    probe.check(12, OTHER, OTHER)
    with pytest.raises(RuntimeError, match=r"float32 vs\. float16"):
        probe.check(12, X, OTHER)


# ------------------------------------------------------------------------------------------------ dispatch

SIZES = {float32: 4, float16: 2, bfloat16: 2, e4m3: 1, e5m2: 1, int32: 4, int64: 8}
FAMILIES = [
    (float32, float16, bfloat16),
    (float16, bfloat16),
    (e4m3, e5m2),
    (float16, bfloat16, e4m3, e5m2),
    (float32, float16, bfloat16, e4m3, e5m2),
    (int32, int64),
    (float32, float16, bfloat16),
]


@pytest.mark.parametrize("family, covered", list(enumerate(FAMILIES)))
@pytest.mark.parametrize("dtype", [*SIZES, torch.float64, torch.bool], ids=str)
def test_dispatch(probe, family, covered, dtype):
    x = torch.empty(1, dtype=dtype)
    if dtype in covered:
        assert probe.dispatch(family, x) == SIZES[dtype]
    else:
        with pytest.raises(ArgumentError, match=f"no kernel for.*{str(dtype).removeprefix('torch.')}"):
            probe.dispatch(family, x)


def test_unknown_dtype_is_named_by_code_and_bits(probe):
    with pytest.raises(ArgumentError, match=r"dtype code 5, 64 bits"):
        probe.dispatch(0, torch.empty(1, dtype=torch.complex64))


def test_nested_dispatch(probe):
    assert probe.nested(True, torch.empty(1)) == 24
    assert probe.nested(False, torch.empty(1, dtype=float16)) == 12
