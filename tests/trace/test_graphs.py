# SPDX-License-Identifier: Apache-2.0
"""Every traced function in a graph of torch.compile and in a CUDA graph: the same bits as the eager call."""

from __future__ import annotations

import pytest
import torch

from .calls import CUDA_ONLY, DEFINITIONS, load, tensors_of

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

_ON_THE_HOST = "computes on the host"
NO_CUDA_GRAPH = {
    "segment_packbits": "the size of the result depends on values",
    "e2m1_and_ufp8sf_scale_to_float": _ON_THE_HOST,
    "mxfp4_dequantize": _ON_THE_HOST,
    "mxfp4_dequantize_host": _ON_THE_HOST,
    "mxfp8_dequantize_host": _ON_THE_HOST,
}


def assert_same(actual: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    for name, value in expected.items():
        for one, other in zip(tensors_of(actual[name]), tensors_of(value), strict=True):
            assert one.dtype == other.dtype and one.shape == other.shape, name
            assert torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8)), name


@DEFINITIONS
def test_torch_compile(name, device):
    call = load(name, device)
    if device == "cpu" and call.name in CUDA_ONLY:
        pytest.skip(f"{call.name} needs a GPU")
    torch.compiler.reset()
    compiled = torch.compile(call.api, fullgraph=True, backend="aot_eager")
    arguments = call.arguments()
    torch.manual_seed(0)  # some draw tokens
    result = compiled(**arguments)
    torch.manual_seed(0)
    assert_same(call.outputs(arguments, result), call.actual())


@needs_cuda
@DEFINITIONS
def test_cuda_graph(name):
    call = load(name, "cuda")
    if "sampling" in call.name:
        pytest.skip(f"{call.name}: draws from the generator of the device, which a replay advances")
    if call.name in NO_CUDA_GRAPH:
        pytest.skip(f"{call.name}: {NO_CUDA_GRAPH[call.name]}")
    expected = call.actual()  # builds and loads the module, which must not happen during a capture
    arguments = call.arguments()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = call.api(**arguments)
    graph.replay()
    torch.cuda.synchronize()
    assert_same(call.outputs(arguments, result), expected)
