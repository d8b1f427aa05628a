# SPDX-License-Identifier: Apache-2.0
"""define_variant up to the C++ text: parsing, torch's evaluation and the compiled expressions agree with Python."""

from __future__ import annotations

import ctypes
import importlib
import math
import subprocess

import numpy as np
import pytest
import torch

from flashinfer.jit import env as jit_env
from flashinfer.jit.cpp_ext import find_cxx
from flashinfer.jit.define_variant import define_variant
from flashinfer.jit.variant_expression import evaluate, parse_function

PAGE = 7
WIDE, HALF, FLAG = np.int64(4), np.float64(0.5), np.bool_(True)
LENGTHS = (9, 13)  # qo_len, kv_len


def sliding(q_idx, kv_idx, window_size):
    """Use a docstring and locals, which are allowed."""
    distance = q_idx - kv_idx
    return distance >= 0 and distance < window_size


def chained(q, kv):
    return 2 <= kv < q + 3 <= 10


def with_if(q_idx, kv_idx, qo_len, kv_len):
    position = q_idx + kv_len - qo_len
    if kv_idx > position:
        return False
    if kv_idx < 2:
        return True
    else:
        near = position - kv_idx
        return near <= 3 or near % 4 == 0


def assigned_in_a_branch(q_idx, kv_idx):
    limit = 3
    if q_idx > 4:
        limit = 6
    return kv_idx < limit


def many_locals(q_idx, kv_idx):
    a = q_idx + kv_idx
    b = a * 3 % 11 + a
    c = b * 3 % 11 + b
    d = c * 3 % 11 + c
    e = d * 3 % 11 + d
    f = e * 3 % 11 + e
    g = f * 3 % 11 + f
    h = g * 3 % 11 + g
    i = h * 3 % 11 + h
    j = i * 3 % 11 + i
    return (j * 3 % 11 + j) % 3 == 1


def many_branches(q, kv):
    n = 0
    if q > 0:
        n = n + 1
    if q > 1:
        n = n + 1
    if q > 2:
        n = n + 1
    else:
        n = n + 2
    if q > 4:
        n = n + 1
    if q > 6:
        n = n + 1
    if kv > 1:
        n = n + 1
    if kv > 2:
        n = n + 1
    if kv > 5:
        n = n + 1
        if kv > 7:
            n = 0
    if kv > 9:
        return n > 3
    return n % 2 == 0


def guarded_local(q, kv):
    if kv == 0:
        return True
    rest = q % kv
    return rest > 1 and rest < 4


