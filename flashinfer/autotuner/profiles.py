# SPDX-License-Identifier: Apache-2.0
"""Tuned shapes: dynamic dimensions, dimensions derived from others, and the tensors allocated for a trial."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from dataclasses import dataclass, field
from typing import Any, Callable, NamedTuple, Optional, Sequence, Union

import torch

from .._runtime.errors import ArgumentError
from .buckets import make_bucket_mapper, make_generated_bucket_mapper
from .initializers import autotuner_initializer_rand_scaled

__all__ = [
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
    "profile_of_bucket",
    "profiles_for",
    "shapes_of",
    "stand_ins_of",
    "with_buckets",
]

Shapes = tuple[tuple[int, ...], ...]
Mapper = Callable[[int], int]
Initializer = Callable[..., torch.Tensor]
_UNBOUNDED = 2**31 - 1
_FOLLOWS = -1  # size of a derived dimension in keys: derived dimensions do not distinguish profiles


@dataclass(frozen=True)
class StaticDim:
    """A dimension of fixed size."""

    val: int

    @property
    def opt(self) -> int:
        return self.val


@dataclass(frozen=True)
class DynamicDim:
    """A dimension whose size is ``opt`` in the trial, which represents all sizes from ``min`` to ``max``."""

    min: int
    opt: int
    max: int


@dataclass(frozen=True)
class DynamicTensorSpec:
    """A dynamic size: dimension ``dim_idx`` of input ``input_idx``, or tuples of both if several are always equal.

    ``gen_tuning_buckets`` are the sizes to try, or a function that makes them from the current size;
    ``map_to_tuning_buckets`` maps a size to its bucket.
    """

    input_idx: Union[int, tuple[int, ...]]
    dim_idx: Union[int, tuple[int, ...]]
    gen_tuning_buckets: Union[tuple[int, ...], Callable[[int], Sequence[int]]]
    map_to_tuning_buckets: Mapper

    def __post_init__(self) -> None:
        for name in ("input_idx", "dim_idx", "gen_tuning_buckets"):  # specs are keys of caches, and lists have no hash
            if isinstance(getattr(self, name), list):
                object.__setattr__(self, name, tuple(getattr(self, name)))

    @property
    def places(self) -> list[tuple[int, int]]:
        """Pairs (input index, dimension index)."""
        inputs = self.input_idx if isinstance(self.input_idx, (tuple, list)) else (self.input_idx,)
        dims = self.dim_idx if isinstance(self.dim_idx, (tuple, list)) else (self.dim_idx,)
        return list(zip(inputs, dims, strict=True))

    def size_in(self, shapes: Sequence[Sequence[int]]) -> int:
        i, dim = self.places[0]
        return shapes[i][dim]

    def buckets_for(self, size: int) -> Sequence[int]:
        return self.gen_tuning_buckets(size) if callable(self.gen_tuning_buckets) else self.gen_tuning_buckets


@dataclass(frozen=True)
class ConstraintSpec:
    """A derived dimension: ``infer_shape`` computes its size from the shapes of all inputs."""

    input_idx: int
    dim_idx: int
    infer_shape: Callable[[Sequence[Sequence[int]]], int]


@dataclass(frozen=True, kw_only=True)
class TuningConfig:
    """Tuning options of an operator.

    Parameters
    ----------
    dynamic_tensor_specs, constraint_specs
        Sizes that vary, and those that follow from them.
    tensor_initializers : Tuple[Tuple[int, Callable], ...]
        Pairs of an input's number and what makes that input of a trial from a shape, a dtype and a device. An input
        without one is made by :func:`autotuner_initializer_rand_scaled`.
    use_cold_l2_cache : bool
        Whether every timed call finds its inputs evicted from the cache.
    use_cuda_graph : bool
        Whether the call is captured and its replay is timed.
    value_aware_input_indices, profile_arena_input_indices : Tuple[int, ...]
        Inputs whose copies, one for each timed call, lie in two buffers larger than the cache.
    inputs_pre_hook : Optional[Callable]
        Is given the inputs of a trial once for each bucket and returns those to use.
    """

    dynamic_tensor_specs: tuple[DynamicTensorSpec, ...] = ()
    constraint_specs: tuple[ConstraintSpec, ...] = ()
    tensor_initializers: tuple[tuple[int, Initializer], ...] = ()
    use_cold_l2_cache: bool = False
    use_cuda_graph: bool = False
    value_aware_input_indices: tuple[int, ...] = ()
    profile_arena_input_indices: tuple[int, ...] = ()
    inputs_pre_hook: Optional[Callable[[list[Any]], list[Any]]] = None

    def __post_init__(self) -> None:
        for pair in self.tensor_initializers:
            if not (isinstance(pair, (tuple, list)) and len(pair) == 2 and isinstance(pair[0], int)):
                raise ArgumentError(
                    f"TuningConfig: tensor_initializers must be pairs (number of an input, initializer), got {pair!r}"
                )


@dataclass
class OptimizationProfile:
    """Shapes of one trial, and the initializer of each input, or None."""

    shapes: list[list[Union[StaticDim, DynamicDim]]]
    tensor_initializers: list[Optional[Initializer]] = field(default_factory=list)

    def get_opt_shapes(self) -> Shapes:
        return tuple(tuple(dim.opt for dim in shape) for shape in self.shapes)

    def get_hash_key(self) -> Shapes:
        return self.get_opt_shapes()


class ProfilingCacheKey(NamedTuple):
    """Key of a tuning result: operator, runner, bucketed shapes and further properties of the inputs."""

    custom_op: str
    runner_class_name: str
    runner_hash: int
    nearest_profile: Shapes
    extras: tuple[Any, ...]

    @property
    def file_key(self) -> str:
        """Key for files. The hash is left out because it differs between processes."""
        return str((self.custom_op, self.runner_class_name, self.nearest_profile, self.extras))

    @property
    def key_fields(self) -> dict[str, Any]:
        """The parts of :attr:`file_key` by name."""
        return {
            "custom_op": self.custom_op,
            "runner_class_name": self.runner_class_name,
            "nearest_profile": self.nearest_profile,
            "extras": self.extras,
        }


@functools.lru_cache(maxsize=1024)
def _with_bucket_rule(
    spec: DynamicTensorSpec, buckets: Optional[tuple[int, ...]], round_up: Optional[bool]
) -> DynamicTensorSpec:
    if buckets is not None:
        mapper = make_bucket_mapper(buckets, bool(round_up))
        return dataclasses.replace(spec, gen_tuning_buckets=buckets, map_to_tuning_buckets=mapper)
    if callable(spec.gen_tuning_buckets):
        mapper = make_generated_bucket_mapper(spec.gen_tuning_buckets)
    else:
        mapper = make_bucket_mapper(tuple(spec.gen_tuning_buckets), True)
    return dataclasses.replace(spec, map_to_tuning_buckets=mapper)


def with_buckets(config: TuningConfig, buckets: Optional[tuple[int, ...]], round_up: Optional[bool]) -> TuningConfig:
    """Return the configuration with the overrides of ``autotune``: its buckets, and whether sizes round up."""
    if buckets is None and not round_up:
        return config
    specs = tuple(_with_bucket_rule(spec, buckets, round_up) for spec in config.dynamic_tensor_specs)
    return dataclasses.replace(config, dynamic_tensor_specs=specs)


def shapes_of(inputs: Sequence[Any]) -> Shapes:
    """Return the shape of each input; ``()`` for an input that is not a tensor."""
    return tuple(tuple(x.shape) if isinstance(x, torch.Tensor) else () for x in inputs)


@functools.lru_cache(maxsize=8192)
def nearest_profile(
    shapes: Shapes, specs: tuple[DynamicTensorSpec, ...], constraints: tuple[ConstraintSpec, ...]
) -> Shapes:
    """Return the shapes with every dynamic size replaced by its bucket."""
    nearest = [list(shape) for shape in shapes]
    for spec in specs:
        bucket = spec.map_to_tuning_buckets(spec.size_in(nearest))
        for i, dim in spec.places:
            nearest[i][dim] = bucket
    for constraint in constraints:
        nearest[constraint.input_idx][constraint.dim_idx] = _FOLLOWS
    return tuple(tuple(shape) for shape in nearest)


def _profile(
    shapes: Sequence[Sequence[int]], config: TuningConfig, chosen: Sequence[int], largest: Sequence[int]
) -> OptimizationProfile:
    """Return the trial with the sizes ``chosen``, one for each spec, which represent the sizes up to ``largest``."""
    plain = [list(shape) for shape in shapes]
    dims: list[list[Union[StaticDim, DynamicDim]]] = [[StaticDim(n) for n in shape] for shape in shapes]
    for spec, size, last in zip(config.dynamic_tensor_specs, chosen, largest, strict=True):
        for i, dim in spec.places:
            plain[i][dim] = size
            dims[i][dim] = DynamicDim(size, size, last)
    for constraint in config.constraint_specs:
        size = constraint.infer_shape(plain)
        dims[constraint.input_idx][constraint.dim_idx] = DynamicDim(size, size, size)
    initializers: list[Optional[Initializer]] = [None] * len(dims)
    for i, initializer in config.tensor_initializers:
        initializers[i] = initializer
    return OptimizationProfile(dims, initializers)


def profiles_for(shapes: Sequence[Sequence[int]], config: TuningConfig) -> list[OptimizationProfile]:
    """Return a trial for each combination of buckets, the smallest first."""
    ranges = []
    for spec in config.dynamic_tensor_specs:
        sizes = sorted(set(spec.buckets_for(spec.size_in(shapes))))
        ranges.append(list(zip(sizes, [size - 1 for size in sizes[1:]] + [_UNBOUNDED], strict=True)))
    return [
        _profile(shapes, config, [size for size, _ in chosen], [last for _, last in chosen])
        for chosen in itertools.product(*ranges)
    ]


def profile_of_bucket(shapes: Sequence[Sequence[int]], config: TuningConfig) -> OptimizationProfile:
    """Return the trial of the bucket that represents these shapes."""
    chosen = [spec.map_to_tuning_buckets(spec.size_in(shapes)) for spec in config.dynamic_tensor_specs]
    return _profile(shapes, config, chosen, chosen)


def inputs_of(profile: OptimizationProfile, inputs: Sequence[Any]) -> list[Any]:
    """Make the inputs of a trial: new tensors for inputs with a dynamic size, the caller's own for the rest.

    New tensors are made even if the sizes equal the caller's: an operator may write to its arguments, and trials must
    not change the caller's data.
    """
    made = []
    for i, (shape, x) in enumerate(zip(profile.shapes, inputs, strict=True)):
        if isinstance(x, torch.Tensor) and any(isinstance(dim, DynamicDim) for dim in shape):
            given = profile.tensor_initializers[i] if i < len(profile.tensor_initializers) else None
            x = (given or autotuner_initializer_rand_scaled)(tuple(dim.opt for dim in shape), x.dtype, x.device)
        made.append(x)
    return made


def stand_ins_of(profile: OptimizationProfile, inputs: Sequence[Any]) -> list[Any]:
    """Return inputs with the shapes of a trial, to ask for tactics: one element stands for all of a tensor."""
    made = []
    for shape, x in zip(profile.get_opt_shapes(), inputs, strict=True):
        is_other = isinstance(x, torch.Tensor) and tuple(x.shape) != shape
        made.append(torch.empty((), dtype=x.dtype, device=x.device).expand(shape) if is_other else x)
    return made
