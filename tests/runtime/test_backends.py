# SPDX-License-Identifier: Apache-2.0
"""supported_compute_capability and backend_requirement. CUDA devices are simulated by patching the probe in utils."""

from __future__ import annotations

import asyncio
import functools
import inspect
import pickle
import threading
import timeit

import pytest
import torch

from flashinfer import scale, utils
from flashinfer._runtime.arch import ALL_CCS, CPU, HOPPER_ON, TURING_ON
from flashinfer._runtime.errors import BackendSupportedError
from flashinfer.utils import backend_requirement, supported_compute_capability


@pytest.fixture
def pretend(monkeypatch):
    """Return pretend(90), which gives every tensor's device that compute capability."""

    def patch(cc):
        monkeypatch.setattr(utils, "get_compute_capability", lambda device: divmod(cc, 10))

    return patch


@supported_compute_capability([80, 90])
def _check_old(x, n=1, *, backend="auto"):
    return True


@supported_compute_capability(HOPPER_ON)
def _check_new(x, n=1, *, backend="auto"):
    if n > 4:
        raise ValueError(f"matmul: n is {n}, expected at most 4")
    return n != 3


def _check_any(x, n=1, *, backend="auto"):
    if n < 0:
        raise ValueError(f"matmul: n is {n}, expected at least 0")
    return n != 2


def _newest_first(suitable_backends, x, n=1, *, backend="auto"):
    return sorted(suitable_backends, reverse=n == 0)


@backend_requirement({"old": _check_old, "new": _check_new}, common_check=_check_any, heuristic_func=_newest_first)
def matmul(x, n=1, *, backend="auto"):
    """Says which backend ran."""
    return matmul.suitable_auto_backends[0] if backend == "auto" else backend


@supported_compute_capability([75, 90])
def _check_clamp(x, lo, hi=1.0):
    if lo > hi:
        raise ValueError(f"clamp: lo is {lo}, expected at most hi = {hi}")
    return lo != 0.5


@backend_requirement({}, common_check=_check_clamp)
def clamp(x, lo, hi=1.0):
    return x.clamp(lo, hi)


@supported_compute_capability([CPU, 90])
def _check_shift(x, by, backend="plain"):
    return True


@backend_requirement(
    {"plain": _check_shift, "fast": supported_compute_capability([90])(lambda x, by, backend="": True)}
)
def shift(x, by, backend="plain"):
    return x + by


# -------------------------------------------------------------------------------- the capability decorator


def test_capability_decorator_attaches_a_check():
    assert _check_old.is_compute_capability_supported(90)
    assert not _check_old.is_compute_capability_supported(75)
    assert _check_old._supported_ccs == {80, 90}
    every = supported_compute_capability(cc for cc in ALL_CCS)(lambda: True)
    assert all(every.is_compute_capability_supported(cc) for cc in TURING_ON)


@pytest.mark.parametrize(
    "ccs, text",
    [
        (90, "must be an iterable"),
        (None, "must be an iterable"),
        ([True], r"supported_ccs\[0\] must be an integer.*got bool"),
        ([8.0], r"supported_ccs\[0\] must be an integer"),
        (["80"], r"supported_ccs\[0\] must be an integer"),
        ("80", r"supported_ccs\[0\] must be an integer"),
        ([80, None], r"supported_ccs\[1\] must be an integer"),
    ],
)
def test_capability_decorator_wants_ints(ccs, text):
    with pytest.raises(TypeError, match=text):
        supported_compute_capability(ccs)


# -------------------------------------------------------------------------------- an API without backends


def test_common_check_decides(pretend):
    pretend(90)
    assert clamp(torch.ones(2), 0.0).tolist() == [1, 1]
    with pytest.raises(ValueError, match=r"clamp: lo is 2.0, expected at most hi = 1.0"):
        clamp(torch.ones(2), lo=2.0)
    with pytest.raises(ValueError, match="Problem size is not supported for clamp"):
        clamp(torch.ones(2), 0.5)


