# SPDX-License-Identifier: Apache-2.0
"""Table of functions, dtypes and devices, behind test_support.py and docs/support.md. Attention has its own table.

python -m tests.support.matrix --write      regenerate the page
"""

from __future__ import annotations

import inspect
import itertools
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Callable, Optional

import torch

import flashinfer
from flashinfer.trace.apply.adapt import build_candidate_kwargs
from flashinfer.trace.apply.calls import bind_namespace
from flashinfer.trace.definition import output_dtype
from flashinfer.trace.template import TraceTemplate

PAGE = Path(__file__).resolve().parents[2] / "docs" / "support.md"
HALF = ("float16", "bfloat16")
FLOATS = (*HALF, "float32")
FP8 = ("float8_e4m3fn", "float8_e5m2")
COLUMNS = (*FLOATS, *FP8)
Arguments = dict[str, Any]


@dataclass(frozen=True)
class Row:
    """A function, and the dtypes that one group of its arguments may have.

    Parameters
    ----------
    path : str
        Name of the function in :mod:`flashinfer`.
    varied : tuple of str
        Arguments that get the dtype of the column.
    cpu, cuda : tuple of str
        Dtypes that the device takes.
    axes : dict
        Sizes for ``init`` of the trace template.
    fixed : dict
        Further arguments.
    is_random : bool
        True for draws: the data is then one-hot, and the only possible token is expected.
    left_out : tuple of str
        Dtypes that need other arguments: their cells are empty.
    """

    path: str
    varied: tuple[str, ...]
    cpu: tuple[str, ...] = FLOATS
    cuda: tuple[str, ...] = FLOATS
    axes: dict[str, int] = field(default_factory=dict)
    fixed: dict[str, Any] = field(default_factory=dict)
    is_random: bool = False
    left_out: tuple[str, ...] = ()

    @property
    def family(self) -> str:
        return self.path.split(".")[0]

    @property
    def function(self) -> Callable[..., Any]:
        found: Any = flashinfer
        for part in self.path.split("."):
            found = getattr(found, part)
        return found

    def template(self, arguments: Arguments) -> TraceTemplate:
        """Return the template that describes a call."""
        spec: Any = self.function._trace_template  # type: ignore[attr-defined]
        return spec if isinstance(spec, TraceTemplate) else spec(**arguments)

    def dtypes(self, device: str) -> tuple[str, ...]:
        return self.cuda if device == "cuda" else self.cpu

    def arguments(self, dtype: str, device: str) -> Arguments:
        """Make the arguments of a small call."""
        made = self.function.fi_init(**self.axes, device=device) | self.fixed  # type: ignore[attr-defined]
        for name in self.varied:
            made[name] = _cast(made[name], getattr(torch, dtype), self.is_random)
        return made

    def check(self, dtype: str, device: str) -> None:
        """Call the function and compare what it returns or writes with the reference of its template."""
        made = self.arguments(dtype, device)
        copies = bind_namespace(self.function, (), {name: _copy(value) for name, value in made.items()})
        template = self.template(copies)
        returned = self.function(**made)
        if self.is_random:
            peaks = made[self.varied[0]].float().argmax(dim=-1)
            samples = returned[0] if isinstance(returned, tuple) else returned
            assert torch.equal(samples.long().reshape(peaks.shape), peaks)
            return
        assert template.reference is not None
        expected = template.reference(**_for_reference(template, copies))
        actual = _outputs(template, made, returned)
        if expected is None:  # the reference changes its arguments as the function does
            expected = tuple(_outputs(template, copies, None))
        wanted = [expected] if isinstance(expected, torch.Tensor) else list(expected)
        for i, (x, y) in enumerate(zip(actual, wanted, strict=False)):
            if x.dtype is torch.uint8 and y.dtype.itemsize == 1:  # mxfp8_quantize returns bytes on the CPU
                actual[i] = x.view(y.dtype)
        assert template.check(tuple(wanted), tuple(actual))


def _cast(value: Any, dtype: torch.dtype, is_one_hot: bool) -> Any:
    if isinstance(value, (tuple, list)):
        return type(value)(_cast(one, dtype, is_one_hot) for one in value)
    if is_one_hot:
        rows = value.shape[:-1].numel()
        peaks = torch.arange(rows, device=value.device) * 7 % value.shape[-1]
        hot = torch.zeros(rows, value.shape[-1], device=value.device).scatter_(1, peaks[:, None], 1.0)
        return (hot.view(value.shape) * (1 if value.min() >= 0 else 200)).to(dtype)
    return (value.float() / 4 if dtype.itemsize == 1 else value).to(dtype)


def _copy(value: Any) -> Any:
    if isinstance(value, (tuple, list)):
        return type(value)(_copy(one) for one in value)
    return value.clone() if isinstance(value, torch.Tensor) else value


