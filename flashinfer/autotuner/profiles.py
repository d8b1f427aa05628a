# SPDX-License-Identifier: Apache-2.0
"""Which sizes are tried: dimensions that vary, those that follow from others, and the tensors made for a trial."""

from __future__ import annotations

import itertools
from dataclasses import dataclass, field
from typing import Any, Callable, Iterator, NamedTuple, Optional, Sequence, Union

import torch

__all__ = [
    "Bucketing",
    "ConstraintSpec",
    "DynamicDim",
    "DynamicTensorSpec",
    "OptimizationProfile",
    "ProfilingCacheKey",
    "Shapes",
    "StaticDim",
    "TuningConfig",
    "inputs_of",
    "nearest_profile",
    "profiles_for",
    "shapes_of",
]

Shapes = tuple[tuple[int, ...], ...]
Mapper = Callable[[int], int]
_FOLLOWS = -1  # a dimension that others determine does not tell profiles apart


@dataclass(frozen=True)
class StaticDim:
    """A dimension that stays as it is."""

    val: int

    @property
    def opt(self) -> int:
        return self.val


@dataclass(frozen=True)
class DynamicDim:
    """A dimension that stands for all from ``min`` to ``max`` and is tried at ``opt``."""

    min: int
    opt: int
    max: int


@dataclass(frozen=True)
class DynamicTensorSpec:
    """A size that varies: dimension ``dim_idx`` of input ``input_idx``, or several of each that are always equal.

    ``gen_tuning_buckets`` are the sizes to try, or a function that makes them from the size at hand;
    ``map_to_tuning_buckets`` gives the one that stands for a size.
    """

    input_idx: Union[int, tuple[int, ...]]
    dim_idx: Union[int, tuple[int, ...]]
    gen_tuning_buckets: Union[tuple[int, ...], Callable[[int], Sequence[int]]]
    map_to_tuning_buckets: Mapper

    @property
    def places(self) -> list[tuple[int, int]]:
        inputs = self.input_idx if isinstance(self.input_idx, (tuple, list)) else (self.input_idx,)
        dims = self.dim_idx if isinstance(self.dim_idx, (tuple, list)) else (self.dim_idx,)
        return list(zip(inputs, dims, strict=True))


@dataclass(frozen=True)
class ConstraintSpec:
    """A dimension that follows from others: ``infer_shape`` computes it from the shapes of all inputs."""

    input_idx: int
    dim_idx: int
    infer_shape: Callable[[Sequence[Sequence[int]]], int]


@dataclass(frozen=True, kw_only=True)
class TuningConfig:
    """How an operator is tuned.

    ``tensor_initializers[i]`` makes input ``i`` of a trial from a shape, a dtype and a device; None, or none, means
    :func:`autotuner_initializer_rand_scaled`. ``inputs_pre_hook`` is given the inputs of a trial and returns those to
    use.
    """

    dynamic_tensor_specs: tuple[DynamicTensorSpec, ...] = ()
    constraint_specs: tuple[ConstraintSpec, ...] = ()
    tensor_initializers: tuple[Optional[Callable[..., torch.Tensor]], ...] = ()
    use_cold_l2_cache: bool = False
    use_cuda_graph: bool = False
    value_aware_input_indices: tuple[int, ...] = ()
    profile_arena_input_indices: tuple[int, ...] = ()
    inputs_pre_hook: Optional[Callable[[list[Any]], list[Any]]] = None


@dataclass
class OptimizationProfile:
    """Shapes of one trial."""

    shapes: list[list[Union[StaticDim, DynamicDim]]]
    tensor_initializers: list[Any] = field(default_factory=list)

    def get_opt_shapes(self) -> Shapes:
        return tuple(tuple(dim.opt for dim in shape) for shape in self.shapes)

    def get_hash_key(self) -> Shapes:
        return self.get_opt_shapes()


class ProfilingCacheKey(NamedTuple):
    """What a result is good for."""

    custom_op: str
    runner_class_name: str
    runner_hash: int
    nearest_profile: Shapes
    extras: tuple[Any, ...]

    @property
    def file_key(self) -> str:
        """The same without the hash, which another process would not have."""
        return str((self.custom_op, self.runner_class_name, self.nearest_profile, self.extras))