def test_capability_is_refused(pretend):
    pretend(80)
    with pytest.raises(BackendSupportedError, match="clamp does not support compute capability 80"):
        clamp(torch.ones(2), 0.0)


def test_cpu_tensor_is_refused_by_a_cuda_api():
    for error in (ValueError, AssertionError):
        with pytest.raises(error, match="clamp: x must be on a CUDA device, got cpu"):
            clamp(torch.ones(2), 0.0)
    with pytest.raises(ValueError, match="CUDA"):
        matmul(torch.ones(2), backend="old")
    with pytest.raises(ValueError, match="CUDA"):
        matmul(torch.ones(2), backend="auto")


def test_call_without_tensors_has_no_capability():
    assert matmul(None, backend="old") == "old"


def test_tensor_given_by_keyword_counts(pretend):
    pretend(80)
    with pytest.raises(BackendSupportedError):
        clamp(lo=0.0, x=torch.ones(2))


def test_neither_backends_nor_common_check():
    @backend_requirement({})
    def nothing(x):
        return x

    with pytest.raises(
        ValueError, match="Invalid @backend_requirement decorator usage: no backend choices and no common_check for "
    ):
        nothing(1)
    assert nothing(1, skip_check=True) == 1


# -------------------------------------------------------------------------------- named backends


def test_named_backend_runs(pretend):
    pretend(90)
    assert matmul(torch.ones(1), backend="old") == "old"
    assert matmul(torch.ones(1), 1, backend="new") == "new"


def test_unknown_backend(pretend):
    """Check that the error lists only backends that run on the device of the tensors."""
    with pytest.raises(BackendSupportedError, match="matmul does not support backend 'best'; usable here: old, new"):
        matmul(torch.ones(1), backend="best")
    pretend(80)
    with pytest.raises(BackendSupportedError, match=r"backend 'best' with capability 80; usable here: old$"):
        matmul(torch.ones(1), backend="best")


def test_backend_on_the_wrong_gpu(pretend):
    pretend(80)
    with pytest.raises(
        BackendSupportedError, match="does not support backend 'new' with capability 80; usable here: old"
    ):
        matmul(torch.ones(1), backend="new")


def test_common_then_backend_check(pretend):
    pretend(90)
    with pytest.raises(ValueError, match="n is -1"):
        matmul(torch.ones(1), -1, backend="new")
    with pytest.raises(ValueError, match="Problem size is not supported for matmul"):
        matmul(torch.ones(1), 2, backend="new")
    with pytest.raises(ValueError, match="Problem size is not supported for matmul with backend 'new'"):
        matmul(torch.ones(1), 3, backend="new")
    with pytest.raises(ValueError, match="n is 5, expected at most 4"):
        matmul(torch.ones(1), 5, backend="new")


def test_cpu_is_a_capability():
    assert shift(torch.ones(1), 2).tolist() == [3]
    with pytest.raises(BackendSupportedError, match="backend 'fast' with capability cpu; usable here: plain"):
        shift(torch.ones(1), 2, backend="fast")
    with pytest.raises(ValueError, match="shift: x must be on the CPU or a CUDA device, got meta"):
        shift(torch.ones(1, device="meta"), 2)
    assert shift.is_compute_capability_supported(CPU) and not matmul.is_compute_capability_supported(CPU)


def test_undeclared_check_inherits_from_the_common_one(pretend):
    @backend_requirement(
        {"a": lambda x, backend="a": True}, common_check=supported_compute_capability([90])(lambda *a: True)
    )
    def f(x, backend="a"):
        return backend

    assert not f.is_backend_supported("a", 80)
    pretend(80)
    with pytest.raises(BackendSupportedError):
        f(torch.ones(1))


def test_backends_need_a_parameter():
    with pytest.raises(TypeError, match="no parameter 'backend'"):
        backend_requirement({"old": _check_old})(lambda x: x)
    with pytest.raises(TypeError, match="skip_check"):
        backend_requirement({}, _check_any)(lambda skip_check: None)


# -------------------------------------------------------------------------------- backend="auto"


