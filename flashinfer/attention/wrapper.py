# SPDX-License-Identifier: Apache-2.0
"""Base of the planned wrappers: workspaces, the native plan, the launch, and the op that ``torch.compile`` traces."""

from __future__ import annotations

import copy
import itertools
import sys
import weakref
from numbers import Real
from typing import Any, ClassVar, NamedTuple, Optional, Sequence

import torch

from .._runtime.checks import check_tensors
from .._runtime.codegen_wrapper import kept_out_of_graphs
from .._runtime.dispatch import use_pdl
from .._runtime.errors import ArgumentError
from .._runtime.explain_error import explain_arguments
from .._runtime.torch_ops import register_custom_op
from .call_records import CallRecord, CallState, aligned, is_launch_error, record_memory
from .index_arrays import to_device
from .jit_arguments import JitArguments
from .locks import CallLock, lock_methods, new_with_lock
from .modules import device_kind
from .options import Dtypes, layout_code, pos_encoding_code
from .plan_options import AttentionOptions
from .streams import hold_for_graph, on_current_stream
from .wrapper_copies import copy_wrapper, deepcopy_wrapper, refuse_pickling

__all__ = ["Launch", "PlannedWrapper", "run_planned"]

_INT_WORKSPACE_BYTES = 8 << 20
_PLAN_ALIGNMENT = 16  # bytes; alignment of the native plan's header and of each array after the header

_wrappers: weakref.WeakValueDictionary[int, PlannedWrapper] = weakref.WeakValueDictionary()
_handles = itertools.count()


class Launch(NamedTuple):
    """Arguments of a launch besides the plan."""

    q: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    out: torch.Tensor
    lse: Optional[torch.Tensor]
    tensors: list[Optional[torch.Tensor]]  #: additional tensors that the module declares
    scalars: list[Any]

    def aligned(self) -> Launch:
        """Return this launch with contiguous copies of tensors whose rows are not aligned to 16 bytes, if any."""
        given = (self.q, self.k, self.v, self.out, *self.tensors)
        copies = [aligned(x) for x in given]
        if all(copy is x for copy, x in zip(copies, given, strict=True)):
            return self
        q, k, v, out, *tensors = copies
        return Launch(q, k, v, out, self.lse, tensors, self.scalars)  # type: ignore[arg-type]

    def named(self, names: Sequence[str]) -> list[tuple[str, Any, Any]]:
        """Return name, type and value of each tensor that is not None: q, k, v, out, lse and other named ones."""
        tensors = zip(names, (*self[:5], *self.tensors), strict=False)
        return [(name, torch.Tensor, x) for name, x in tensors if x is not None]