def _for_reference(template: TraceTemplate, arguments: Arguments) -> Arguments:
    """Return what the reference takes: inputs by name, else by position; arguments of the call; dtypes of outputs."""
    assert template.reference is not None
    inputs = build_candidate_kwargs(template, arguments)
    found = {}
    for i, (name, parameter) in enumerate(inspect.signature(template.reference).parameters.items()):
        if parameter.kind is parameter.VAR_KEYWORD:
            continue
        if name in inputs or name in arguments:
            value = inputs[name] if name in inputs else arguments[name]
        elif name.removesuffix("_dtype") in template.outputs:
            value = output_dtype(template, name.removesuffix("_dtype"), arguments)
        else:
            value = list(inputs.values())[i] if i < len(inputs) else None
        if value is not None or parameter.default is parameter.empty:
            found[name] = value
    return found


def _outputs(template: TraceTemplate, arguments: Arguments, returned: Any) -> list[torch.Tensor]:
    """Return the outputs: what the function returns, or the arguments that it writes to."""
    if returned is not None:
        return list(returned) if isinstance(returned, (tuple, list)) else [returned]
    found = []
    for name, spec in template.outputs.items():
        value = arguments[spec.param or name]
        index = getattr(spec, "tuple_idx", None)
        found.append(value[index or 0] if isinstance(value, (tuple, list)) else value)
    return found


_TOKENS = {"num_tokens": 3, "hidden_size": 64}
_NORM = {"batch_size": 3, "hidden_size": 64}
_ROPE = {"nnz": 5, "num_q_heads": 4, "num_k_heads": 2, "head_dim": 64}
_STATES = {"seq_len": 3, "num_heads": 2, "head_dim": 64}
_DELTA = {"total_tokens": 5, "num_q_heads": 1, "num_k_heads": 1, "num_v_heads": 2}
_VOCAB = {"batch_size": 3, "vocab_size": 128}
_MNK = {"M": 5, "N": 128, "K": 256}
_GROUPWISE = {"m": 5, "n": 128, "k": 256}
_GROUPS = {"m": 256, "groups": 2, "n": 128, "k": 256}
BF16, FP32, E4M3 = ("bfloat16",), ("float32",), ("float8_e4m3fn",)


def row(path: str, varied: str, dtypes: tuple[str, ...], axes: dict[str, int], **rest: Any) -> Row:
    """Return the row of a function that takes the same dtypes on both devices."""
    return Row(path, tuple(varied.split()), dtypes, dtypes, axes, **rest)


def draws(name: str, data: str) -> Row:
    """Return the row of a function that draws tokens; it computes in float32 whatever it is given."""
    return row(f"sampling.{name}", data, COLUMNS, _VOCAB, is_random=True)


