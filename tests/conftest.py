# SPDX-License-Identifier: Apache-2.0
"""Fixtures and hooks of all tests: the devices present, reproducible random numbers, and skips for missing hardware."""

from __future__ import annotations

import os
from typing import Any, Iterator

import hypothesis
import pytest
import torch

from flashinfer._runtime.errors import MissingJITCacheError
from flashinfer.attention import options
from flashinfer.jit import JitSpec
from flashinfer.jit.attention.generate import AttentionModule
from flashinfer.prefill import planning, single
from flashinfer.testing import set_seed

from . import lanes

DEVICES = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]

_missing_modules: list[str] = []

_described = AttentionModule.spec


def _spec_of_tests(module: AttentionModule) -> JitSpec:
    """Describe variants that a test or an API declares without optimisation on the CPU: about half of the time.

    Modules of built-in variants, which have the same kernels and launchers, are compiled as users compile them.
    """
    spec = _described(module)
    if module.device == "cpu" and module.variant_decl and "-O0" not in spec.extra_cflags:
        spec.extra_cflags.append("-O0")
    return spec


AttentionModule.spec = _spec_of_tests

#: Each run draws the same examples, so that a change and not chance decides; ``make test-all`` draws new ones.
#: Machines of the CI are shared: no example has a deadline. Fixtures of a function hold paths and patches, not state.
hypothesis.settings.register_profile(
    "tests",
    derandomize=not os.environ.get("FLASHINFER_TEST_RANDOM"),
    deadline=None,
    suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture, hypothesis.HealthCheck.too_slow],
)
hypothesis.settings.load_profile("tests")


def pytest_addoption(parser: pytest.Parser) -> None:
    text = "of the k parametrisations of a test run about F * sqrt(k), the same ones every time"
    parser.addoption("--sample", type=float, metavar="F", help=text)
    text = "of the parametrisations of a test run enough to cover each pair of values, the same ones every time"
    parser.addoption("--pairs", action="store_true", help=text)


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "alone: measures time or counts threads, and runs while no other test does")
    config.addinivalue_line(
        "markers", "full: repeats on more shapes or targets what another test covers; make test-all"
    )


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Apply ``--sample`` or ``--pairs`` to the tests that -k and -m selected."""
    factor = config.getoption("sample")
    if factor or config.getoption("pairs"):
        kept = set(chosen := lanes.choose(items, factor))
        config.hook.pytest_deselected(items=[item for item in items if item not in kept])
        items[:] = chosen
    lanes.longest_first(items)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    return lanes.scheduler(config, log)


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> str:
    """Return each device of this machine in turn; an op test that takes the fixture runs once per device."""
    return request.param


@pytest.fixture(params=["fa2", "fa3"])
def either_backend(request: pytest.FixtureRequest, device: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """Let ``backend="auto"`` choose one prefill backend wherever it serves a call, then the other (SM90 only)."""
    if request.param == "fa2":
        monkeypatch.setattr(options, "has_fa3", lambda device: False)
    elif device == "cpu" or torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("needs a GPU of capability 9.0")
    else:
        for module in (planning, single):
            monkeypatch.setattr(module, "fa3_is_faster", lambda *_: True)
    return request.param


@pytest.fixture(autouse=True)
def seed() -> None:
    """Set the same seed before each test, whichever tests ran before."""
    set_seed(0)


def _is_cuda_out_of_memory(error: BaseException) -> bool:
    """Tell whether CUDA ran out of memory: torch has its own exception; native code raises RuntimeError."""
    if isinstance(error, torch.cuda.OutOfMemoryError):
        return True
    text = str(error).lower()
    return isinstance(error, RuntimeError) and "cuda" in text and "out of memory" in text


@pytest.hookimpl(wrapper=True)
def pytest_runtest_call(item: pytest.Item) -> Iterator[None]:
    """Skip, not fail, if the GPU is too small or ``FLASHINFER_DISABLE_JIT`` forbids building a module."""
    try:
        return (yield)
    except MissingJITCacheError as error:
        _missing_modules.append(f"{item.nodeid}: {error}")
        pytest.skip(f"module is not pre-built: {error}")
    except Exception as error:
        if not _is_cuda_out_of_memory(error):
            raise
        torch.cuda.empty_cache()
        pytest.skip(f"CUDA out of memory: {error}")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    if _missing_modules:
        terminalreporter.section("modules missing from the JIT cache")
        for line in _missing_modules:
            terminalreporter.line(line)
