# SPDX-License-Identifier: Apache-2.0
"""Green contexts: streams that run on a part of the SMs of a GPU, so that kernels share the GPU without mixing.

The package ``cuda-python`` (its module ``cuda.bindings.driver``) makes the driver calls and is imported by them; rules
and sums need neither it nor a GPU.
"""

from __future__ import annotations

from typing import Any, Optional, Sequence, Union

import torch

from ._runtime.arch import get_compute_capability as get_compute_capability
from ._runtime.errors import ArgumentError, LibraryError
from ._runtime.integer_math import round_up

__all__ = [
    "create_green_ctx_streams",
    "empty_per_locality_domain",
    "get_cudevice",
    "get_device_resource",
    "get_sm_count_constraint",
    "split_device_green_ctx",
    "split_device_green_ctx_by_sm_count",
    "split_resource",
    "split_resource_by_sm_count",
]

#: Smallest number of SMs of a part, and what it is a multiple of, by major compute capability.
_CONSTRAINTS = {6: (1, 1), 7: (2, 2), 8: (4, 2)}
_FROM_HOPPER = (8, 8)


def get_sm_count_constraint(major: int, minor: int) -> tuple[int, int]:
    """Return the smallest number of SMs that a part can have, and what the number must be a multiple of."""
    if major < min(_CONSTRAINTS):
        raise ArgumentError(f"get_sm_count_constraint: compute capability must be at least 6.0, got {major}.{minor}")
    return _CONSTRAINTS.get(major, _FROM_HOPPER)


def _driver() -> Any:
    """Return cuda-python's driver module, under its present or its former name."""
    try:
        from cuda.bindings import driver

        return driver
    except ImportError:
        pass
    try:
        from cuda import cuda as driver

        return driver
    except ImportError:
        raise LibraryError("green_ctx: needs the package cuda-python 12.4 or newer: pip install cuda-python") from None


def _call(function: str, *arguments: Any) -> Any:
    """Call a driver function and return its results without the status, one or a tuple."""
    driver = _driver()
    if not hasattr(driver, function):
        raise LibraryError(
            f"green_ctx: {function} needs cuda-python 12.4 or newer, the installed one has no such function"
        )
    status, *results = getattr(driver, function)(*arguments)
    if int(status) != 0:
        _, name = driver.cuGetErrorName(status)
        text = name.decode() if isinstance(name, bytes) else str(name)
        raise RuntimeError(f"green_ctx: {function} failed with {text} ({int(status)})")
    return results[0] if len(results) == 1 else tuple(results)


def get_cudevice(dev: torch.device) -> Any:
    """Return the driver's handle (``CUdevice``) of a torch device."""
    _call("cuInit", 0)
    index = torch.device(dev).index
    return _call("cuDeviceGet", torch.cuda.current_device() if index is None else index)


def get_device_resource(cu_dev: Any) -> Any:
    """Return all SMs of a device as a resource; ``resource.sm.smCount`` is their number."""
    return _call("cuDeviceGetDevResource", cu_dev, _driver().CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM)


def split_resource(resource: Any, num_groups: int, min_count: int) -> tuple[list[Any], Any]:
    """Split SMs in groups of equal size.

    Parameters
    ----------
    resource : CUdevResource
        What to split.
    num_groups : int
        Number of groups.
    min_count : int
        SMs that each group has at least; the driver may round up.

    Returns
    -------
    (list of CUdevResource, CUdevResource)
        The groups, and the SMs that are left.
    """
    groups, _, remaining = _call("cuDevSmResourceSplitByCount", num_groups, resource, 0, min_count)
    return list(groups), remaining


def _as_resource_of_a_context(cu_dev: Any, resource: Any) -> Any:
    """Make a green context of the SMs that a split left and return its resource, which can be split again."""
    flags = _driver().CUgreenCtxCreate_flags.CU_GREEN_CTX_DEFAULT_STREAM
    context = _call("cuGreenCtxCreate", _call("cuDevResourceGenerateDesc", [resource], 1), cu_dev, flags)
    return _call("cuGreenCtxGetDevResource", context, _driver().CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM)


def split_resource_by_sm_count(cu_dev: Any, resource: Any, sm_counts: Sequence[int]) -> tuple[list[Any], Any]:
    """Split SMs in groups of the sizes that are asked for.

    Parameters
    ----------
    cu_dev : CUdevice
        The device of the resource.
    resource : CUdevResource
        What to split.
    sm_counts : sequence of int
        SMs of each group, as :func:`get_sm_count_constraint` allows them.

    Returns
    -------
    (list of CUdevResource, CUdevResource)
        The groups, and the SMs that are left.
    """
    groups: list[Any] = []
    remaining = resource
    for i, count in enumerate(sm_counts):
        if i:
            remaining = _as_resource_of_a_context(cu_dev, remaining)
        (group,), remaining = split_resource(remaining, 1, count)
        groups.append(group)
    return groups, remaining


