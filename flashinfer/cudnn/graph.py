# SPDX-License-Identifier: Apache-2.0
"""Graphs of cuDNN attention calls: built once per set of shapes, cached, and run many times."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any, Optional

import torch

from .._runtime.errors import ArgumentError, LibraryError

__all__ = ["Operand", "SdpaShapes", "frontend", "has_frontend", "run_sdpa"]

_DTYPES = {
    torch.float16: "HALF",
    torch.bfloat16: "BFLOAT16",
    torch.float32: "FLOAT",
    torch.int32: "INT32",
    torch.int64: "INT64",
}


def has_frontend() -> bool:
    """Return True if the package of cuDNN's frontend can be imported."""
    try:
        import cudnn
    except ImportError:
        return False
    return cudnn is not None


def frontend(op: str) -> Any:
    """Import the package of cuDNN's frontend, or raise a LibraryError."""
    try:
        import cudnn
    except ImportError as error:
        raise LibraryError(
            f"{op}: the package nvidia-cudnn-frontend must be installed (the wrappers of flashinfer.decode and "
            "flashinfer.prefill need no such package), got no module cudnn"
        ) from error
    return cudnn


@dataclass(frozen=True)
class Operand:
    """Description of a tensor in a graph, always with four dimensions."""

    dim: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    @staticmethod
    def of(x: torch.Tensor, dim: Optional[tuple[int, ...]] = None, stride: Optional[tuple[int, ...]] = None) -> Operand:
        return Operand(dim or tuple(x.shape), stride or tuple(x.stride()), x.dtype)


@dataclass(frozen=True)
class SdpaShapes:
    """Cache key of a graph. A field that is None is not used; ``operands`` are named as in ``run_sdpa``."""

    operands: tuple[tuple[str, Operand], ...]
    scale: float
    causal: bool
    max_seq_len_kv: Optional[int]
    device: int


@functools.cache
def _handle(device: int) -> Any:
    import cudnn

    with torch.cuda.device(device):
        return cudnn.create_handle()


@functools.lru_cache(maxsize=256)
def _build(shapes: SdpaShapes) -> tuple[Any, dict[str, Any]]:
    import cudnn

    def kind(dtype: torch.dtype) -> Any:
        return getattr(cudnn.data_type, _DTYPES[dtype])

    described = dict(shapes.operands)
    graph = cudnn.pygraph(
        io_data_type=kind(described["q"].dtype),
        intermediate_data_type=cudnn.data_type.FLOAT,
        compute_data_type=cudnn.data_type.FLOAT,
        handle=_handle(shapes.device),
    )

    def tensor(name: str) -> Any:
        x = described[name]
        return graph.tensor(name=name, dim=list(x.dim), stride=list(x.stride), data_type=kind(x.dtype))

    outputs = ("out", "stats")
    tensors = {name: tensor(name) for name in described if name not in outputs}
    for name, offsets in (("q", "offsets_q"), ("k", "offsets_k"), ("v", "offsets_v")):
        if offsets in tensors:
            tensors[name].set_ragged_offset(tensors[offsets])
    pages = {}
    if "table_k" in tensors:
        pages = {
            "paged_attention_k_table": tensors["table_k"],
            "paged_attention_v_table": tensors["table_v"],
            "paged_attention_max_seq_len_kv": shapes.max_seq_len_kv,
        }
    out, stats = graph.sdpa(
        name="sdpa",
        q=tensors["q"],
        k=tensors["k"],
        v=tensors["v"],
        is_inference="stats" not in described,
        attn_scale=shapes.scale,
        use_causal_mask_bottom_right=shapes.causal,
        use_padding_mask=True,
        seq_len_q=tensors["seq_len_q"],
        seq_len_kv=tensors["seq_len_kv"],
        **pages,
    )
    for name, result, offsets in (("out", out, "offsets_o"), ("stats", stats, "offsets_stats")):
        if name in described:
            x = described[name]
            result.set_output(True).set_dim(list(x.dim)).set_stride(list(x.stride)).set_data_type(kind(x.dtype))
            if offsets in tensors:
                result.set_ragged_offset(tensors[offsets])
            tensors[name] = result
    graph.validate()
    graph.build_operation_graph()
    graph.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
    graph.check_support()
    graph.build_plans()
    return graph, tensors


def _expect_cuda(op: str, device: torch.device) -> int:
    if device.type != "cuda":
        raise ArgumentError(f"{op}: q must be on a CUDA device (cuDNN has no CPU kernels), got {device}")
    return device.index or 0


def run_sdpa(
    op: str,
    tensors: dict[str, torch.Tensor],
    described: dict[str, Operand],
    scale: float,
    causal: bool,
    max_seq_len_kv: Optional[int],
    workspace: torch.Tensor,
) -> None:
    """Run the graph for these shapes on the current stream.

    ``tensors`` has q, k, v, seq_len_q, seq_len_kv and out; table_k and table_v for a paged cache; stats for an LSE;
    offsets_* for ragged tensors. ``described`` gives the 4-D shape and strides of tensors that are not 4-D.
    """
    cudnn = frontend(op)
    device = tensors["q"].device
    index = _expect_cuda(op, device)
    operands = tuple((name, described.get(name) or Operand.of(x)) for name, x in sorted(tensors.items()))
    shapes = SdpaShapes(operands, scale, causal, max_seq_len_kv, index)
    graph, known = _build(shapes)
    handle = _handle(shapes.device)
    cudnn.set_stream(handle=handle, stream=torch.cuda.current_stream(device).cuda_stream)
    needed = graph.get_workspace_size()
    if workspace.nbytes < needed:
        raise ArgumentError(
            f"{op}: workspace_buffer must have {needed} bytes (what cuDNN asks), got {workspace.nbytes}"
        )
    graph.execute({known[name]: x for name, x in tensors.items()}, workspace, handle=handle)
