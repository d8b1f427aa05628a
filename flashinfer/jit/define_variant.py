# SPDX-License-Identifier: Apache-2.0
"""Attention variants written in Python. See docs/attention_variants.md."""

from __future__ import annotations

import functools
import hashlib
import inspect
import itertools
import math
import weakref
from typing import Any, Callable, ClassVar, Mapping, Optional

import torch

from .._runtime.codegen_wrapper import compiler, is_traced
from .._runtime.explain_error import explain_type_errors
from .._runtime.torch_ops import register_custom_op
from .variant_cpp import HELPERS, CppWriter, Typed
from .variant_expression import Expression, evaluate, parse_function, plain_number

__all__ = ["AttentionVariant", "define_variant"]

#: Parameters that the kernel provides; functions may use them by name.
_FROM_KERNEL = {
    "qo_len": Typed("int32_t(qo_len)", "int"),
    "kv_len": Typed("int32_t(kv_len)", "int"),
    "batch_idx": Typed("int32_t(batch_idx)", "int"),
    "qo_head_idx": Typed("int32_t(qo_head_idx)", "int"),
    "kv_head_idx": Typed("int32_t(kv_head_idx)", "int"),
}
_OF_RUN = ("q", "k", "v", "kv_layout", "sm_scale", "window_left", "return_lse")
_MASK_MODES = {"NON_CAUSAL": 0, "CAUSAL": 1, "CUSTOM": 2}
_SCALARS = {
    "int": ("int64_t", "int32_t(params.arg_{})"),
    "float": ("double", "float(params.arg_{})"),
    "bool": ("int64_t", "(params.arg_{} != 0)"),
}

_STRUCT = """
struct {name} : AttentionVariantBase {{
  static constexpr bool use_softmax = {softmax};
  uint32_t qo_len, kv_len, window_left;
  float sm_scale_log2;

  template <typename Params>
  __device__ __host__ {name}(const Params& params, uint32_t batch_idx, uint8_t* smem_ptr) {{
    qo_len = params.get_qo_len(batch_idx);
    kv_len = params.get_kv_len(batch_idx);
    window_left = params.window_left >= 0 ? uint32_t(params.window_left) : kv_len;
    sm_scale_log2 = {scale};
  }}
{helpers}{hooks}}};
"""
_TRANSFORM = """
  REGISTER_LOGITS_TRANSFORM(params, logits, batch_idx, qo_idx, kv_idx, qo_head_idx, kv_head_idx, {{
    const float scaled = float(logits) * float(params.sm_scale);
    {text}
  }})
"""
_MASK = """
  REGISTER_LOGITS_MASK(params, batch_idx, qo_idx, kv_idx, qo_head_idx, kv_head_idx, {{
    {text}
  }})
"""