def test_auto_orders_what_suits(pretend):
    pretend(90)
    assert matmul(torch.ones(1)) == "new"
    assert matmul.suitable_auto_backends == ["new", "old"]
    assert matmul(torch.ones(1), 0) == "old"
    assert matmul.suitable_auto_backends == ["old", "new"] and matmul.suitable_auto_backends[:1] == ["old"]


def test_auto_leaves_out_what_does_not(pretend):
    pretend(90)
    assert matmul(torch.ones(1), 5) == "old"  # the check of "new" raises
    assert matmul(torch.ones(1), 3) == "old"  # the check of "new" returns False
    pretend(80)
    assert matmul(torch.ones(1)) == "old"
    assert list(matmul.suitable_auto_backends) == ["old"] and len(matmul.suitable_auto_backends) == 1


def test_auto_finds_nothing(pretend):
    pretend(100)
    with pytest.raises(BackendSupportedError, match="No suitable auto backends found for matmul"):
        matmul(torch.ones(1), 5)
    with pytest.raises(ValueError, match="n is -1"):
        matmul(torch.ones(1), -1)


def test_auto_without_heuristic_keeps_the_order_of_the_checks(pretend):
    @backend_requirement({"b": lambda x, backend="auto": True, "a": lambda x, backend="auto": True})
    def f(x, backend="auto"):
        return list(f.suitable_auto_backends)

    assert f(torch.ones(1)) == ["b", "a"]


def test_auto_is_reentrant():
    @backend_requirement({"odd": lambda n, backend="auto": n % 2 == 1, "even": lambda n, backend="auto": n % 2 == 0})
    def down(n, backend="auto"):
        below = down(n - 1) if n else []
        return [down.suitable_auto_backends[0], *below]

    assert down(3) == ["odd", "even", "odd", "even"]
    assert down.suitable_auto_backends == ["odd"]


