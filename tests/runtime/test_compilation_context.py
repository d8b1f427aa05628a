# SPDX-License-Identifier: Apache-2.0
"""Compilation targets: the list syntax, detection, and the nvcc flags."""

from __future__ import annotations

import logging

import pytest
import torch
from packaging.version import Version

import flashinfer.jit
from flashinfer import compilation_context
from flashinfer._runtime import nvml
from flashinfer._runtime.arch import HOPPER_ON_MAJORS
from flashinfer.compilation_context import CompilationContext, sm90a_nvcc_flags, sm120f_nvcc_flags
from flashinfer.jit import toolchain

from ..fresh_process import run_python

LIST = "FLASHINFER_CUDA_ARCH_LIST"


@pytest.fixture
def targets(monkeypatch):
    """Return targets("8.0 9.0a"), which parses such a list."""

    def read(text):
        monkeypatch.setenv(LIST, text)
        return CompilationContext().TARGET_CUDA_ARCHS

    return read


@pytest.fixture
def cuda(monkeypatch):
    return lambda *version: monkeypatch.setattr(
        toolchain, "get_cuda_version", lambda: Version("{}.{}".format(*version))
    )


def gencode(flags):
    return [flag for flag in flags if flag.startswith("-gencode")]


# -------------------------------------------------------------------------------- the list


def test_list(targets):
    assert targets("8.0 9.0a 10.0a") == {(8, "0"), (9, "0a"), (10, "0a")}


def test_letters_are_kept(targets):
    expected = {(7, "5"), (8, "0"), (8, "9"), (9, "0a"), (10, "0a"), (11, "0a"), (12, "0f")}
    assert targets("7.5 8.0 8.9 9.0a 10.0a 11.0a 12.0f") == expected


def test_missing_letters(targets, cuda):
    cuda(13, 0)
    expected = {(8, "9"), (9, "0a"), (10, "0a"), (10, "3a"), (11, "0a"), (12, "0f"), (12, "1a")}
    assert targets("8.9 9.0 10.0 10.3 11.0 12.0 12.1") == expected
    cuda(12, 8)
    assert targets("12.0") == {(12, "0a")}
    with pytest.raises(RuntimeError, match=r"12\.1 needs CUDA 12\.9"):
        targets("12.1")
    assert targets("12.1a") == {(12, "1a")}  # spelled in full: left to the compiler


def test_list_is_readable_without_a_compiler(targets, cuda):
    cuda(0, 0)
    everything = "7.5 8.0 8.6 8.7 8.9 9.0 10.0 10.3 11.0 12.0 12.1"
    assert len(targets(everything)) == len(everything.split())


@pytest.mark.parametrize("text", ["8.0,9.0a", " 8.0;9.0a; ", "8.0  ,\t9.0a\n", "8.0 9.0a 8.0", ",8.0, 9.0a"])
def test_separators_and_blanks(targets, text):
    assert targets(text) == {(8, "0"), (9, "0a")}


@pytest.mark.parametrize(
    "token", ["90a", "9", "9.0+PTX", "sm_90", "9.0b", "9.", ".0", "9.0A", "9.00", "-9.0", "native"]
)
def test_bad_token_is_named(targets, token):
    with pytest.raises(ValueError, match=r"must be major\.minor") as error:
        targets(f"8.0 {token}")
    assert repr(token) in str(error.value)


def test_list_is_read_again_when_it_changes(monkeypatch):
    context = CompilationContext()
    for text, expected in [("8.0", {(8, "0")}), ("9.0a", {(9, "0a")})]:
        monkeypatch.setenv(LIST, text)
        assert expected == context.TARGET_CUDA_ARCHS
        assert context.TARGET_CUDA_ARCHS is context.TARGET_CUDA_ARCHS


def test_targets_can_be_set(monkeypatch):
    monkeypatch.setenv(LIST, "8.0")
    context = CompilationContext()
    context.TARGET_CUDA_ARCHS = {(9, "0a")}
    assert {(9, "0a")} == context.TARGET_CUDA_ARCHS
    monkeypatch.setenv(LIST, "8.9")
    assert {(8, "9")} == context.TARGET_CUDA_ARCHS


# -------------------------------------------------------------------------------- detection


@pytest.fixture
def gpus(monkeypatch):
    """Return gpus((9, 0), (8, 0)), which makes GPUs of these capabilities visible."""

    def install(*capabilities):
        monkeypatch.delenv(LIST, raising=False)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(capabilities))
        monkeypatch.setattr(torch.cuda, "device_count", lambda: len(capabilities))
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda i: capabilities[i])
        monkeypatch.setattr(nvml, "visible_capabilities", lambda: None)  # tests/runtime/test_nvml.py is about it

    return install


def test_all_gpus_are_detected(gpus):
    gpus((9, 0), (8, 0), (9, 0))
    assert {(9, "0a"), (8, "0")} == CompilationContext().TARGET_CUDA_ARCHS


@pytest.mark.parametrize("text", ["", "  ", " , "])
def test_blank_list_means_detection(gpus, monkeypatch, text):
    gpus((9, 0))
    monkeypatch.setenv(LIST, text)
    assert {(9, "0a")} == CompilationContext().TARGET_CUDA_ARCHS