def define_variant(
    *,
    mask_mode: str = "CUSTOM",
    mask_fn: Optional[Callable[..., bool]] = None,
    logits_fn: Optional[Callable[..., float]] = None,
    use_softmax: bool = True,
) -> AttentionVariant:
    """Define attention with a custom mask or custom logits, from plain Python functions that are translated to C++.

    Parameters
    ----------
    mask_mode : str
        ``"CUSTOM"`` or ``"NON_CAUSAL"``: ``mask_fn`` alone decides. ``"CAUSAL"``: keys right of the diagonal, which
        ends at the last query and the last key, are hidden too.
    mask_fn : callable, optional
        ``f(q_idx, kv_idx, ...) -> bool``, True where the query sees the key. The first two parameters are positions in
        ``q`` and in ``k``.
    logits_fn : callable, optional
        ``f(logit, q_idx, kv_idx, ...) -> float``: the logit that replaces ``sm_scale * (q . k)``.
    use_softmax : bool
        False: what ``logits_fn`` returns is the weight of a value, and nothing is divided by their sum, as in sigmoid
        attention. There is no LSE then.

    Further parameters called ``qo_len``, ``kv_len``, ``batch_idx``, ``qo_head_idx`` or ``kv_head_idx`` are filled in by
    the kernel. All others are arguments of :meth:`AttentionVariant.run`, int, float or bool by annotation, default or
    the value that is passed; changing a value compiles nothing.

    A function may use arithmetic, comparisons, ``and``/``or``/``not``, conditional expressions, local names, ``if`` and
    ``return``, ``abs``, ``min``, ``max``, ``int``, ``float``, ``bool``, ``math.exp``/``log``/``sqrt``/``tanh``, and
    numbers from around it.

    Raises
    ------
    ValueError, TypeError
        Something else is used; the text names it.

    Examples
    --------
    >>> def sliding(q_idx, kv_idx, window_size):
    ...     return kv_idx <= q_idx and q_idx - kv_idx < window_size
    >>> variant = define_variant(mask_fn=sliding)
    >>> out = variant.run(q, k, v, window_size=256)  # doctest: +SKIP
    """
    op = "define_variant"
    if mask_mode not in _MASK_MODES:
        raise ValueError(f"{op}: mask_mode must be one of {', '.join(map(repr, _MASK_MODES))}, got {mask_mode!r}")
    if mask_fn is None and logits_fn is None:
        raise ValueError(f"{op}: one of mask_fn and logits_fn must be a function, got None for both")
    if logits_fn is None and not use_softmax:
        raise ValueError(f"{op}: logits_fn must be a function that returns weights (use_softmax is False), got None")
    return AttentionVariant(
        _MASK_MODES[mask_mode] == 1,
        None if mask_fn is None else _Hook(mask_fn, ("q_idx", "kv_idx"), "bool"),
        None if logits_fn is None else _Hook(logits_fn, ("logit", "q_idx", "kv_idx"), "float"),
        use_softmax,
    )


class _Hook:
    """A parsed function. ``leading`` maps its first parameters to their roles; ``result`` is the kind of its result."""

    def __init__(self, function: Callable[..., Any], leading: tuple[str, ...], result: str) -> None:
        self.where = f"define_variant: {getattr(function, '__name__', function)}"
        self.tree: Expression = parse_function(function, "define_variant")
        self.result = result
        self.extra: dict[str, inspect.Parameter] = {}
        parameters = list(inspect.signature(function).parameters.values())
        if len(parameters) < len(leading):
            raise TypeError(
                f"{self.where} must have the parameters {', '.join(leading)} and then its own, got {len(parameters)}"
            )
        self.leading = {p.name: name for p, name in zip(parameters, leading, strict=False)}
        for parameter in parameters:
            if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD):
                raise ValueError(f"{self.where}: *{parameter.name} is not supported in a variant")
            if parameter.name in self.leading or parameter.name in _FROM_KERNEL:
                continue
            if parameter.name in _OF_RUN:
                raise ValueError(
                    f"{self.where}: the parameter {parameter.name} is not supported, run() has one already"
                )
            self.extra[parameter.name] = parameter

    def cpp(self, kinds: Mapping[str, str], condition: str = "") -> str:
        """Return C++ that returns the result, for run-time parameters of these kinds; ``condition`` precedes it."""
        texts = {
            "logit": Typed("scaled", "float"),
            "q_idx": Typed("int32_t(qo_idx)", "int"),
            "kv_idx": Typed("int32_t(kv_idx)", "int"),
        }
        names = {name: texts[role] for name, role in self.leading.items()} | _FROM_KERNEL
        names |= {name: Typed(_SCALARS[kinds[name]][1].format(name), kinds[name]) for name in self.extra}
        writer = CppWriter(names, self.where)
        typed = writer.write(self.tree)
        if (typed.kind == "bool") != (self.result == "bool"):
            writer.refuse("the result", typed.kind, "a truth value" if self.result == "bool" else "a number")
        result = typed.text if self.result == "bool" else typed.as_float()
        return "\n    ".join([*writer.statements, f"return {condition}{result};"])

    def evaluate(self, values: Mapping[str, torch.Tensor]) -> torch.Tensor:
        return evaluate(self.tree, {**values, **{name: values[role] for name, role in self.leading.items()}})