class Bucketing(NamedTuple):
    """Buckets that ``autotune`` was given for every operator."""

    buckets: Optional[tuple[int, ...]] = None
    mapper: Optional[Mapper] = None

    def sizes(self, spec: DynamicTensorSpec, size: int) -> Sequence[int]:
        if self.buckets is not None:
            return self.buckets
        return spec.gen_tuning_buckets(size) if callable(spec.gen_tuning_buckets) else spec.gen_tuning_buckets

    def map(self, spec: DynamicTensorSpec) -> Mapper:
        return self.mapper or spec.map_to_tuning_buckets


def shapes_of(inputs: Sequence[Any]) -> Shapes:
    """What is no tensor has no dimensions."""
    return tuple(tuple(x.shape) if isinstance(x, torch.Tensor) else () for x in inputs)


def nearest_profile(shapes: Sequence[Sequence[int]], config: TuningConfig, bucketing: Bucketing) -> Shapes:
    """The shapes with the bucket of each size that varies."""
    nearest = [list(shape) for shape in shapes]
    for spec in config.dynamic_tensor_specs:
        (first_input, first_dim), *_ = spec.places
        bucket = bucketing.map(spec)(nearest[first_input][first_dim])
        for i, dim in spec.places:
            nearest[i][dim] = bucket
    for constraint in config.constraint_specs:
        nearest[constraint.input_idx][constraint.dim_idx] = _FOLLOWS
    return tuple(tuple(shape) for shape in nearest)


def profiles_for(
    shapes: Sequence[Sequence[int]], config: TuningConfig, bucketing: Bucketing
) -> Iterator[OptimizationProfile]:
    """A trial for each combination of buckets; the largest first, so that what fits once always will."""
    specs = config.dynamic_tensor_specs
    sizes = [sorted(bucketing.sizes(s, shapes[s.places[0][0]][s.places[0][1]]), reverse=True) for s in specs]
    for chosen in itertools.product(*sizes):
        plain = [list(shape) for shape in shapes]
        for spec, bucket in zip(specs, chosen, strict=True):
            for i, dim in spec.places:
                plain[i][dim] = bucket
        dims: list[list[Union[StaticDim, DynamicDim]]] = [[StaticDim(n) for n in shape] for shape in plain]
        for k, spec in enumerate(specs):
            larger = [size for size in sizes[k] if size > chosen[k]]
            for i, dim in spec.places:
                dims[i][dim] = DynamicDim(chosen[k], chosen[k], larger[-1] - 1 if larger else 2**31 - 1)
        for constraint in config.constraint_specs:
            dims[constraint.input_idx][constraint.dim_idx] = StaticDim(constraint.infer_shape(plain))
        yield OptimizationProfile(dims, list(config.tensor_initializers))


def inputs_of(profile: OptimizationProfile, inputs: Sequence[Any]) -> list[Any]:
    """The caller's inputs, and new tensors in place of those that have another shape in the trial."""
    made = []
    for i, (shape, x) in enumerate(zip(profile.get_opt_shapes(), inputs, strict=True)):
        if isinstance(x, torch.Tensor) and tuple(x.shape) != shape:
            given = profile.tensor_initializers[i] if i < len(profile.tensor_initializers) else None
            x = (given or autotuner_initializer_rand_scaled)(shape, x.dtype, x.device)
        made.append(x)
    return made


def autotuner_initializer_empty(shapes: Sequence[int], dtype: torch.dtype, device: Any) -> torch.Tensor:
    return torch.empty(shapes, dtype=dtype, device=device)


def autotuner_initializer_zeros(shapes: Sequence[int], dtype: torch.dtype, device: Any) -> torch.Tensor:
    return torch.zeros(shapes, device=device).to(dtype)


def autotuner_initializer_ones(shapes: Sequence[int], dtype: torch.dtype, device: Any) -> torch.Tensor:
    return torch.ones(shapes, device=device).to(dtype)


def autotuner_initializer_randn(shapes: Sequence[int], dtype: torch.dtype, device: Any) -> torch.Tensor:
    return torch.randn(shapes, device=device).to(dtype)


def autotuner_initializer_rand(shapes: Sequence[int], dtype: torch.dtype, device: Any) -> torch.Tensor:
    """From 0 to 1."""
    return torch.rand(shapes, device=device).to(dtype)


def autotuner_initializer_rand_scaled(shapes: Sequence[int], dtype: torch.dtype, device: Any) -> torch.Tensor:
    """From -5 to 5; what has no sign from 0 to 5, what has two values either."""
    numbers = torch.rand(shapes, device=device) * 10 - 5
    if dtype is torch.bool:
        return numbers > 0
    return (numbers.abs() if not dtype.is_signed else numbers).to(dtype)