def test_failed_detection_warns_once_and_is_tried_again(gpus, monkeypatch, caplog):
    gpus((9, 0))
    working = torch.cuda.get_device_capability

    def broken(index):
        raise RuntimeError("Cannot re-initialize CUDA in forked subprocess\nmore")

    monkeypatch.setattr(torch.cuda, "get_device_capability", broken)
    context = CompilationContext()
    with caplog.at_level(logging.WARNING, "flashinfer.jit"):
        assert set() == context.TARGET_CUDA_ARCHS and set() == context.TARGET_CUDA_ARCHS
    assert [r.message for r in caplog.records] == [
        "no CUDA target: Cannot re-initialize CUDA in forked subprocess. "
        "Set FLASHINFER_CUDA_ARCH_LIST, such as '9.0a', to compile."
    ]
    monkeypatch.setattr(torch.cuda, "get_device_capability", working)
    assert {(9, "0a")} == context.TARGET_CUDA_ARCHS


def test_no_gpu_is_no_news_until_something_is_compiled(gpus, caplog):
    gpus()
    context = CompilationContext()
    with caplog.at_level(logging.INFO, "flashinfer.jit"):
        assert set() == context.TARGET_CUDA_ARCHS
    assert caplog.records == []
    with pytest.raises(RuntimeError, match="No supported CUDA architectures found"):
        context.get_nvcc_flags_list()


def test_making_a_context_touches_nothing():
    code = (
        "import torch\n"
        "def fail(*a): raise SystemExit('CUDA was touched')\n"
        "torch.cuda._lazy_init = torch.cuda.is_available = torch.cuda.device_count = fail\n"
        "from flashinfer.compilation_context import CompilationContext; CompilationContext()"
    )
    run_python(["-c", code], check=True)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_real_gpu(monkeypatch):
    monkeypatch.delenv(LIST, raising=False)
    majors = {torch.cuda.get_device_capability(i)[0] for i in range(torch.cuda.device_count())}
    detected = CompilationContext().TARGET_CUDA_ARCHS
    assert {major for major, _ in detected} == majors
    if 9 in majors:
        assert (9, "0a") in detected


# -------------------------------------------------------------------------------- flags


def test_flags_of_all_targets_in_order(monkeypatch):
    monkeypatch.setenv(LIST, "12.0f 9.0a 8.0 10.0a")
    flags = CompilationContext().get_nvcc_flags_list()
    assert gencode(flags) == [
        "-gencode=arch=compute_80,code=sm_80",
        "-gencode=arch=compute_90a,code=sm_90a",
        "-gencode=arch=compute_100a,code=sm_100a",
        "-gencode=arch=compute_120f,code=sm_120f",
    ]
    assert flags[4:] == compilation_context.COMMON_NVCC_FLAGS


def test_flags_of_some_majors(monkeypatch):
    monkeypatch.setenv(LIST, "8.0 9.0a 12.0f")
    context = CompilationContext()
    assert gencode(context.get_nvcc_flags_list([12])) == ["-gencode=arch=compute_120f,code=sm_120f"]
    assert len(gencode(context.get_nvcc_flags_list(supported_major_versions=HOPPER_ON_MAJORS))) == 2


def test_no_target_fits(monkeypatch):
    monkeypatch.setenv(LIST, "8.0")
    with pytest.raises(RuntimeError) as error:
        CompilationContext().get_nvcc_flags_list(supported_major_versions=[9, 10, 11, 12])
    text = str(error.value)
    assert text.startswith("No supported CUDA architectures found for major versions [9, 10, 11, 12]")
    assert "Targets: 8.0 " in text


def test_sm107_as_family(monkeypatch):
    monkeypatch.setenv(LIST, "10.0f 10.7")
    context = CompilationContext()
    assert len(gencode(context.get_nvcc_flags_list([10]))) == 2
    mapped = context.get_nvcc_flags_list([10], map_sm107_to_100f=True)
    assert gencode(mapped) == ["-gencode=arch=compute_100f,code=sm_100f"]


def test_cutlass_does_not_know_sm107():
    """Check the answer that makes SGLang compile for the family 10.0f on 10.7: there is no CUTLASS that knows more."""
    assert compilation_context.cutlass_supports_sm107() is False


def test_flag_lists():
    assert gencode(sm90a_nvcc_flags) == ["-gencode=arch=compute_90a,code=sm_90a"]
    assert gencode(sm120f_nvcc_flags) == ["-gencode=arch=compute_120f,code=sm_120f"]
    for name in ("90a", "100a", "100f", "103a", "110a", "120a", "120f", "121a"):
        flags = f"sm{name}_nvcc_flags"
        assert getattr(flashinfer.jit, flags) is getattr(compilation_context, flags)


def test_shared_instance():
    from flashinfer.jit import current_compilation_context

    assert isinstance(current_compilation_context, CompilationContext)


@pytest.mark.parametrize("majors", [9, "9"])
def test_majors_are_a_list(majors):
    with pytest.raises(ValueError, match=rf"supported_major_versions must be a list of int, got {majors!r}"):
        CompilationContext().get_nvcc_flags_list(majors)
