# SPDX-License-Identifier: Apache-2.0
"""Registration with torch.library: eager calls go directly to the function, compiled graphs hold the op."""

from __future__ import annotations

import inspect
import time
import timeit
from typing import Optional

import pytest
import torch

import flashinfer
from flashinfer._runtime.errors import ArgumentError
from flashinfer.utils import register_custom_op, register_fake_op

calls = []


@register_custom_op("_test_scale_add", mutates_args=("out",))
def scale_add(
    out: torch.Tensor,
    x: torch.Tensor,
    bias: Optional[torch.Tensor],
    factor: float,
    negate: bool = False,
    times: int = 1,
    shift: Optional[float] = None,
) -> None:
    """out = factor * times * x + bias."""
    calls.append("scale_add")
    y = x.numpy() * (factor * times)  # numpy is opaque to a tracer, like a kernel
    y = -y if negate else y
    y = y if bias is None else y + bias.numpy()
    out.copy_(torch.from_numpy(y if shift is None else y + shift))


@register_custom_op("flashinfer::_test_halves", mutates_args=())
def halves(x: torch.Tensor, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    y = torch.from_numpy(x.numpy() * scale)
    n = x.shape[0] // 2
    return y[:n].clone(), y[n:].clone()


@register_fake_op("flashinfer::_test_halves")
def _halves_fake(x, scale):
    n = x.shape[0] // 2
    return x.new_empty(n), x.new_empty(x.shape[0] - n)


def model(x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(x)
    scale_add(out, x + 1, bias, 2.0)
    scale_add(out, out, None, 0.5, negate=True, times=2, shift=1.0)
    a, b = halves(out, 3.0)
    return torch.cat([b, a]) * 2


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiles_in_one_graph(backend):
    compiled = torch.compile(model, fullgraph=True, backend=backend)
    for n in (3, 4, 7):  # later sizes make the shape symbolic
        x, bias = torch.randn(n), torch.randn(n)
        torch.testing.assert_close(compiled(x, bias), model(x, bias))


def test_graph_holds_the_op():
    graphs = []

    def look(graph, inputs):
        graphs.append(graph)
        return graph.forward

    torch.compile(model, fullgraph=True, backend=look)(torch.ones(4), torch.ones(4))
    targets = [node.target for node in graphs[0].graph.nodes]
    assert targets.count(torch.ops.flashinfer._test_scale_add.default) == 2
    assert torch.ops.flashinfer._test_halves.default in targets


def test_export():
    class Module(torch.nn.Module):
        def forward(self, x, bias):
            return model(x, bias)

    x, bias = torch.randn(4), torch.randn(4)
    program = torch.export.export(Module(), (x, bias))
    torch.testing.assert_close(program.module()(x, bias), model(x, bias))


def test_eager_call_skips_the_dispatcher():
    calls.clear()
    out = torch.empty(2)
    with torch.profiler.profile() as profile:
        assert scale_add(out, torch.ones(2), None, factor=2.0) is None
    assert out.tolist() == [2, 2] and calls == ["scale_add"]
    assert not any("_test_scale_add" in event.name for event in profile.events())


def test_op_is_callable_by_its_torch_name():
    out = torch.empty(2)
    torch.ops.flashinfer._test_scale_add(out, torch.ones(2), torch.ones(2), 3.0, negate=True)
    assert out.tolist() == [-2, -2]


def test_schema_is_that_of_the_function():
    assert str(torch.ops.flashinfer._test_scale_add.default._schema) == (
        "flashinfer::_test_scale_add(Tensor(a0!) out, Tensor x, Tensor? bias, float factor, bool negate=False, "
        "SymInt times=1, float? shift=None) -> ()"
    )


def test_wrapper_keeps_the_metadata():
    assert inspect.isfunction(scale_add) and scale_add.__doc__ == "out = factor * times * x + bias."
    assert (scale_add.__name__, scale_add.__module__) == ("scale_add", __name__)
    assert list(inspect.signature(scale_add).parameters)[:3] == ["out", "x", "bias"]


def test_meta_tensors_run_the_fake():
    out = torch.empty(2, device="meta")
    assert torch.ops.flashinfer._test_scale_add(out, out, None, 1.0) is None
    a, b = torch.ops.flashinfer._test_halves(torch.empty(5, device="meta"), 1.0)
    assert (a.shape, b.shape, b.device.type) == ((2,), (3,), "meta")


def test_torch_approves_of_the_registration():
    x = torch.randn(4)
    arguments = (torch.empty(4), x, x, 2.0)
    tests = ("test_schema", "test_faketensor")
    torch.library.opcheck(torch.ops.flashinfer._test_scale_add.default, arguments, test_utils=tests)
    torch.library.opcheck(torch.ops.flashinfer._test_halves.default, (x, 2.0), test_utils=tests)


def test_registering_again_replaces_the_function():
    def first(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    def second(x: torch.Tensor) -> torch.Tensor:
        return x + 2

    def other(x: torch.Tensor, y: int) -> torch.Tensor:
        return x + y

    register_custom_op("_test_again", first, mutates_args=())
    register_fake_op("_test_again", torch.empty_like)
    replaced = register_custom_op("_test_again", second, mutates_args=())
    assert replaced(torch.zeros(1)).item() == torch.ops.flashinfer._test_again(torch.zeros(1)).item() == 2
    assert torch.compile(replaced, fullgraph=True, backend="eager")(torch.zeros(1)).item() == 2
    with pytest.raises(ArgumentError, match=r"_test_again must have schema \(Tensor x\) -> Tensor"):
        register_custom_op("_test_again", other, mutates_args=())


def test_explicit_fake_of_an_op_that_returns_nothing():
    seen = []

    @register_custom_op("_test_zero", mutates_args=("x",))
    def zero(x: torch.Tensor) -> None:
        x.zero_()

    register_fake_op("_test_zero", lambda x: seen.append(tuple(x.shape)))
    torch.ops.flashinfer._test_zero(torch.empty(3, device="meta"))
    assert seen == [(3,)]


def test_explicit_schema_and_device():
    def double(x):
        return x * 2

    schema = "(Tensor x) -> Tensor"
    f = register_custom_op(name="_test_double", fn=double, mutates_args=(), device_types="cuda", schema=schema)
    assert f(torch.ones(1)).item() == 2  # eager: the function itself decides
    with pytest.raises(NotImplementedError, match="CPU"):
        torch.ops.flashinfer._test_double(torch.ones(1))


def test_arguments_of_another_kind():
    """Check that errors name the argument; native code would report: argument 3 is a ffi.SmallStr."""

    def scaled(x: torch.Tensor, y: Optional[torch.Tensor], factor: float, count: int, name: str) -> None:
        raise TypeError("argument 3 is of another type")

    def broken(x: torch.Tensor) -> None:
        raise RuntimeError("of its own")

    x = torch.ones(1)
    f = register_custom_op("_test_kinds", scaled, mutates_args=())
    for arguments, text in (
        ((None, None, 1.0, 2, "a"), "_test_kinds: x must be Tensor.*, got a NoneType"),
        ((x, [x], 1.0, 2, "a"), "_test_kinds: y must be Tensor.*, got a list"),
        ((x, None, "1", 2, "a"), "_test_kinds: factor must be float.*, got a str"),
        ((x, None, x, 2, "a"), "_test_kinds: factor must be float.*, got a Tensor"),
        ((x, None, 1, 2.0, "a"), "_test_kinds: count must be int.*, got a float"),
        ((x, None, 1, 2, None), "_test_kinds: name must be str.*, got a NoneType"),
        ((x, x, 1, 2, "a"), "argument 3 is of another type"),
    ):
        with pytest.raises(TypeError, match=text):
            f(*arguments)
    with pytest.raises(ArgumentError, match=r"_test_kinds: y must be on the CPU or a CUDA device.*, got meta"):
        f(x, x.to("meta"), 1.0, 2, "a")
    with pytest.raises(ArgumentError, match=r"rmsnorm: input must be on the CPU or a CUDA device.*, got meta"):
        flashinfer.rmsnorm(torch.ones(2, 8, device="meta"), torch.ones(8, device="meta"))
    with pytest.raises(RuntimeError, match=r"^of its own$"):
        register_custom_op("_test_broken", broken, mutates_args=())(x)


def test_bad_names():
    with pytest.raises(ArgumentError, match="name must be an identifier or flashinfer::identifier, got 'other::op'"):
        register_custom_op("other::op", lambda: None, mutates_args=())
    with pytest.raises(ArgumentError, match=r"name must be an op .*, got '_test_unknown'"):
        register_fake_op("_test_unknown", lambda: None)


@pytest.mark.alone
def test_cost():
    def nothing(out: torch.Tensor, x: torch.Tensor, eps: float, flag: bool) -> None:
        return None

    times = []
    for i in range(20):
        started = time.perf_counter()
        wrapped = register_custom_op(f"_test_cost_{i}", nothing, mutates_args=("out",))
        times.append(time.perf_counter() - started)
    assert min(times) < 2e-3  # 0.4 ms on an idle core

    x = torch.ones(1)
    functions = [lambda: nothing(x, x, 1.0, True), lambda: wrapped(x, x, 1.0, True)]
    rounds = [[timeit.timeit(f, number=1000) * 1e3 for f in functions] for _ in range(40)]
    plain, called = (min(column) for column in zip(*rounds, strict=True))
    assert called - plain < 0.6  # us; 0.1 on an idle core
