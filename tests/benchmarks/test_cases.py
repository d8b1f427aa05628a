# SPDX-License-Identifier: Apache-2.0
"""The registered benchmark cases: every op has one, and each agrees with the op's reference."""

import shlex

import pytest
import torch

from flashinfer._compat.unsupported import is_unsupported
from flashinfer.aot import FAMILIES
from flashinfer.fi_trace import traced_functions

from .benchmark_path import BENCHMARKS  # isort: skip
import flashinfer_benchmark
import harness
import measure

CASES = harness.load_cases()
SMALLER = {"nnz": 3, "batch_size": 2, "hidden_size": 136, "size": 1000, "num_heads": 2, "seq_len": 256}
SMALLER |= {"s_qo": 20, "s_kv": 50}


def test_every_family_has_a_benchmark():
    without = [family for family in FAMILIES if not (BENCHMARKS / f"bench_{family}.py").exists()]
    assert without == ["api_log_stats"], "a part of the log"


@pytest.mark.parametrize(
    "family", ["activation", "concat_ops", "gemm", "norm", "page", "quantization", "rope", "scale"]
)
def test_every_function_has_a_case(family):
    functions = {name: f for name, f in traced_functions.items() if name.startswith(f"flashinfer.{family}.")}
    names = [name.removesuffix(".run").rpartition(".")[2] for name, f in functions.items() if not is_unsupported(f)]
    assert names and [name for name in names if name not in CASES] == []


@pytest.mark.parametrize("name", CASES)
def test_case_agrees_with_the_reference(device, name):
    case = CASES[name]
    if not case.points[device]:
        pytest.skip(f"{name} has no {device} kernel")
    point = {key: SMALLER.get(key, value) for key, value in case.points[device][-1].items()}
    if device == "cpu" and {"num_qo_heads", "dtype"} <= set(point):  # attention: modules that most of its tests use
        point |= {key: 64 for key in point if key.startswith("head_dim")} | {"dtype": torch.float16}
    bench = case.make(device, point)
    for backend, run in bench.backends(device).items():
        if backend != "torch":
            measure.check(bench, run, f"{name} {backend}")
    if bench.baseline:
        with torch.device("meta"):  # a tensor allocated without device= then fails on the CPU too
            bench.baseline(*bench.args)
    assert bench.bytes > 0


LENGTHS = "--batch_size 3 --s_kv 70 --num_qo_heads 8"
HEADS = "--num_kv_heads 2 --head_dim_qk 64 --head_dim_vo 64 --q_dtype bfloat16 --out_dtype bf16"
LARGE = HEADS.replace("64", "128")  # the module of the case batch_decode_fp8_cache


@pytest.mark.parametrize(
    "name, flags, has_baseline",
    [
        ("BatchDecodeWithPagedKVCacheWrapper", f"{LARGE} --page_size 16 --s_qo 1 --kv_dtype fp8_e4m3", False),
        ("BatchDecodeWithPagedKVCacheWrapper", f"{HEADS} --page_size 16 --random_actual_seq_len", False),
        ("BatchPrefillWithPagedKVCacheWrapper", f"{HEADS} --page_size 16 --s_qo 9 --causal", True),
        ("BatchPrefillWithPagedKVCacheWrapper", f"{HEADS} --page_size 5 --s_qo 9 --random_actual_seq_len", False),
        ("BatchPrefillWithRaggedKVCacheWrapper", f"{HEADS} --kv_dtype bf16 --s_qo 9 --causal", True),
        ("BatchPrefillWithRaggedKVCacheWrapper", f"{HEADS} --s_qo 9 --random_actual_seq_len", False),
        ("BatchMLAPagedAttentionWrapper", "--s_qo 2 --head_dim_ckv 512 --head_dim_kpe 64 --q_dtype bf16", True),
    ],
)
def test_published_flags_of_attention(device, name, flags, has_baseline):
    """Check the flags that scripts for the unified benchmark pass, also with requests of random lengths."""
    case = CASES[name]
    bench = case.make(device, flashinfer_benchmark.parse_point(case, device, shlex.split(f"{LENGTHS} {flags}")))
    measure.check(bench, bench.backends(device)["fa2"], name)
    assert (bench.baseline is not None) == has_baseline
    assert bench.bytes > 0 and bench.flops > 0


@pytest.mark.parametrize(
    "name, backend, flags",
    [
        ("mm_bf16", "cublaslt", "--m 5 --n 48 --k 64 --out_dtype bfloat16"),
        ("bmm_bf16", "cudnn", "--batch_size 2 --m 5 --n 48 --k 64 --out_dtype fp32"),
        (
            "bmm_fp8",
            "cublas",
            "--batch_size 2 --m 1 --n 48 --k 64 --input_dtype fp8_e4m3 --mat2_dtype fp8_e5m2 --out_dtype fp16",
        ),
    ],
)
def test_published_flags_of_gemm(device, name, backend, flags):
    case = CASES[name]
    bench = case.make(device, flashinfer_benchmark.parse_point(case, device, shlex.split(flags)))
    measure.check(bench, bench.backends(device)[backend], name)
    assert bench.bytes > 0 and bench.flops > 0
