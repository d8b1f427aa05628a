# SPDX-License-Identifier: Apache-2.0
"""The modules of the comm family: one per stem and backend; element types are dispatched inside."""

from __future__ import annotations

from typing import Iterator

from .codegen import stage
from .core import JitSpec

__all__ = [
    "gen_allreduce_module",
    "gen_alltoall_module",
    "gen_comm_alltoall_module",
    "gen_comm_modules",
    "gen_dcp_alltoall_module",
    "gen_moe_alltoall_module",
    "gen_moe_comm_module",
    "gen_pcie_ipc_comm_debug_module",
    "gen_pcie_ipc_comm_module",
    "gen_trtllm_comm_module",
    "gen_trtllm_mnnvl_comm_module",
    "gen_vllm_ar_module",
    "gen_vllm_comm_module",
]

_FLOATS = ("float16_t", "bfloat16_t", "float")


def gen_allreduce_module(backend: str = "cuda") -> JitSpec:
    """Describe the module of the all-reduce fused with residual, norm and quantisation."""
    units = {"check": {"dtype": ""}, **{dtype: {"dtype": dtype} for dtype in _FLOATS}}
    return stage("allreduce", backend=backend, kernels=units)


def gen_alltoall_module(backend: str = "cuda") -> JitSpec:
    """Describe the module of the one-sided exchange of tokens between the ranks of expert-parallel layers."""
    units = {"dispatch": {"dtype": ""}, **{dtype: {"dtype": dtype} for dtype in _FLOATS}}
    return stage("alltoall", backend=backend, kernels=units)


def gen_moe_comm_module(backend: str = "cuda") -> JitSpec:
    """Describe the module of the two-sided exchange of rows."""
    return stage("moe_comm", backend=backend, kernels={"fifo": {}})


def gen_vllm_ar_module(backend: str = "cuda") -> JitSpec:
    """Describe the module of the all-reduce behind vLLM's operators."""
    return stage("vllm_ar", backend=backend, kernels={dtype: {"dtype": dtype} for dtype in _FLOATS})


def gen_comm_modules(backend: str = "cuda") -> Iterator[JitSpec]:
    """Yield the modules that AOT pre-builds and that a warm-up of the family loads."""
    yield gen_allreduce_module(backend)
    yield gen_alltoall_module(backend)
    yield gen_moe_comm_module(backend)
    yield gen_vllm_ar_module(backend)


# The published names. Published packages have a module for each kind of memory; here that is the business of the
# workspace, and a module has the kernels of one protocol.


def gen_trtllm_comm_module(backend: str = "cuda") -> JitSpec:
    """Describe the module of the fused all-reduce over memory that processes of a node share."""
    return gen_allreduce_module(backend)


def gen_trtllm_mnnvl_comm_module(backend: str = "cuda") -> JitSpec:
    """Describe the module of the fused all-reduce over multicast memory."""
    return gen_allreduce_module(backend)


def gen_vllm_comm_module(backend: str = "cuda") -> JitSpec:
    """Describe the module of the all-reduce without a fused operation."""
    return gen_vllm_ar_module(backend)


def gen_pcie_ipc_comm_module(backend: str = "cuda") -> JitSpec:
    """Describe the module of the all-reduce between GPUs without NVLink: peers read memory the same way there."""
    return gen_allreduce_module(backend)


def gen_pcie_ipc_comm_debug_module(backend: str = "cuda") -> JitSpec:
    """Describe the module of :func:`gen_pcie_ipc_comm_module`, which has no other form for debugging."""
    return gen_allreduce_module(backend)


def gen_comm_alltoall_module(backend: str = "cuda") -> JitSpec:
    """Describe the module of the two-sided exchange of tokens."""
    return gen_moe_comm_module(backend)


def gen_moe_alltoall_module(backend: str = "cuda") -> JitSpec:
    """Describe the module of the exchange of tokens between the ranks of expert-parallel layers."""
    return gen_alltoall_module(backend)


def gen_dcp_alltoall_module(backend: str = "cuda") -> JitSpec:
    """Describe the module of the exchange of partial attention outputs between ranks of a decode."""
    return gen_alltoall_module(backend)