ROWS = [
    row("activation.silu_and_mul", "input", FLOATS, _TOKENS),
    row("activation.gelu_and_mul", "input", FLOATS, _TOKENS),
    row("activation.gelu_tanh_and_mul", "input", FLOATS, _TOKENS),
    row("cascade.merge_state", "v_a v_b", FLOATS, _STATES),
    row("cascade.merge_state_in_place", "v v_other", FLOATS, _STATES),
    row("cascade.merge_states", "v", FLOATS, {"num_states": 2, **_STATES}),
    row("concat_ops.concat_mla_k", "k k_nope k_rope", (*HALF, *FP8), {"num_tokens": 3}),
    row("fused_moe.fused_topk_deepseek", "scores topk_values", FLOATS, {"num_tokens": 3}),
    row("fused_moe.route_tokens", "logits", FLOATS, {"num_tokens": 3}),
    row("fused_moe.hash_topk", "router_logits", FP32, {"num_tokens": 3}),
    row("fused_moe.moe_permute", "input permuted_output", COLUMNS, {"num_tokens": 3}),
    row("fused_moe.moe_unpermute", "permuted_input output", FLOATS, {"num_tokens": 3}),
    row("gemm.mm_bf16", "a b", BF16, _MNK),
    row("gemm.bmm_bf16", "A B", BF16, {"batch_size": 2, **_MNK}),
    row("gemm.bmm_fp8", "A", FP8, {"batch_size": 2, **_MNK}),
    row("gemm.bmm_fp8", "B", FP8, {"batch_size": 2, **_MNK}),
    row("gemm.fp8_blockscale_gemm_sm90", "input", BF16, _MNK, left_out=E4M3),
    row("gemm.gemm_fp8_nt_groupwise", "a", FP8, _GROUPWISE),
    row("gemm.gemm_fp8_nt_groupwise", "b", FP8, _GROUPWISE),
    row("gemm.group_gemm_fp8_nt_groupwise", "a", FP8, {"cum_m": 6, "groups": 3, "n": 128, "k": 256}),
    row("gemm.group_deepgemm_fp8_nt_groupwise", "a b", E4M3, _GROUPS),
    row("gemm.batch_deepgemm_fp8_nt_groupwise", "a b", E4M3, _GROUPS),
    row("gemm.tinygemm_bf16", "input weight out bias", BF16, _MNK),
    Row("recurrent.chunk_gated_delta_rule", ("q", "k", "v"), FLOATS, HALF, _DELTA),
    row("recurrent.chunk_gated_delta_rule", "initial_state", COLUMNS, _DELTA),
    row("indexer.fp8_paged_mqa_logits", "q", E4M3, {"batch_size": 3}),
    row("indexer.fp8_ragged_mqa_logits", "q k", E4M3, {"num_tokens": 3}),
    Row("mla.sparse_mla", ("q", "kv_cache"), FLOATS, HALF, {"num_tokens": 3}, {"return_lse": True}),
    row("mhc.mhc_post", "x residual", BF16, {"num_tokens": 3}),
    row("mhc.mhc_pre_big_fuse", "residual", BF16, {"num_tokens": 3}),
    row("mhc.mhc_pre_big_fuse_with_prenorm", "residual", BF16, {"num_tokens": 3}),
    row("norm.rmsnorm", "input weight", FLOATS, _NORM),
    row("norm.gemma_rmsnorm", "input weight", FLOATS, _NORM),
    row("norm.fused_add_rmsnorm", "input residual weight", FLOATS, _NORM),
    row("norm.gemma_fused_add_rmsnorm", "input residual weight", FLOATS, _NORM),
    row("norm.rmsnorm_quant", "input weight", FLOATS, _NORM),
    row("norm.rmsnorm_quant", "out", FP8, _NORM),
    row("norm.fused_add_rmsnorm_quant", "input residual weight", FLOATS, _NORM),
    row("norm.layernorm", "input", BF16, _NORM),
    row("norm.layernorm_quant", "input", BF16, _NORM),
    row("page.append_paged_kv_cache", "append_key append_value paged_kv_cache", COLUMNS, {"nnz_kv": 5}),
    row("page.append_paged_mla_kv_cache", "append_ckv append_kpe ckv_cache kpe_cache", COLUMNS, {"nnz_kv": 5}),
    row("quantization.mxfp8_quantize", "input", FLOATS, {"M": 3, "K": 128}),
    row("quantization.nvfp4_kv_dequantize", "block_scales", E4M3, {"num_rows": 3}),
    row("rope.apply_rope", "q k", FLOATS, {"batch_size": 2, **_ROPE}),
    row("rope.apply_rope_inplace", "q k", FLOATS, {"batch_size": 2, **_ROPE}),
    row("rope.apply_rope_pos_ids", "q k", FLOATS, _ROPE),
    row("rope.apply_rope_pos_ids_inplace", "q k", FLOATS, _ROPE),
    row("rope.apply_llama31_rope", "q k", FLOATS, {"batch_size": 2, **_ROPE}),
    row("rope.apply_llama31_rope_inplace", "q k", FLOATS, {"batch_size": 2, **_ROPE}),
    row("rope.apply_llama31_rope_pos_ids", "q k", FLOATS, _ROPE),
    row("rope.apply_llama31_rope_pos_ids_inplace", "q k", FLOATS, _ROPE),
    row("rope.apply_rope_with_cos_sin_cache", "query key", FLOATS, {"nnz": 5, "max_seq_len": 64}),
    row("rope.apply_rope_with_cos_sin_cache_inplace", "query key", FLOATS, {"nnz": 5, "max_seq_len": 64}),
    draws("sampling_from_logits", "logits"),
    draws("sampling_from_probs", "probs"),
    draws("top_p_sampling_from_probs", "probs"),
    draws("top_k_sampling_from_probs", "probs"),
    draws("min_p_sampling_from_probs", "probs"),
    draws("top_k_top_p_sampling_from_logits", "logits"),
    draws("top_k_top_p_sampling_from_probs", "probs"),
    row("sampling.softmax", "logits", COLUMNS, _VOCAB),
    row("sampling.top_p_renorm_probs", "probs", COLUMNS, _VOCAB),
    row("sampling.top_k_renorm_probs", "probs", FLOATS, _VOCAB),
    row("sampling.top_k_mask_logits", "logits", FLOATS, _VOCAB),
    row("topk.top_k", "input", FLOATS, _VOCAB, fixed={"k": 8}),
    row("topk.top_k_page_table_transform", "input", FLOATS, {"num_rows": 3, "batch_size": 3}),
    row("topk.top_k_ragged_transform", "input", FLOATS, {"num_rows": 3}),
]