MASKS = {
    "sliding": (sliding, {"window_size": 4}),
    "huge window": (sliding, {"window_size": 2**31 - 1}),
    "chained": (chained, {}),
    "if": (with_if, {}),
    "assigned in a branch": (assigned_in_a_branch, {}),
    "lambda": (lambda q, k: not (q == k or q > 5), {}),
    "negative floor": (lambda q, k: (q - k) // 3 == -1, {}),
    "negative modulo": (lambda q, k, n: (q - k) % n == n + 1, {"n": -4}),
    "modulo": (lambda q, k: (k - q) % 5 < 2, {}),
    "narrow division": (lambda q, k, n: q // n == k // n, {"n": 3}),
    "negative divisor": (lambda q, k: k // -4 == -q % 5 - 5, {}),
    "true division": (lambda q, k: q / 2 - k / 3 > 0.4, {}),
    "float parameter": (lambda q, k, ratio: k <= ratio * q, {"ratio": 1.5}),
    "bool parameter": (lambda q, k, strict: k < q if strict else k <= q, {"strict": True}),
    "float floor": (lambda q, k: (q - k) // 2.5 < -1.0, {}),
    "float modulo": (lambda q, k: (q - k - 0.25) % 3.0 < 1.5, {}),
    "bits": (lambda q, k: ((q ^ k) & 1 == 0) | (q << 1 == k) | (k >> 2 == 3) ^ (~q == -3), {}),
    "min max abs": (lambda q, k: max(abs(q - k), min(q, 4), 2) <= 3, {}),
    "global": (lambda q, k: q // PAGE == k // PAGE, {}),
    "powers": (lambda q, k: q**2 + k**2 < 50 and q**0 == 1 and 2.0**q > k, {}),
    "functions": (lambda q, k: math.sqrt(q) + math.tanh(k) < 2.5 and math.exp(-k) < 0.9 > math.log(q + 1.0), {}),
    "conversions": (lambda q, k: bool(q) and int(q / 2) < k and float(k) > 1.5, {}),
    "constants": (lambda q, k: True if q < 3 else k * 10000000000 > 30000000000, {}),
    "numbers chosen": (lambda q, k: (q if q > k else 0.5 * k) > 3, {}),
    "equal truths": (lambda q, k: (q > 2) == (k > 4), {}),
    "truth of nothing": (lambda q, k: (not q > 2) == bool(0), {}),
    "first power": (lambda q, k: q**1 * (k - 3) > 7, {}),
    "exact float floor": (lambda q, k: (q + 1.0) // 0.125 + 1.0 // 0.1 == 9.0 + 8 * (q + 1) and k > 3, {}),
    "float modulo of infinity": (lambda q, k: (q - k + 0.0) % math.inf <= 2.0, {}),
    "many locals": (many_locals, {}),
    "many branches": (many_branches, {}),
    "guarded local": (guarded_local, {}),
    "guarded parameter": (lambda q, k, n: (n != 0 and q % n == 0) or k == 2, {"n": 0}),
    "guarded side": (lambda q, k: q // k > 1 if k > 0 else q > 2, {}),
    "numbers of numpy": (lambda q, k: q - k < WIDE and q > HALF and FLAG, {}),
}  # fmt: skip


def names(parameters):
    qo_len, kv_len = LENGTHS
    values = {"q_idx": torch.arange(qo_len)[:, None], "kv_idx": torch.arange(kv_len)}
    values |= {"qo_len": torch.tensor(qo_len), "kv_len": torch.tensor(kv_len)}
    return values | {name: torch.tensor(value) for name, value in parameters.items()}


def by_python(function, parameters):
    code, (qo_len, kv_len) = function.__code__, LENGTHS
    known = {**parameters, "qo_len": qo_len, "kv_len": kv_len}
    rest = [known[name] for name in code.co_varnames[2 : code.co_argcount]]
    return torch.tensor([[bool(function(i, j, *rest)) for j in range(kv_len)] for i in range(qo_len)])


@pytest.mark.parametrize("case", MASKS)
def test_torch_evaluates_as_python_does(case):
    function, parameters = MASKS[case]
    leading = dict(zip(function.__code__.co_varnames, ("q_idx", "kv_idx"), strict=False))
    values = names(parameters)
    values |= {name: values[role] for name, role in leading.items()}
    result = evaluate(parse_function(function, "test"), values)
    assert torch.equal(result.expand(LENGTHS), by_python(function, parameters))


PROBE = """
#include <flashinfer/attention/variants.h>
namespace flashinfer {{
struct Probe {{
  int64_t arg_window_size, arg_n, arg_strict;
  double arg_ratio, sm_scale;
  int32_t window_left, qo_len, kv_len;
  uint32_t get_qo_len(uint32_t) const {{ return qo_len; }}
  uint32_t get_kv_len(uint32_t) const {{ return kv_len; }}
}};
{structs}
template <typename Variant>
void Fill(const Probe& params, bool* out) {{
  Variant variant(params, 0, nullptr);
  for (int i = 0; i < params.qo_len; ++i)
    for (int j = 0; j < params.kv_len; ++j) out[i * params.kv_len + j] = variant.LogitsMask(params, 0, i, j, 0, 0);
}}
}}  // namespace flashinfer
using namespace flashinfer;
extern "C" void Run(int which, int64_t window, int64_t n, int64_t strict, double ratio, int qo, int kv, bool* out) {{
  const Probe params{{window, n, strict, ratio, 1.0, -1, qo, kv}};
  switch (which) {{
{calls}
  }}
}}
"""


@pytest.fixture(scope="module")
def compiled(tmp_path_factory):
    """Compile the masks of all variants into one library; return a function of (index, parameters)."""
    structs, calls = [], []
    for i, (function, parameters) in enumerate(MASKS.values()):
        kinds = {name: type(value).__name__ for name, value in parameters.items()}
        structs.append(define_variant(mask_fn=function).source(**kinds).replace("DefinedVariant", f"Variant{i}"))
        calls.append(f"    case {i}: return Fill<Variant{i}>(params, out);")
    folder = tmp_path_factory.mktemp("variants")
    source = folder / "probe.cpp"
    source.write_text(PROBE.format(structs="".join(structs), calls="\n".join(calls)))
    command = [str(find_cxx()), "-std=c++17", "-O0", "-DFLASHINFER_CPU", f"-I{jit_env.FLASHINFER_INCLUDE_DIR}"]
    command += ["-shared", "-fPIC", "-Wall", "-Werror", str(source), "-o", str(folder / "probe.so")]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return ctypes.CDLL(str(folder / "probe.so")).Run


@pytest.mark.parametrize("case", MASKS)
def test_cpp_evaluates_as_python_does(compiled, case):
    function, parameters = MASKS[case]
    qo_len, kv_len = LENGTHS
    out = (ctypes.c_bool * (qo_len * kv_len))()
    integers = [ctypes.c_longlong(parameters.get(name, 0)) for name in ("window_size", "n", "strict")]
    compiled(list(MASKS).index(case), *integers, ctypes.c_double(parameters.get("ratio", 0)), qo_len, kv_len, out)
    assert torch.equal(torch.tensor(list(out)).view(LENGTHS), by_python(function, parameters))


def loop(q, k):
    for i in range(3):
        q += i
    return q > k


def no_return(q, k):
    if q > k:
        return True


def indexing(q, k):
    table = q
    return table[k]


def unknown_call(q, k):
    return print(q) == k


def unknown_name(q, k):
    return q > undefined_thing  # noqa: F821


def star(q, k, *rest):
    return q > k


def torch_object(q, k):
    return q > torch.pi.real


def two_names(q, k):
    a, b = q, k
    return a > b


def one_path_only(q, k):
    if q > 2:
        PAGE = 3
    return k < PAGE


def method(q, k):
    return q.bit_length() > k


REFUSED = {
    "loop": (loop, ValueError, r"loop, line \d+: a for loop is not supported in a variant"),
    "no return": (no_return, ValueError, "a path that ends without return is not supported"),
    "indexing": (indexing, ValueError, "indexing is not supported"),
    "call": (unknown_call, ValueError, r"a call of print\(\) is not supported"),
    "method": (method, ValueError, r"the attribute q.bit_length is not supported"),
    "name": (unknown_name, ValueError, "the name undefined_thing, which is unknown here, is not supported"),
    "star": (star, ValueError, r"\*rest is not supported"),
    "attribute": (torch_object, ValueError, "the attribute torch.pi.real is not supported"),
    "two names": (two_names, ValueError, r"line \d+: an assignment to other than one name is not supported"),
    "one path only": (one_path_only, ValueError, "the name PAGE, which has no value on a path to here, is"),
    "mixed bits": (lambda q, k: (q > k) & k > 1, TypeError, "one operand of `&` must be an"),
    "in": (lambda q, k: q in (1, k), ValueError, "Tuple is not supported"),
    "is": (lambda q, k: q is k, ValueError, "`is` is not supported"),
    "string": (lambda q, k: q == "k", ValueError, "a value of type str is not supported"),
    "comprehension": (lambda q, k: any(q > x for x in range(k)), ValueError, r"a call of any\(\) is not supported"),
    "keyword": (lambda q, k: max(q, k, key=abs) > 1, ValueError, r"max\(\) with 2 positional and 1 named"),
    "run's own": (lambda q, kv, sm_scale: q > kv, ValueError, r"the parameter sm_scale is not supported, run\(\) has"),
    "one parameter": (lambda q: True, TypeError, "must have the parameters q_idx, kv_idx and then its own, got 1"),
    "no bool": (lambda q, k: q - k, TypeError, "the result must be a truth value, got an integer"),
    "number as truth": (lambda q, k: q and k > 1, TypeError, "an operand of `and` must be a truth value"),
    "truth as number": (lambda q, k: (q > k) + 1 > 0, TypeError, r"an operand of `\+` must be a number"),
    "power": (lambda q, k: q**k > 1, ValueError, r"`\*\*` of integers is not supported unless"),
    "builtin": (max, TypeError, "function must be a Python function, got builtin_function_or_method"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_supported_is_named(case):
    function, error, text = REFUSED[case]
    with pytest.raises(error, match=text):
        define_variant(mask_fn=function)


def test_arguments_of_define_variant():
    with pytest.raises(ValueError, match="mask_mode must be one of 'NON_CAUSAL', 'CAUSAL', 'CUSTOM', got 'DIAGONAL'"):
        define_variant(mask_mode="DIAGONAL", mask_fn=chained)
    with pytest.raises(ValueError, match=r"one of mask_fn and logits_fn must be a function, got None"):
        define_variant()
    with pytest.raises(TypeError, match="the result must be a number, got a truth value"):
        define_variant(logits_fn=lambda x, q, k: x > 0)
    namespace: dict = {}
    exec("def typed(q, k):\n    return q > k\n", namespace)
    with pytest.raises(ValueError, match=r"the source of typed cannot be read .*; define it in a file"):
        define_variant(mask_fn=namespace["typed"])
    with pytest.raises(ValueError, match=r"line \d+ must have 1 function that could be <lambda>, got 2; use def"):
        define_variant(mask_fn=(lambda q, k: q > k, lambda q, k: q < k)[0])


def test_arguments_of_run():
    variant = define_variant(mask_fn=lambda q, k, n: q > k + n)
    q = torch.zeros(2, 1, 16)
    cases = (
        ({}, TypeError, "n must be a number"),
        ({"n": 1, "m": 2}, TypeError, "arguments must be among n, got unknown argument m"),
        ({"n": "1"}, TypeError, "n must be int, float or bool"),
        ({"n": 2**31}, ValueError, "n must fit in 32 bits, got 2147483648"),
    )
    for parameters, error, text in cases:
        with pytest.raises(error, match=text):
            variant.reference(q, q, q, **parameters)
    annotated = define_variant(mask_fn=with_annotation)
    assert annotated.parameters == ("n", "ratio")
    with pytest.raises(TypeError, match=r"n must be int, got 1\.5"):
        annotated.reference(q, q, q, n=1.5)


def with_annotation(q, k, n: int, ratio=0.5):
    return q > k * ratio + n


def with_both(q, k, ratio: float = 1):
    return q > k * ratio


def mask_of_two(q, k, n: int = 3, gain=2.0):
    return q * gain > k + n


def logits_of_two(logit, q, k, n, gain: float):
    return logit * gain + n


def other_default(logit, q, k, n=4):
    return logit * n


def other_type(logit, q, k, n: float):
    return logit * n


def test_parameters_of_both_functions():
    """Check that a parameter declared by one function holds for the other, and that contradictions are rejected."""
    q = torch.randn(4, 1, 16)
    variant = define_variant(mask_fn=mask_of_two, logits_fn=logits_of_two)
    assert torch.equal(variant.reference(q, q, q), variant.reference(q, q, q, n=3, gain=2.0))
    for logits_fn, text in ((other_default, r"n: int = 3 and n=4"), (other_type, r"n: int = 3 and n: float")):
        text = text.replace("int", "'int'").replace("float", "'float'")  # annotations of this file are strings
        with pytest.raises(ValueError, match=f"must have one type and default, got {text}"):
            define_variant(mask_fn=mask_of_two, logits_fn=logits_fn)


def test_tensors_that_are_none():
    variant = define_variant(mask_fn=chained)
    q = torch.zeros(2, 1, 16)
    for call in (variant.run, variant.reference):
        with pytest.raises(TypeError, match=rf"AttentionVariant\.{call.__name__}: q must be Tensor.*, got a NoneType"):
            call(None, q, q)
    with pytest.raises(TypeError, match=r"reference: sm_scale must be float.*, got a str"):
        variant.reference(q, q, q, sm_scale="1")


def test_an_annotation_counts_more_than_a_default():
    """Check that the annotation of ``ratio``, float, takes priority over its integer default."""
    q = torch.zeros(2, 1, 16)
    variant = define_variant(mask_fn=with_both)
    assert variant.source(ratio="float") == variant._source(variant._arguments({})[0])
    variant.reference(q, q, q, ratio=0.5)


def test_texts_are_as_long_as_functions_and_paths_are_counted(tmp_path, monkeypatch):
    assert len(define_variant(mask_fn=many_locals).source()) < 4000
    paths = "".join(f"    if q > {i}:\n        if k > {i}:\n            return True\n" for i in range(12))
    terms = " + ".join(["q"] * 1500)
    text = f"def paths(q, k):\n{paths}    return False\n\n\ndef deep(q, k):\n    return {terms} > k\n"
    (tmp_path / "long_functions.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module("long_functions")
    with pytest.raises(ValueError, match="paths: a choice of more than 1000 paths to a return is not supported"):
        define_variant(mask_fn=module.paths)
    with pytest.raises(ValueError, match="deep: expressions nested as deeply as here are not supported"):
        define_variant(mask_fn=module.deep)


def test_kinds_and_numbers_of_numpy():
    q = torch.randn(3, 1, 16)
    variant = define_variant(mask_fn=lambda q, k, n: q > k - n)
    assert torch.equal(variant.reference(q, q, q, n=np.int32(2)), variant.reference(q, q, q, n=2))
    for kinds, found in (({}, "None"), ({"n": "int64"}, "'int64'")):
        with pytest.raises(ValueError, match=f"source: n must be 'int', 'float' or 'bool', got {found}"):
            variant.source(**kinds)


def test_the_text_depends_on_the_functions_only():
    first, second = (define_variant(mask_fn=sliding) for _ in range(2))
    assert first.source(window_size="int") == second.source(window_size="int")
    assert first.source(window_size="int") != first.source(window_size="float")
    causal = define_variant(mask_fn=sliding, mask_mode="CAUSAL")
    assert "kv_idx" in causal.source(window_size="int") and causal.source(window_size="int") != first.source(
        window_size="int"
    )