class AttentionVariant:
    """Result of :func:`define_variant`: :meth:`run` on the device, :meth:`reference` in torch, :meth:`source`."""

    #: ``single_prefill_with_kv_cache_with_jit_module``: prefill/single.py, which imports generators, sets it.
    attend: ClassVar[Callable[..., Any]]

    def __init__(self, causal: bool, mask: Optional[_Hook], logits: Optional[_Hook], use_softmax: bool = True) -> None:
        self._causal, self._mask, self._logits, self._use_softmax = causal, mask, logits, use_softmax
        self._hooks = [hook for hook in (mask, logits) if hook is not None]
        self._extra: dict[str, inspect.Parameter] = {}
        for hook in self._hooks:
            for name, parameter in hook.extra.items():
                self._extra[name] = self._agreed(self._extra.get(name, parameter), parameter)
        self._source = functools.cache(self._write)
        self._handle = next(_handles)
        _variants[self._handle] = self
        declared = {name: self._declared_kind(p) for name, p in self._extra.items()}
        if None not in declared.values():
            self.source(**declared)  # type: ignore[arg-type]  # mistakes are reported where the function is

    def _agreed(self, first: inspect.Parameter, second: inspect.Parameter) -> inspect.Parameter:
        """Merge one parameter of both functions; either may leave the type or the default to the other."""
        kinds = {self._declared_kind(p) for p in (first, second)} - {None}
        defaults = [p.default for p in (first, second) if p.default is not p.empty]
        if len(kinds) > 1 or any(x != defaults[0] for x in defaults):
            raise ValueError(
                f"define_variant: a parameter of both functions must have one type and default, got {first} and "
                f"{second}"
            )
        annotation = second.annotation if first.annotation is first.empty else first.annotation
        return first.replace(annotation=annotation, default=defaults[0] if defaults else first.empty)

    @staticmethod
    def _declared_kind(parameter: inspect.Parameter) -> Optional[str]:
        kinds = (bool, int, float)
        annotated = [kind.__name__ for kind in kinds if parameter.annotation in (kind, kind.__name__)]
        default = plain_number(parameter.default)
        return next(iter(annotated + [kind.__name__ for kind in kinds if type(default) is kind]), None)

    @property
    def parameters(self) -> tuple[str, ...]:
        """Return the names of the run-time parameters."""
        return tuple(self._extra)

    def source(self, **kinds: str) -> str:
        """Return the C++ of the variant struct. ``kinds`` has "int", "float" or "bool" for each parameter."""
        for name in self._extra:
            if kinds.get(name) not in _SCALARS:
                raise ValueError(f"source: {name} must be 'int', 'float' or 'bool', got {kinds.get(name)!r}")
        return self._source(tuple(kinds[name] for name in self._extra))

    def _write(self, kinds: tuple[str, ...]) -> str:
        of = dict(zip(self._extra, kinds, strict=True))
        hooks, scale = "", "float(params.sm_scale) * math::log2e"
        if self._logits is not None:
            hooks, scale = _TRANSFORM.format(text=self._logits.cpp(of)), "math::log2e"
        if self._mask is not None:
            # The diagonal is part of the mask: a mask that is always asked runs in CUSTOM mode.
            diagonal = "int64_t(kv_idx) + qo_len <= int64_t(qo_idx) + kv_len && "
            hooks += _MASK.format(text=self._mask.cpp(of, diagonal if self._causal else ""))
        softmax = str(self._use_softmax).lower()
        return _STRUCT.format(name="DefinedVariant", softmax=softmax, scale=scale, helpers=HELPERS, hooks=hooks)

    def _arguments(self, given: Mapping[str, Any]) -> tuple[tuple[str, ...], list[Any]]:
        """Return the kinds and values of the run-time parameters."""
        unknown = sorted(set(given) - set(self._extra))
        if unknown:
            raise TypeError(
                f"run: arguments must be among {', '.join(self._extra) or 'none'}, got unknown argument {unknown[0]}"
            )
        kinds, values = [], []
        for name, parameter in self._extra.items():
            value = plain_number(given.get(name, parameter.default))
            if value is parameter.empty:
                raise TypeError(f"run: {name} must be a number (the variant's functions use it), got nothing")
            kind = self._declared_kind(parameter) or type(value).__name__
            if type(value).__name__ not in {"float": ("int", "float")}.get(kind, (kind,)) or kind not in _SCALARS:
                expected = kind if kind in _SCALARS else "int, float or bool"
                raise TypeError(f"run: {name} must be {expected}, got {value!r}")
            if kind == "int" and not -(2**31) < value < 2**31:
                raise ValueError(f"run: {name} must fit in 32 bits, got {value}")
            kinds.append(kind)
            values.append(int(value) if kind == "bool" else value)
        return tuple(kinds), values

    @explain_type_errors
    def run(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        kv_layout: str = "NHD",
        sm_scale: Optional[float] = None,
        window_left: int = -1,
        return_lse: bool = False,
        **parameters: Any,
    ) -> Any:
        """Compute attention of ``q`` ``[qo_len, num_qo_heads, head_dim]`` over ``k`` and ``v``, as in single prefill.

        Parameters
        ----------
        sm_scale : float, optional
            1 / sqrt(head_dim) if None.
        window_left : int
            Keys left of the diagonal that are visible besides what the mask says; -1: all.
        return_lse : bool
            Also return the base-2 LSE.
        **parameters
            Values of the functions' own parameters.

        Returns
        -------
        torch.Tensor or tuple of torch.Tensor
            ``[qo_len, num_qo_heads, head_dim_vo]`` in the dtype of ``q``, and the LSE if asked for. Queries that see
            nothing get 0 and -inf.
        """
        if return_lse and not self._use_softmax:
            raise ValueError("run: return_lse must be False (a variant without softmax has no LSE), got True")
        if is_traced() or compiler._is_compiling_flag:
            return self._run_in_graph(q, k, v, kv_layout, sm_scale, window_left, return_lse, parameters)
        kinds, values = self._arguments(parameters)
        module = _module(
            "cuda" if q.is_cuda else "cpu", q.dtype, k.dtype, q.shape[-1], v.shape[-1], self._source(kinds),
            tuple(self._extra), kinds,
        )  # fmt: skip
        scale = 1 / math.sqrt(q.shape[-1]) if sm_scale is None else sm_scale
        mask_mode = _MASK_MODES["CUSTOM"] if self._mask is not None else int(self._causal)
        return self.attend(
            module, q, k, v, *values, scale,
            kv_layout=kv_layout, mask_mode=mask_mode, window_left=window_left, return_lse=return_lse,
        )  # fmt: skip

    def _run_in_graph(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        kv_layout: str,
        sm_scale: Optional[float],
        window_left: int,
        return_lse: bool,
        parameters: Mapping[str, Any],
    ) -> Any:
        out = q.new_empty((q.shape[0], q.shape[1], v.shape[-1]))
        lse = q.new_empty((q.shape[0], q.shape[1]), dtype=torch.float32) if return_lse else None
        kinds = [
            "bool" if isinstance(x, bool) else "int" if isinstance(x, int) else "float" for x in parameters.values()
        ]
        numbers = [float(x) for x in parameters.values()]
        _run_variant(
            self._handle, q, k, v, out, lse, kv_layout, sm_scale, window_left,
            ",".join(parameters), ",".join(kinds), numbers,
        )  # fmt: skip
        return out if lse is None else (out, lse)

    @explain_type_errors
    def reference(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        sm_scale: Optional[float] = None,
        window_left: int = -1,
        **parameters: Any,
    ) -> torch.Tensor:
        """Compute the same attention with torch operations, in float32, for checking; ``k`` and ``v`` are NHD."""
        (qo_len, heads, head_dim), (kv_len, kv_heads, _) = q.shape, k.shape
        group = heads // kv_heads
        values = self._values(qo_len, kv_len, heads, group, parameters, q.device)
        k, v = (x.float().repeat_interleave(group, dim=1) for x in (k, v))
        logits = torch.einsum("qhd,khd->hqk", q.float(), k)
        logits = logits * (1 / math.sqrt(head_dim) if sm_scale is None else sm_scale)
        if self._logits is not None:
            logits = self._logits.evaluate({**values, "logit": logits}).expand_as(logits).float()
        distance = values["q_idx"] + kv_len - qo_len - values["kv_idx"]  # distance to the left of the diagonal
        hidden = -math.inf if self._use_softmax else 0.0
        if self._causal:
            logits = logits.masked_fill(distance < 0, hidden)
        if window_left >= 0:
            logits = logits.masked_fill(distance > window_left, hidden)
        if self._mask is not None:
            logits = logits.masked_fill(~self._mask.evaluate(values), hidden)
        weights = torch.softmax(logits, dim=-1).nan_to_num(0) if self._use_softmax else logits
        return torch.einsum("hqk,khd->qhd", weights, v).to(q.dtype)

    def _values(
        self, qo_len: int, kv_len: int, heads: int, group: int, parameters: Mapping[str, Any], device: torch.device
    ) -> dict[str, torch.Tensor]:
        """Return all values that a function may name, shaped to broadcast to ``[heads, qo_len, kv_len]``."""
        head = torch.arange(heads, device=device)[:, None, None]
        values = {
            "q_idx": torch.arange(qo_len, device=device)[:, None],
            "kv_idx": torch.arange(kv_len, device=device),
            "qo_head_idx": head,
            "kv_head_idx": head // group,
        }
        values |= {name: torch.tensor(n, device=device) for name, n in (("qo_len", qo_len), ("kv_len", kv_len))}
        values["batch_idx"] = torch.tensor(0, device=device)
        dtypes = {"int": torch.int64, "float": torch.float32, "bool": torch.bool}
        for name, kind, value in zip(self._extra, *self._arguments(parameters), strict=True):
            values[name] = torch.tensor(value, dtype=dtypes[kind], device=device)
        return values