_TAIL = """## Blackwell, by torch

| | values | scales | CPU | SM100, SM103, SM110, SM120, SM121 | Hopper and before |
|---|---|---|---|---|---|
| `mm_fp4` | e2m1 | e4m3, for 16 | reference | by torch, never run here | refused |
| `mm_fp4(use_nvfp4=False)` | e2m1 | powers of two, for 32 | reference | refused | refused |
| `mm_mxfp8` | e4m3 | powers of two, for 32 | reference | by torch, never run here | refused |

## Views, and outputs over inputs

Inputs may be views of any memory that the function's docstring allows. These properties are checked, others are not:

- **An output must have memory of its own.** An output whose elements share memory (an expanded tensor, rows that lie
  half over each other) is an error, and so is an output that shares memory with an input: `mm_bf16`, `bmm_bf16`,
  `bmm_fp8`, `tinygemm_bf16`, grouped products, attention (`out` and `lse` against queries, keys and values),
  `concat_mla_k`, `rope_quantize_fp8`, `top_k_page_table_transform`, `moe_permute`, `moe_unpermute`,
  `selective_state_update`, `ssd_combined_fwd`, steps of the delta rule (`output` against `v`), and the
  `workspace_buffer` of `cutlass_fused_moe` against its input and output. Addresses are compared. Where torch multiplies
  on CUDA (`mm_bf16`, `bmm_bf16`, `bmm_fp8`), the first call of a shape compares them; later ones, which take the kept
  choice, look at `out is a` and `out is b` only. Views of different columns of one buffer, such as q, k and v of one
  projection, do not share memory.
- **In place is right** where each element is read before its place is written: `out=input` of `rmsnorm`,
  `gemma_rmsnorm` and `swiglu`; `out=input[..., :n]`, the first half of the input, of `silu_and_mul`, `gelu_and_mul` and
  `gelu_tanh_and_mul`; functions named `_inplace` or `_in_place`, and `fused_add_rmsnorm`; `output=input` of
  `cutlass_fused_moe`. An output that begins elsewhere in the input is an error.
- **Not compared:** workspaces of attention, which must lie apart from all other tensors of the call; caches of keys and
  values with each other; inputs of one call with the outputs of another that runs at the same time.
- **The negative bit of torch is not seen.** `x.conj().imag` and `torch._neg_view(x)` are tensors whose memory holds the
  other sign. Asking a tensor takes 0.1 us, as much as all other checks of a call. Functions that copy a view
  (`contiguous()`) give the right result and others refuse the stride of 2 that `imag` has, but not all: those that take
  any strides (scores `s` of `merge_state` and its relatives, scales of FP8 products, `weights` of the indexer, gates
  and parameters of heads of recurrent layers), tensors with one column, and a contiguous `torch._neg_view`, are read
  with the other sign. Call `x.resolve_neg()` before.
- **Lists.** A list where a tensor or a number belongs is an error, also one that contains itself. Tuples and
  dictionaries are not looked at before they are converted: a tuple nested 100,000 deep ends the process.
"""


def cell(row: Row, dtype: str) -> str:
    if dtype in row.left_out:
        return ""
    on = [title for title, dtypes in (("CPU", row.cpu), ("CUDA", row.cuda)) if dtype in dtypes]
    return "yes" if len(on) == 2 else "".join(on) or "no"


_HEAD = """# Other families: which dtypes work where

Written by `python -m tests.support.matrix --write` from the table that `tests/support/test_support.py` runs. Each "yes"
is a call that is compared with the reference of its trace template, on the CPU and on CUDA; "CPU" or "CUDA" stands
where only that device has it. "no" is an error that names the dtype. An empty cell: the dtype needs further arguments.
The column "data" names the arguments whose dtype changes. Attention is in
[attention_support.md](attention_support.md), formats of the weights of experts are in
[fused_moe.md](fused_moe.md).
"""


def page() -> str:
    """Return the page as text."""
    parts = [_HEAD]
    for family, rows in itertools.groupby(ROWS, key=lambda row: row.family):
        parts.append(f"## {family}\n")
        parts.append(f"| | data | {' | '.join(COLUMNS)} |\n|---|---|{'---|' * len(COLUMNS)}")
        for row in rows:
            data = ", ".join(f"`{name}`" for name in row.varied)
            cells = " | ".join(cell(row, dtype) for dtype in COLUMNS)
            parts.append(f"| `{row.path.split('.')[-1]}` | {data} | {cells} |")
        parts.append("")
    parts.append(_TAIL)
    return "\n".join(parts)


def main(argv: Optional[list[str]] = None) -> None:
    if "--write" in (sys.argv if argv is None else argv):
        PAGE.write_text(page())
    else:
        print(page())


if __name__ == "__main__":
    main()