def create_green_ctx_streams(cu_dev: Any, resources: Sequence[Any]) -> list[torch.cuda.Stream]:
    """Return a non-blocking stream for each resource, in a green context of its own. They live as long as the process.

    Parameters
    ----------
    cu_dev : CUdevice
        The device of the resources.
    resources : sequence of CUdevResource
        SMs of each stream.
    """
    driver = _driver()
    streams = []
    for resource in resources:
        description = _call("cuDevResourceGenerateDesc", [resource], 1)
        context = _call(
            "cuGreenCtxCreate", description, cu_dev, driver.CUgreenCtxCreate_flags.CU_GREEN_CTX_DEFAULT_STREAM
        )
        stream = _call("cuGreenCtxStreamCreate", context, driver.CUstream_flags.CU_STREAM_NON_BLOCKING, 0)
        streams.append(torch.cuda.get_stream_from_external(int(stream), torch.device("cuda", int(cu_dev))))
    return streams


def _rounded(op: str, sm_counts: Sequence[int], constraint: tuple[int, int], total: int) -> list[int]:
    """Round counts up to what the hardware takes, and check that their sum is there."""
    for i, count in enumerate(sm_counts):
        if count <= 0:
            raise ArgumentError(f"{op}: sm_counts[{i}] must be positive, got {count}")
    smallest, multiple = constraint
    rounded = [round_up(max(count, smallest), multiple) for count in sm_counts]
    if sum(rounded) > total:
        raise RuntimeError(
            f"{op}: {len(rounded)} groups need {sum(rounded)} SMs (counts rounded up to multiples of {multiple}), the "
            f"device has {total}: reduce the number of groups or the number of SMs of a group"
        )
    return rounded


def split_device_green_ctx(
    dev: torch.device, num_groups: int, min_count: int
) -> tuple[list[torch.cuda.Stream], list[Any]]:
    """Split a GPU in groups of equal size and return a stream for each.

    Parameters
    ----------
    dev : torch.device
        The GPU.
    num_groups : int
        Number of groups.
    min_count : int
        SMs of each group, rounded up to what the hardware takes.

    Returns
    -------
    (list of streams, list of CUdevResource)
        ``num_groups + 1`` of each; the last has the SMs that are left.
    """
    op = "split_device_green_ctx"
    if num_groups < 1 or min_count < 1:
        raise ArgumentError(f"{op}: num_groups and min_count must be positive, got {num_groups} and {min_count}")
    cu_dev = get_cudevice(dev)
    resource = get_device_resource(cu_dev)
    constraint = get_sm_count_constraint(*get_compute_capability(dev))
    counts = _rounded(op, [min_count] * num_groups, constraint, resource.sm.smCount)
    groups, remaining = split_resource(resource, num_groups, counts[0])
    resources = [*groups, remaining]
    return create_green_ctx_streams(cu_dev, resources), resources


def split_device_green_ctx_by_sm_count(
    dev: torch.device, sm_counts: Sequence[int]
) -> tuple[list[torch.cuda.Stream], list[Any]]:
    """Split a GPU in groups of the sizes that are asked for and return a stream for each.

    Parameters
    ----------
    dev : torch.device
        The GPU.
    sm_counts : sequence of int
        SMs of each group, rounded up to what the hardware takes.

    Returns
    -------
    (list of streams, list of CUdevResource)
        ``len(sm_counts) + 1`` of each; the last has the SMs that are left.
    """
    op = "split_device_green_ctx_by_sm_count"
    _rounded(op, sm_counts, (1, 1), sum(sm_counts))  # the counts themselves need no GPU
    cu_dev = get_cudevice(dev)
    resource = get_device_resource(cu_dev)
    constraint = get_sm_count_constraint(*get_compute_capability(dev))
    counts = _rounded(op, sm_counts, constraint, resource.sm.smCount)
    groups, remaining = split_resource_by_sm_count(cu_dev, resource, counts)
    resources = [*groups, remaining]
    return create_green_ctx_streams(cu_dev, resources), resources


def get_locality_domain_count(dev: Optional[torch.device] = None) -> int:
    """Return 1: Hopper and older GPUs have one domain of SMs with memory of their own."""
    return 1


def split_device_green_ctx_by_locality_domain(dev: torch.device) -> tuple[list[torch.cuda.Stream], list[Any]]:
    """Split a GPU by its domains of SMs and memory: one group with all SMs.

    Returns
    -------
    (list of streams, list of CUdevResource)
        One of each.
    """
    cu_dev = get_cudevice(dev)
    resources = [get_device_resource(cu_dev)]
    return create_green_ctx_streams(cu_dev, resources), resources


def empty_per_locality_domain(
    *size: int, dtype: Optional[torch.dtype] = None, device: Union[torch.device, str] = "cuda"
) -> list[torch.Tensor]:
    """Return an empty tensor in the memory of each domain: one."""
    shape = size[0] if len(size) == 1 and isinstance(size[0], (tuple, list, torch.Size)) else size
    return [torch.empty(shape, dtype=dtype, device=device)]