def test_auto_is_private_to_a_thread_and_a_task():
    both = threading.Barrier(2)
    odd, even = (lambda n, meet, backend="auto": n % 2 == 1), (lambda n, meet, backend="auto": n % 2 == 0)

    @backend_requirement({"odd": odd, "even": even})
    def f(n, meet, backend="auto"):
        meet()
        return f.suitable_auto_backends[0]

    results = {}
    threads = [threading.Thread(target=lambda n=n: results.update({n: f(n, both.wait)})) for n in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert results == {1: "odd", 2: "even"}

    async def task(n):
        f(n, lambda: None)
        await asyncio.sleep(0)
        return f.suitable_auto_backends[0]

    async def tasks():
        return await asyncio.gather(task(1), task(2))

    assert asyncio.run(tasks()) == ["odd", "even"]


# -------------------------------------------------------------------------------- skip_check


def test_skip_check_skips(pretend):
    pretend(75)
    assert clamp(torch.ones(2), 2.0, skip_check=True).tolist() == [1, 1]
    assert matmul(torch.ones(1), -1, backend="new", skip_check=True) == "new"
    pretend(90)
    assert matmul(torch.ones(1), -1, skip_check=True) == "new"  # the common check would reject -1


def test_skip_check_is_faster():
    @backend_requirement({"plain": _check_shift})
    def nothing(x, by, backend="plain"):
        return None

    x = torch.ones(1)
    calls = [lambda: nothing.__wrapped__(x, 2), lambda: nothing(x, 2), lambda: nothing(x, 2, skip_check=True)]
    rounds = [[timeit.timeit(call, number=1000) * 1e3 for call in calls] for _ in range(40)]  # us per call, interleaved
    plain, checked, skipped = (min(column) for column in zip(*rounds, strict=True))
    assert skipped < checked
    # An idle core takes 0.8 and 0.1 us more than the function itself; the bounds allow for a busy one.
    assert checked - plain < 8 and skipped - plain < 2


# -------------------------------------------------------------------------------- queries


def test_is_backend_supported():
    assert matmul.is_backend_supported("old") and not matmul.is_backend_supported("best")
    assert matmul.is_backend_supported("new", 100) and not matmul.is_backend_supported("old", 100)
    with pytest.raises(ValueError, match="Invalid is_backend_supported call: no backend choices for clamp"):
        clamp.is_backend_supported("old")


def test_is_compute_capability_supported():
    assert matmul.is_compute_capability_supported(80) and matmul.is_compute_capability_supported(100)
    assert not matmul.is_compute_capability_supported(75)
    assert clamp.is_compute_capability_supported(75) and not clamp.is_compute_capability_supported(80)
    undeclared = backend_requirement({}, common_check=lambda x: True)(lambda x: x)
    text = (
        "Invalid is_compute_capability_supported call: <lambda> does not have is_compute_capability_supported decorator"
    )
    with pytest.raises(ValueError, match=text):
        undeclared.is_compute_capability_supported(90)


def test_has_backend():
    assert matmul.has_backend("old") and not matmul.has_backend("auto") and not clamp.has_backend("old")
    assert matmul.has_backend_choices() and not clamp.has_backend_choices()


# -------------------------------------------------------------------------------- still a plain function


def test_wrapper_is_a_plain_function():
    assert inspect.isfunction(matmul) and matmul.__doc__ == "Says which backend ran."
    assert (matmul.__name__, matmul.__qualname__, matmul.__module__) == ("matmul", "matmul", __name__)
    assert list(inspect.signature(matmul).parameters) == ["x", "n", "backend"]
    assert pickle.loads(pickle.dumps(matmul)) is matmul
    assert "def matmul" in inspect.getsource(matmul)


@pytest.mark.parametrize(
    "func, args, kwargs",
    [
        (lambda a, b=2, *c, d, e=5, **f: (a, b, c, d, e, f), (1,), {"d": 4, "z": 9}),
        (lambda a, b=2, *c, d, e=5, **f: (a, b, c, d, e, f), (1, 7, 8), {"d": 4, "e": 0}),
        (lambda a, b=2, /, c=3: (a, b, c), (1,), {"c": 0}),
        (lambda: "nothing", (), {}),
    ],
)
def test_every_kind_of_parameter(func, args, kwargs):
    seen = []
    wrapper = backend_requirement({}, common_check=lambda *a, **k: seen.append((a, k)) or True)(func)
    assert wrapper(*args, **kwargs) == func(*args, **kwargs)
    assert func(*seen[0][0], **seen[0][1]) == func(*args, **kwargs)


def test_wrong_calls_are_type_errors():
    for args, kwargs in [((), {}), ((1, 2, 3, 4), {}), ((1, 2), {"lo": 3}), ((1, 2), {"high": 3})]:
        with pytest.raises(TypeError, match=r"clamp\(\)"):
            clamp(*args, **kwargs)


def test_defaults_of_a_decorated_function():
    @functools.wraps(shift.__wrapped__)
    def logged(*args, **kwargs):
        return shift.__wrapped__(*args, **kwargs)

    assert backend_requirement({"plain": _check_shift})(logged)(torch.ones(1), 2).tolist() == [3]


def test_torch_compile_traces_through():
    def model(x):
        return shift(x, 2) + shift(x, 1, skip_check=True)

    x = torch.arange(3.0)
    assert torch.equal(torch.compile(model, fullgraph=True, backend="eager")(x), model(x))

    checks = {"small": lambda x, backend="auto": len(x) < 4, "big": lambda x, backend="auto": True}

    @backend_requirement(checks)
    def double_or_triple(x, backend="auto"):
        return x * 2 if double_or_triple.suitable_auto_backends[0] == "small" else x * 3

    compiled = torch.compile(double_or_triple, fullgraph=True, backend="eager")
    assert compiled(torch.ones(3)).tolist() == [2, 2, 2]
    assert compiled(torch.ones(4)).tolist() == [3, 3, 3, 3]


def test_the_queries_of_the_tutorial():
    """Check that scale, which has no backends, answers each line of the tutorial with a boolean."""
    answers = [
        scale.is_backend_supported("cutlass"),
        scale.is_backend_supported("cutlass", cc=90),
        scale.is_compute_capability_supported(90),
        scale.has_backend("cutlass"),
        scale.has_backend_choices(),
    ]
    assert answers == [False, False, True, False, False]