_variants: weakref.WeakValueDictionary[int, AttentionVariant] = weakref.WeakValueDictionary()
_handles = itertools.count()


@register_custom_op("flashinfer::run_variant", mutates_args=("out", "lse"))
def _run_variant(
    handle: int,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: Optional[torch.Tensor],
    kv_layout: str,
    sm_scale: Optional[float],
    window_left: int,
    names: str,
    kinds: str,
    numbers: list[float],
) -> None:
    """Run :meth:`AttentionVariant.run` as an op of a graph. All numbers are floats; texts are joined by commas."""
    types: dict[str, Callable[[float], Any]] = {"bool": bool, "int": int, "float": float}
    given = zip(names.split(","), kinds.split(","), numbers, strict=False)
    parameters = {name: types[kind](x) for name, kind, x in given}
    result, scores = _variants[handle].run(
        q, k, v, kv_layout=kv_layout, sm_scale=sm_scale, window_left=window_left, return_lse=True, **parameters
    )  # fmt: skip
    out.copy_(result)
    if lse is not None:
        lse.copy_(scores)


@functools.cache
def _module(
    device: str,
    dtype_q: torch.dtype,
    dtype_kv: torch.dtype,
    head_dim_qk: int,
    head_dim_vo: int,
    source: str,
    names: tuple[str, ...],
    kinds: tuple[str, ...],
) -> Any:
    """Build (or load) the module of a variant; its name is a hash of everything that determines its code."""
    from .attention import gen_customize_single_prefill_module

    identity = repr((dtype_q, dtype_kv, head_dim_qk, head_dim_vo, source, names, kinds))
    uri = f"defined_variant_{hashlib.sha256(identity.encode()).hexdigest()[:16]}"
    scalars = [f"arg_{name}" for name in names] + ["sm_scale"]
    dtypes = [_SCALARS[kind][0] for kind in kinds] + ["double"]
    spec = gen_customize_single_prefill_module(
        "fa2", uri, dtype_q, dtype_kv, dtype_q, head_dim_qk, head_dim_vo,
        [], [], scalars, dtypes, "DefinedVariant", source, device=device,
    )  # fmt: skip
    return spec.build_and_load()
