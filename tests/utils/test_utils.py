# SPDX-License-Identifier: Apache-2.0
"""The facade and the small helpers it re-exports. Probes, decorators and registration have separate test files."""

from __future__ import annotations

import logging

import pytest
import torch

import flashinfer.utils as utils
from flashinfer._runtime import errors
from flashinfer.jit import env


def test_facade_defines_nothing():
    own = {
        name
        for name, value in vars(utils).items()
        if getattr(value, "__module__", None) == utils.__name__ and not name.startswith("__")
    }
    assert own == set()
    assert utils.BackendSupportedError is errors.BackendSupportedError


def test_companion_probes_come_from_jit_env(monkeypatch):
    assert utils.has_flashinfer_jit_cache is env.has_flashinfer_jit_cache
    assert utils.has_flashinfer_cubin() in (True, False)
    monkeypatch.setattr(utils, "has_flashinfer_jit_cache", lambda: True)
    assert utils.has_flashinfer_jit_cache()
    with pytest.raises(AttributeError, match="no attribute 'nonsense'"):
        _ = utils.nonsense


def test_enums_have_the_numbers_the_kernels_know():
    assert [m.value for m in utils.PosEncodingMode] == [0, 1, 2] and utils.PosEncodingMode.ALIBI.value == 2
    assert [m.name for m in utils.MaskMode] == ["NON_CAUSAL", "CAUSAL", "CUSTOM", "MULTIITEMSCORING"]
    assert utils.TensorLayout["NHD"].value == 0 and utils.TensorLayout["HND"].value == 1


def test_constants_of_attention():
    assert utils.log2e == 1.44269504088896340736 and utils.SINGLE_KERNEL_TMP_SIZE == 32 << 20


def test_division():
    assert [utils.ceil_div(x, 4) for x in (0, 1, 4, 5)] == [0, 1, 1, 2]
    assert [utils.round_up(x, 4) for x in (0, 1, 4, 5)] == [0, 4, 4, 8]


def test_powers_of_two():
    assert [utils.last_positive_power_of_2(x) for x in (-1, 0, 1, 2, 3, 4, 1023, 1024)] == [1, 1, 1, 2, 2, 4, 512, 1024]
    assert [utils.next_positive_power_of_2(x) for x in (-1, 0, 1, 2, 3, 4, 1023, 1025)] == [
        1,
        1,
        1,
        2,
        4,
        4,
        1024,
        2048,
    ]


@pytest.mark.parametrize("tokens, tile", [(1, 8), (512, 32), (513, 32), (528, 64), (100_000, 128)])
def test_tile_tokens_dim(tokens, tile):
    assert utils.calculate_tile_tokens_dim(tokens, num_experts=128, top_k=8) == tile


def test_indptr():
    indptr = utils.get_indptr(torch.tensor([3, 0, 1], dtype=torch.int32))
    assert indptr.tolist() == [0, 3, 3, 4] and indptr.dtype == torch.int64
    assert utils.get_indptr(torch.empty(0, dtype=torch.int32)).tolist() == [0]


def test_alibi_slopes():
    torch.testing.assert_close(utils.get_alibi_slopes(8), torch.tensor([2.0**-k for k in range(1, 9)]))
    twelve = utils.get_alibi_slopes(12)
    torch.testing.assert_close(twelve[:8], utils.get_alibi_slopes(8))
    torch.testing.assert_close(twelve[8:], utils.get_alibi_slopes(16)[:8:2])
    assert utils.get_alibi_slopes(1).tolist() == [2**-8]


def test_dtype_names():
    assert utils.canonicalize_torch_dtype("bfloat16") is torch.bfloat16
    assert utils.canonicalize_torch_dtype("torch.float16") is torch.float16
    assert utils.canonicalize_torch_dtype(torch.float8_e4m3fn) is torch.float8_e4m3fn
    for wrong in ("float17", "nn", 3):
        with pytest.raises(TypeError, match=repr(wrong)):
            utils.canonicalize_torch_dtype(wrong)


def test_native_fp4_dtype():
    dtype = utils.get_native_fp4_dtype()
    assert torch.zeros(2, 3, dtype=torch.uint8).view(dtype).dtype is dtype and dtype.itemsize == 1


def test_is_float8():
    assert utils.is_float8(torch.empty(1, dtype=torch.float8_e4m3fn))
    assert utils.is_float8(torch.empty(1, dtype=torch.float8_e5m2))
    assert not utils.is_float8(torch.empty(1, dtype=torch.uint8))


def test_check_shape_dtype_device():
    x = torch.empty(2, 3)
    utils.check_shape_dtype_device(x, (2, 3), torch.float32, torch.device("cpu"), "out")
    utils.check_shape_dtype_device(x, None, None, None, "out")
    for wrong, text in [
        (((2, 4), None, None), r"out: shape must be \(2, 4\).*, got \(2, 3\)"),
        ((None, torch.float16, None), "out: dtype must be torch.float16.*, got torch.float32"),
        ((None, None, torch.device("meta")), "out: device must be meta.*, got cpu"),
    ]:
        with pytest.raises(ValueError, match=text):
            utils.check_shape_dtype_device(x, *wrong, "out")


@pytest.mark.parametrize(
    "version, base, at_least",
    [("2.10.0", "2.9", True), ("2.8.0a0+cu129", "2.8", True), ("12.3", "12.3", True), ("12.2", "12.3", False)],
)
def test_versions(version, base, at_least):
    assert utils.version_at_least(version, base) is at_least


def test_cuda_python():
    if not utils.has_cuda_cudart():
        with pytest.raises(errors.LibraryError, match="cuda-python is not installed"):
            utils.get_cuda_python_version()


def test_log_level(monkeypatch):
    logger = logging.getLogger("flashinfer")
    monkeypatch.setattr(logger, "level", logger.level)
    utils.set_log_level("warn")
    assert logger.level == logging.WARNING and utils.LogLevel.WARN.value == 3
    utils.set_log_level("TRACE")
    assert logger.level < logging.DEBUG
    with pytest.raises(ValueError, match=r"lvl_str must be one of trace, debug, .*, got 'loud'"):
        utils.set_log_level("loud")


def test_level_of_the_native_logger(monkeypatch):
    """Check the published call, which takes the number of a level."""
    logger = logging.getLogger("flashinfer")
    monkeypatch.setattr(logger, "level", logger.level)
    utils.get_logging_module().set_log_level(utils.LogLevel.ERROR.value)
    assert logger.level == logging.ERROR and utils.get_logging_module() is utils.get_logging_module()
    with pytest.raises(ValueError, match=r"level must be one of 0 .trace.*, got 9"):
        utils.get_logging_module().set_log_level(9)