@lock_methods
class PlannedWrapper:
    """Base of the batch wrappers. A subclass plans with ``_native_plan`` and returns the launch from ``_native_call``.

    Inheritance ends here. The lock and the stream of the last call are an object that the wrapper holds (``_lock``);
    copying is functions (wrapper_copies.py), and so is what decode and prefill share (run.py, prefill/planning.py).

    Serving engines read and write attributes whose names start with an underscore; these attributes keep their
    published meaning. ``run`` reads the attributes at each call, because serving engines replace ``plan``.
    """

    _lock: CallLock
    _op: ClassVar[str]  #: name in error messages: the class name; private subclasses override it
    _known_tensors: Sequence[str] = ()
    _fixed_batch_size: int
    _batch_size: int
    _num_qo_heads: int
    _num_kv_heads: int
    _head_dim_vo: int
    _first_row = 0  #: index of the first row of the first request; earlier rows belong to no request
    _planned: Any  #: arguments of the last native plan, kept to plan again with other parameters
    _planned_info: Any = None  #: plan made from ``_planned``; serving engines store their own in ``_plan_info``

    #: Names of the launch tensors in error messages, as callers know them.
    _launched: ClassVar[tuple[str, ...]] = ("q", "k", "v", "out", "lse")
    _has_replan: ClassVar[bool] = False  #: True if the module's ``replan`` updates a record after a new plan
    _is_paged: ClassVar[bool] = False  #: True if keys are in pages; the CPU validates page ids before use
    _record: Optional[CallRecord] = None
    _record_memory: Any = None
    _aligned: tuple[Any, Any] = (None, None)  #: workspaces whose alignment was validated
    _deferred: Optional[list[Launch]] = None  #: collects launches that pod.py combines; None: launch at once

    __new__ = new_with_lock
    __copy__ = copy_wrapper
    __deepcopy__ = deepcopy_wrapper
    __reduce_ex__ = refuse_pickling

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        lock_methods(cls)
        cls._op = vars(cls).get("_op", cls.__name__)
        if "plan" in vars(cls):
            kept_out_of_graphs(cls.plan, f"{cls._op}.plan() works on the host, call it before what is compiled")  # type: ignore[attr-defined]

    def __init__(
        self,
        float_workspace_buffer: torch.Tensor,
        kv_layout: str,
        use_cuda_graph: bool,
        backend: str,
        jit_args: Optional[Sequence[Any]],
    ) -> None:
        self._kv_layout = kv_layout
        self._layout = layout_code(self._op, kv_layout)
        self._use_cuda_graph = use_cuda_graph
        self._backend = backend
        self._jit = None if jit_args is None else JitArguments(jit_args, self._known_tensors)
        self._jit_module: Any = None
        self._cached_module: Any = None
        self._plan_info: Any = None
        self.device = float_workspace_buffer.device
        self._device_kind = device_kind(self.device)
        self._lock.follow_streams(self.device)
        int_workspace = torch.empty(_INT_WORKSPACE_BYTES, dtype=torch.uint8, device=self.device)
        self._set_workspaces(float_workspace_buffer, int_workspace)
        self._handle = next(_handles)
        _wrappers[self._handle] = self

    @property
    def _is_capturable(self) -> bool:
        return self._use_cuda_graph

    @property
    def is_cuda_graph_enabled(self) -> bool:
        return self._use_cuda_graph

    def _require_graph_buffers(self, *dtypes: torch.dtype, **buffers: Optional[torch.Tensor]) -> None:
        """Check the buffers of a CUDA graph. ``copy_`` would convert to any dtype, but kernels read the raw memory."""
        for name, buffer in buffers.items():
            if not isinstance(buffer, torch.Tensor):
                raise ArgumentError(f"{self._op}: {name} must be a tensor (use_cuda_graph=True), got none")
            if buffer.dtype not in dtypes or buffer.device != self.device:
                raise ArgumentError(
                    f"{self._op}: {name} must be {dtypes[0]} on {self.device}, got {buffer.dtype} on {buffer.device}"
                )
            if buffer.dim() != 1 or not buffer.is_contiguous():
                raise ArgumentError(
                    f"{self._op}: {name} must have one dimension without gaps, got shape {tuple(buffer.shape)} and "
                    f"strides {buffer.stride()}"
                )

    def reset_workspace_buffer(self, float_workspace_buffer: torch.Tensor, int_workspace_buffer: torch.Tensor) -> None:
        """Replace the workspaces. ``plan`` must be called again before ``run``.

        Parameters
        ----------
        float_workspace_buffer : torch.Tensor
            Any dtype; on the device of the first one, aligned to 16 bytes.
        int_workspace_buffer : torch.Tensor
            Any dtype; on the device of the first one, aligned to 16 bytes.
        """
        self._set_workspaces(float_workspace_buffer, int_workspace_buffer)
        self._plan_info = None  # the plan lives in the old workspace, so it is no longer valid

    def _set_workspaces(self, float_workspace: torch.Tensor, int_workspace: torch.Tensor) -> None:
        self._check_workspaces(float_workspace, int_workspace)
        self._float_workspace_buffer = float_workspace
        self._int_workspace_buffer = int_workspace
        self._indptr_views: dict[tuple[int, int], torch.Tensor] = {}
        self._viewed = int_workspace  #: workspace tensor that ``_indptr_views`` refers to
        self._pin_memory_int_workspace_buffer = self._pinned_like(int_workspace)

    def _pinned_like(self, int_workspace: torch.Tensor) -> torch.Tensor:
        is_pinned = self._device_kind == "cuda"
        return torch.empty(int_workspace.shape, dtype=int_workspace.dtype, device="cpu", pin_memory=is_pinned)

    def _copied_memory(self, memo: dict[int, Any], is_deep: bool) -> None:
        """Give the copy its own int workspace with the plan, and offset arrays that are views of that workspace."""
        pinned, scratch = self._pin_memory_int_workspace_buffer, self._float_workspace_buffer
        memo.setdefault(id(pinned), self._pinned_like(self._int_workspace_buffer))
        for tensor in (self._int_workspace_buffer, *self._indptr_views.values()):
            copy.deepcopy(tensor, memo)
        if is_deep:
            memo.setdefault(id(scratch), torch.empty_like(scratch))  # scratch: its contents need no copy

    def _begin_as_copy(self) -> None:
        self._record = self._record_memory = None
        self._handle = next(_handles)
        _wrappers[self._handle] = self

    def _check_alignment(self) -> None:
        buffers = self._float_workspace_buffer, self._int_workspace_buffer
        if buffers[0] is not self._aligned[0] or buffers[1] is not self._aligned[1]:
            self._check_workspaces(*buffers)

    def _check_workspaces(self, float_workspace: torch.Tensor, int_workspace: torch.Tensor) -> None:
        for name, buffer in (("float_workspace_buffer", float_workspace), ("int_workspace_buffer", int_workspace)):
            if buffer.device != self.device:
                raise ArgumentError(f"{self._op}: {name} must be on {self.device} (the wrapper's), got {buffer.device}")
            if buffer.numel() and buffer.data_ptr() % 16:
                raise ArgumentError(f"{self._op}: {name} must be 16-byte aligned, got address {buffer.data_ptr():#x}")
            if not buffer.is_contiguous():  # kernels treat the buffer as one contiguous block of bytes
                raise ArgumentError(f"{self._op}: {name} must be contiguous, got strides {buffer.stride()}")
        self._aligned = float_workspace, int_workspace

    def _indptr_on_device(self, indptr: torch.Tensor, which: int, non_blocking: bool) -> torch.Tensor:
        """Return ``kv_indptr`` (``which`` = 0) or ``qo_indptr`` (1) in device memory, for kernels.

        An array on the device is used directly. For an array on the host, the result is a view of the int workspace,
        where the native plan copies the array: after the plan's header (include/flashinfer/attention/plan/planner.h,
        ``IndptrOffset``).
        """
        name = ("kv_indptr", "qo_indptr")[which]
        if indptr.is_cuda or self._device_kind == "cpu":
            return to_device(self._op, name, indptr, self.device, non_blocking)
        if self._viewed is not self._int_workspace_buffer:  # serving engines replace the workspace
            self._viewed, self._indptr_views = self._int_workspace_buffer, {}
        size = indptr.shape[0]
        view = self._indptr_views.get((which, size))
        if view is None:
            begin = _PLAN_ALIGNMENT + which * (-(-4 * size // _PLAN_ALIGNMENT) * _PLAN_ALIGNMENT)
            taken = self._int_workspace_buffer.view(-1).view(torch.uint8)[begin : begin + 4 * size]
            if taken.numel() < 4 * size:  # workspace too small: the native plan raises the error
                return to_device(self._op, name, indptr, self.device, non_blocking)
            self._indptr_views[which, size] = view = taken.view(torch.int32)
        return view

    def _native_plan(self, entry: Any, *args: Any) -> Any:
        """Call a native plan, which fills pinned memory of the module and copies it to the device asynchronously.

        The pinned buffer of the wrapper is passed because the published signature has it; native code does not write
        to that buffer (csrc/attention_staging.h).
        """
        self._plan_info = None  # if planning fails, no valid plan remains
        return entry(
            self._float_workspace_buffer,
            self._int_workspace_buffer,
            self._pin_memory_int_workspace_buffer,
            *args,
        )

    def _set_parameters(self, options: AttentionOptions) -> None:
        sm_scale, rope_scale, rope_theta = options.sm_scale, options.rope_scale, options.rope_theta
        for name, x in (("sm_scale", sm_scale), ("rope_scale", rope_scale), ("rope_theta", rope_theta)):
            if x is not None and not isinstance(x, (float, Real)):  # run() would fail much later
                raise TypeError(f"{self._op}.plan: {name} must be float, got a {type(x).__name__}")
        cap, mode = max(options.logits_soft_cap or 0.0, 0.0), options.pos_encoding_mode
        self._pos_encoding = pos_encoding_code(self._op, mode)
        self._pos_encoding_mode = mode
        self._window_left, self._logits_soft_cap = options.window_left, cap
        self._sm_scale = sm_scale
        self._rope_scale = rope_scale
        self._rope_theta = rope_theta

    def _check_dtypes(self, q: torch.Tensor, k: torch.Tensor) -> None:
        check_tensors(f"{self._op}.run", q=q, k=k)
        if q.dtype is not self._cached_q_data_type:
            raise ArgumentError(
                f"{self._op}.run: The dtype of q {q.dtype} does not match the q_data_type {self._cached_q_data_type} "
                "given to plan()"
            )
        if k.dtype is not self._cached_kv_data_type:
            raise ArgumentError(
                f"{self._op}.run: The dtype of k {k.dtype} does not match the kv_data_type {self._cached_kv_data_type} "
                "given to plan()"
            )

    def _store_dtypes(self, dtypes: Dtypes) -> None:
        self._dtypes = dtypes
        self._cached_q_data_type = dtypes.q
        self._cached_kv_data_type = dtypes.kv
        self._cached_o_data_type = dtypes.o
        self._is_nvfp4 = dtypes.kv == torch.uint8

    def _require_plan(self) -> None:
        if self._plan_info is None:
            lost = "" if self._cached_module is None else " (the last one failed, or workspaces were replaced after it)"
            raise ArgumentError(f"{self._op}.run: plan() must be called before run(), got no plan{lost}")

    def _check_in_graph(self, launch: Launch) -> None:
        """Run the checks deferred from tracing to run time: do the tensors match the current plan?"""

    def _is_being_captured(self) -> bool:
        return self._device_kind == "cuda" and torch.cuda.is_current_stream_capturing()

    def _prepare_capture(self) -> None:
        """Keep the plan's memory for the graph if the call is being captured.

        Without use_cuda_graph, capture is rejected: the graph would keep reading buffers that the next plan replaces.
        """
        if not self._is_being_captured():
            return
        if not self._is_capturable:
            raise ArgumentError(
                f"{self._op}.run: the wrapper must be made with use_cuda_graph=True for a capture in a CUDA graph (the "
                "next plan() of this one would not reach the graph), got use_cuda_graph=False"
            )
        hold_for_graph(self)

    def _native_call(self, launch: Launch, enable_pdl: bool) -> tuple[Any, str, tuple[Any, ...]]:
        """Return the module, the name of the function to call and its arguments."""
        raise AssertionError("a subclass knows")

    def _launch(self, launch: Launch, enable_pdl: Optional[bool]) -> None:
        """Launch on the given tensors; if that fails, retry with contiguous copies of tensors with misaligned rows."""
        self._prepare_capture()
        if self._deferred is not None:
            self._deferred.append(launch)
            return
        try:
            module, name, args = self._native_call(launch, use_pdl(launch.q, enable_pdl))
            getattr(module, name)(*args)
        except Exception as error:
            copies = launch.aligned() if is_launch_error(error) else launch
            if copies is launch:
                explain_arguments(f"{self._op}.run", error, *launch.named(self._launched))
                raise
            self._launch(copies, enable_pdl)
            if copies.out is not launch.out:
                launch.out.copy_(copies.out)

    def _repeat_alone(self, *args: Any) -> Any:
        """Wait for the call of another thread or on another stream, then call the ``_repeat`` of a subclass."""
        with self._lock:
            on_current_stream(self)
            return self._repeat(*args)  # type: ignore[attr-defined]

    def _least_pages(self, k: torch.Tensor) -> int:
        """Return the smallest cache, in pages, for which page ids validated against ``k`` need no second validation.

        Only the CPU validates page ids. With CUDA graph buffers, page ids may change between any two runs, so every
        run validates them.
        """
        if self._device_kind != "cpu" or not self._is_paged:
            return 0
        return sys.maxsize if self._use_cuda_graph else k.shape[0]

    def _state(self) -> CallState:
        """Return the attributes that ``run`` reads, for comparison with those of a later call."""
        raise AssertionError("a subclass knows")

    def _launch_kept(self, launch: Launch, enable_pdl: Optional[bool], default_scale: float) -> None:
        """Launch as :meth:`_launch` does, and record the call for a later ``run`` with the same plan and parameters.

        A record is never repeated during a capture: native code rejects that, and the call comes here again.
        """
        if self._deferred is not None:
            self._launch(launch, enable_pdl)
            return
        self._prepare_capture()
        self._record = None
        if self._record_memory is None:
            self._record_memory = record_memory()
        module, name, args = self._native_call(launch, use_pdl(launch.q, enable_pdl))
        try:
            getattr(module, f"record_{name}")(self._record_memory, False, *args)
        except Exception as error:
            if not is_launch_error(error) or launch.aligned() is launch:
                explain_arguments(f"{self._op}.run", error, *launch.named(self._launched))
                raise
            self._launch(launch, enable_pdl)
            return
        self._record = CallRecord(
            module,
            self._record_memory,
            self._state(),
            launch.out,
            default_scale,
            self._least_pages(launch.k),
        )

    def prewarm_paged_kv_stride_variant(self, variant: str = "independent") -> None:
        """Check for a plan only: one module serves equal and different strides of keys and values."""
        if self._plan_info is None or self._jit is not None:
            raise RuntimeError(
                f"{self._op}.prewarm_paged_kv_stride_variant: the wrapper must be planned and without jit_args, got "
                "another"
            )


@register_custom_op("flashinfer::run_planned", mutates_args=("out", "lse"))
def run_planned(
    handle: int,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: Optional[torch.Tensor],
    tensors: list[Optional[torch.Tensor]],
    scalars: list[float],
    enable_pdl: Optional[bool],
) -> None:
    """Launch the current plan of the wrapper with this handle; a compiled graph holds the handle, not the plan."""
    wrapper, launch = _wrappers[handle], Launch(q, k, v, out, lse, tensors, scalars)
    with wrapper._lock:
        on_current_stream(wrapper)
        wrapper._check_in_graph(launch)
        wrapper._launch(launch, enable_pdl)
