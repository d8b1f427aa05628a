# SPDX-License-Identifier: Apache-2.0
"""benchmarks/bench_serve.py: its limits are those of the weights, and each case runs on a small model."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import replace
from types import SimpleNamespace
from xml.etree import ElementTree

import pytest
import torch

from .benchmark_path import BENCHMARKS as BENCHMARKS  # isort: skip
import bench_serve
import serve_picture
import serve_profile
import serve_transformers
from bench_serve import MODELS, active_parameters, limit
from serve.engine import Engine, Request
from serve.experts import Experts
from serve.model import Llama, random_weights, shapes_of
from serve.recurrent import Recurrent

_NAMES = ("gate_proj", "up_proj", "down_proj")
_FEW = Experts(8, 2, 64, True, "mlp", _NAMES)
_SHARED = replace(_FEW, shared_size=32)
_HYBRID = {"recurrent": Recurrent(1, 2, 4, frozenset({0})), "has_head_norms": True}


@pytest.mark.parametrize("experts, more", [(None, {}), (_FEW, {}), (_SHARED, _HYBRID)])
def test_weights_that_are_read(experts, more):
    config = replace(MODELS["tiny"], experts=experts, **more)
    shapes = {name: torch.Size(shape).numel() for name, shape in shapes_of(config).items() if len(shape) > 1}
    layers = sum(count for name, count in shapes.items() if ".layers." in name)
    of_token, read = active_parameters(config, tokens=10_000)
    assert read == pytest.approx(layers)
    if experts is None:
        assert of_token == layers
    else:
        idle = sum(count for name, count in shapes.items() if ".experts." in name) * 6 / 8
        assert of_token == layers - idle
        assert active_parameters(config, tokens=1)[1] == pytest.approx(layers - idle)


def test_limit_of_a_known_model():
    """A decode step of Llama-3.1-8B reads 15.0 GB of weights, and 64 requests of 2048 tokens 17.2 GB of pages."""
    seconds = limit(MODELS["llama-3.1-8b"], torch.bfloat16, requests=64, tokens=1, keys=2048)
    assert seconds * 4.25e12 == pytest.approx(15.0e9 + 17.2e9, rel=0.01)


def test_limit_of_eight_bits():
    """Weights of layers take half as long, the output matrix and pages as long as before."""
    sizes = {"requests": 64, "tokens": 1, "keys": 2048}
    config = MODELS["llama-3.1-8b"]
    wide, narrow = (limit(config, torch.bfloat16, **sizes, fp8=fp8) * 4.25e12 for fp8 in (False, True))
    assert wide - narrow == pytest.approx(active_parameters(config, 64)[1], rel=1e-3)
    wide, narrow = (limit(config, torch.bfloat16, 8, 2048, 2048, fp8) for fp8 in (False, True))
    assert wide / narrow == pytest.approx(1.9, rel=0.02), "products at twice the rate, attention not"


def test_limit_of_states():
    """A request of Qwen3-Next has 36 layers of 32 states of 64 KB, which a step reads and writes."""
    config = MODELS["qwen3-next-80b-a3b"]
    one, many = (limit(config, torch.bfloat16, n, 1, 0) * 4.25e12 for n in (1, 2))
    weights = 2 * (active_parameters(config, 2)[1] - active_parameters(config, 1)[1])
    assert many - one - weights == pytest.approx(2 * 36 * 32 * 65536, rel=1e-6)


WORDS = ["--device", "cpu", "--keys", "24", "--steps", "2", "--interval", "0"]


def test_cases_run(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(bench_serve, "MIXED_REQUESTS", 3)
    monkeypatch.setattr(bench_serve, "MIXED_TOKENS", 2)
    file = tmp_path / "record.json"
    cases = ["--cases", "decode2,prefill,mixed", "--profile", "--no-transformers", "--json", str(file)]
    results = bench_serve.main([*WORDS, *cases])
    assert 0 < results["decode2"]["of_limit"] < 1 and 0 < results["prefill"]["of_limit"] < 1
    assert results["mixed"]["tokens_per_s"] == pytest.approx(6 / results["mixed"]["seconds"], rel=0.01)
    text = capsys.readouterr().out
    assert "decode2" in text and "lists and page tables" in text and "no kernels: the device is the CPU" in text
    assert "transformers was not measured: --no-transformers was given" in text
    record = json.loads(file.read_text())
    assert set(record["cases"]["decode2"]["profile"]["host_us"]) >= {"plan", "launches one by one", "engine"}
    serve_picture.main([str(file), str(tmp_path / "step.svg")])
    assert "tiny, bfloat16: decode2" in (tmp_path / "step.svg").read_text()


def test_weights_of_eight_bits(capsys):
    results = bench_serve.main([*WORDS, "--cases", "decode2", "--fp8", "--no-transformers"])
    assert results["decode2"]["of_limit"] > 0 and "e4m3 blocks" in capsys.readouterr().out


@pytest.mark.skipif(serve_transformers.why_not() is not None, reason="needs transformers 5")
def test_beside_transformers(capsys):
    results = bench_serve.main([*WORDS, "--cases", "decode2,prefill"])
    for case in results.values():
        assert case["times_as_fast"] == pytest.approx(case["transformers_us"] / case["step_us"])
    assert "transformers_us" in capsys.readouterr().out


def test_without_transformers(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "transformers", None)
    bench_serve.main([*WORDS, "--cases", "decode1"])
    assert "transformers was not measured: transformers cannot be imported: " in capsys.readouterr().out
    monkeypatch.setitem(sys.modules, "transformers", SimpleNamespace(__version__="4.57.1"))
    assert serve_transformers.why_not() == "transformers 4.57.1 is too old: 5 or newer is needed"


@pytest.mark.skipif(serve_transformers.why_not() is not None, reason="needs transformers 5")
@pytest.mark.parametrize("experts, more", [(None, {}), (_FEW, {"has_head_norms": True}), (_SHARED, _HYBRID)])
def test_the_model_that_is_compared_is_the_same(experts, more):
    """Check logits of both models in float32, after a prompt and in the decode step that is timed."""
    config = replace(MODELS["tiny"], experts=experts, **more)
    other = serve_transformers.reference_model(config, torch.float32, "cpu")
    model = Llama(config, random_weights(config, "cpu"), torch.float32, "cpu")
    seen, forward = [], model.forward
    model.forward = lambda *arguments: seen.append(forward(*arguments)) or seen[-1]
    engine, request = Engine(model, run_ahead=False), Request([0] * 9, 2)
    engine.submit(request)
    while engine.is_busy:
        engine.step()
    with torch.inference_mode():
        expected = other(torch.tensor([request.tokens[:-1]])).logits[0, -2:]
    torch.testing.assert_close(torch.cat(seen), expected, rtol=1e-4, atol=1e-4)
    assert serve_transformers.decode_seconds(other, 2, 5, 1) > 0 and serve_transformers.prefill_seconds(other, 2, 5) > 0


def test_break_down():
    """Kernels that overlap count once, gaps are times without any, names are grouped by what they do."""
    spans = [
        (0.0, 10.0, "void flashinfer::DecodeKernel<128>(P)"),
        (8.0, 14.0, "nvjet_hsh_128x64"),  # begins before the other ends
        (20.0, 21.0, "void flashinfer::RMSNormSmallKernel<__nv_bfloat16>"),
        (23.0, 24.0, "void at::native::vectorized_elementwise_kernel<4>"),
        (12.0, 13.0, "void flashinfer::recurrent::StepOneKernel<float>"),  # within another
    ]
    found = serve_profile.break_down(spans, steps=2)
    assert (found.span, found.kernels, found.gaps) == (12.0, 2, 4.0)
    assert (found.longest_gap, found.notable_gaps) == (6.0, 3.0)
    groups = {"attention": 5.0, "products": 2.0, "norms, RoPE, pages, activation": 0.5, "recurrent layers": 0.0}
    assert found.groups == {**groups, serve_profile.OTHERS: 0.5}
    assert sum(found.groups.values()) + found.gaps == found.span
    assert found.names["flashinfer::DecodeKernel"] == 5.0


@pytest.mark.parametrize(
    "name, group",
    [
        ("void flashinfer::sampling::TopKTopPKernel<float>", "sampling"),
        ("void flashinfer::PrefillSm90Kernel<X>", "attention"),
        ("void flashinfer::gemm::GemmSwappedSm90Kernel<X>", "products"),
        ("void flashinfer::moe::SortAndPermuteKernel<X>", "experts, not their products"),
        ("void flashinfer::recurrent::ScanChunksSm90Kernel<X>", "recurrent layers"),
        ("void flashinfer::norm::QkRMSNormRopeKernel", "norms, RoPE, pages, activation"),
        ("Memcpy HtoD (Pinned -> Device)", "copies"),
    ],
)
def test_groups_of_kernels(name, group):
    assert serve_profile.group_of(name) == group


def test_phases_of_the_host(monkeypatch):
    """A phase within another counts once, and everything is as it was afterwards."""

    class Inner:
        def sleep(self):
            time.sleep(0.02)

        @staticmethod
        def both():
            time.sleep(0.01)
            Inner().sleep()

    before = dict(Inner.__dict__)
    monkeypatch.setattr(serve_profile, "PHASES", (("inner", Inner, "sleep"), ("outer", Inner, "both")))
    phases = serve_profile.host_phases(lambda: Inner.both(), steps=1)
    assert phases["inner"] >= 20_000 and 10_000 <= phases["outer"] < phases["inner"] + 10_000
    assert set(phases) == {"inner", "outer", "engine"} and dict(Inner.__dict__) == before


def test_unknown_case_is_refused(capsys):
    with pytest.raises(SystemExit):
        bench_serve.parse(["--cases", "decode"])
    assert "must be prefill, mixed or decodeN, got 'decode'" in capsys.readouterr().err


def test_picture():
    """Bars of a case share a scale: a part is as wide as its share of the longer one."""
    device = {"device_us": {"attention": 600.0, "products": 300.0}, "gaps_us": 100.0}
    profile = {**device, "host_us": {"plan": 200.0, "wait for tokens": 50.0}}
    record = {
        "model": "m",
        "weights": "e4m3 blocks",
        "cases": {"decode1": {"profile": profile}, "mixed": {"seconds": 1}},
    }
    root = ElementTree.fromstring(serve_picture.draw([record]))
    widths = {}
    for rect in root.iter("{http://www.w3.org/2000/svg}rect"):
        if len(rect):
            widths[rect[0].text.split(":")[0]] = float(rect.get("width"))
    whole = serve_picture.WIDTH - serve_picture.LEFT - 10
    assert widths == {
        "attention": whole * 0.6, "products": whole * 0.3, "gaps": whole * 0.1, "plan": whole * 0.2,
        "wait for tokens": whole * 0.05,
    }  # fmt: skip
    with pytest.raises(ValueError, match="no case of the records has a profile"):
        serve_picture.draw([{**record, "cases": {"mixed": {}}}])
