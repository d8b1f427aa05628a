# SPDX-License-Identifier: Apache-2.0
"""Encoding of arguments as JSON plus a flat dict of tensors, and host copies that keep the layout of a tensor."""

from __future__ import annotations

import enum
import importlib
import math
import numbers
import sys
from typing import Any, Callable, Mapping, Optional, Sequence

import torch

__all__ = [
    "Encoder",
    "class_path",
    "decode",
    "describe_layout",
    "host_copies",
    "host_copy",
    "item_key",
    "load_class",
    "tensor_bytes",
    "torch_dtype",
    "with_layout",
]


def class_path(cls: type) -> str:
    return f"{cls.__module__}:{cls.__qualname__}"


def load_class(path: str) -> Any:
    """Load the class named by :func:`class_path`. Records are untrusted: only modules of this package are imported."""
    module_name, _, qualname = path.partition(":")
    if module_name == "flashinfer" or module_name.startswith("flashinfer."):
        importlib.import_module(module_name)
    value: Any = sys.modules.get(module_name)
    if value is None:
        raise RuntimeError(
            f"replay: module {module_name} must be loaded (for {qualname}), got one that is not imported"
        )
    for part in qualname.split("."):
        value = getattr(value, part)
    if not isinstance(value, type):
        raise RuntimeError(f"replay: {path} must be a class, got {value!r}")
    return value


def torch_dtype(text: Any) -> torch.dtype:
    """Return the dtype that prints as ``text``, such as ``torch.float16``."""
    dtype = getattr(torch, str(text).removeprefix("torch."), None)
    if not isinstance(dtype, torch.dtype):
        raise RuntimeError(f"replay: the recorded dtype must be one of torch, got {text!r}")
    return dtype


def item_key(key: str, index: int) -> str:
    """Return the key of a list item, ``arg_1__0``; items of a returned tuple are separate results, ``result_0``."""
    return f"{key}_{index}" if key == "result" else f"{key}__{index}"


class Encoder:
    """Collects the tensors of nested arguments under flat keys and turns everything else into JSON.

    A tensor object that occurs twice is encoded as its first key, so a replay passes one tensor twice (``out=input``
    stays in place); ``tensors`` has the tensor under each of its keys, and ``aliases`` maps a key to the first key. A
    generator is encoded as its state, so a replay draws the same numbers, and a table of addresses with the matrices it
    leads to; during a capture (``has_states=False``) both are left out.
    """

    def __init__(self, has_states: bool = True) -> None:
        self._has_states = has_states
        self.tensors: dict[str, torch.Tensor] = {}
        self.states: dict[str, torch.Tensor] = {}  # states of generators
        self.banks: dict[str, dict[str, str]] = {}  # key of a table of addresses -> keys of its matrices, by row
        self.keys: dict[str, str] = {}  # place of a tensor -> key; they differ only after a collision
        self.aliases: dict[str, str] = {}  # key -> first key of the same tensor object
        self._first: dict[int, str] = {}

    def encode(self, value: Any, key: str) -> dict[str, Any]:
        if isinstance(value, torch.Tensor):
            found = self._add(value, key)
            if self._has_states:
                self._add_banks(value, found)
            return {"type": "tensor", "key": found}
        if isinstance(value, enum.Enum):
            return {"type": "enum", "class": class_path(type(value)), "name": value.name}
        if value is None or isinstance(value, (bool, str)):
            return {"type": "value", "value": value}
        if isinstance(value, numbers.Integral):
            return {"type": "value", "value": int(value)}
        if isinstance(value, numbers.Real):
            number = float(value)
            if math.isfinite(number):
                return {"type": "value", "value": number}
            return {"type": "float", "value": str(number)}  # JSON cannot express NaN and infinities
        if isinstance(value, (torch.dtype, torch.device)):
            return {"type": f"torch.{type(value).__name__}", "value": str(value)}
        if isinstance(value, torch.Size):
            return {"type": "torch.Size", "value": list(value)}
        if isinstance(value, (list, tuple)):
            kind = "list" if isinstance(value, list) else "tuple"
            encoded = {"type": kind, "items": [self.encode(item, item_key(key, i)) for i, item in enumerate(value)]}
            return {**encoded, "class": class_path(type(value))} if hasattr(value, "_fields") else encoded
        if isinstance(value, dict):
            items = [
                [self.encode(k, f"{key}__key_{i}"), self.encode(v, f"{key}__value_{i}")]
                for i, (k, v) in enumerate(value.items())
            ]
            return {"type": "dict", "items": items}
        if isinstance(value, torch.Generator) and self._has_states:
            state = f"state__{key}"  # no argument has such a key
            self.states[state] = value.get_state()
            return {"type": "torch.Generator", "device": value.device.type, "key": state, "argument": key}
        return {"type": "object", "class": class_path(type(value)), "id": id(value), "argument": key}

    def _add_banks(self, table: torch.Tensor, key: str) -> None:
        """Add the matrices whose addresses a table holds (``fill_w_ptr`` notes them): addresses outlive no process."""
        banks = getattr(table, "banks", None)
        if isinstance(banks, dict) and key not in self.banks:
            self.banks[key] = {str(row): self._add(bank, f"bank_{row}__{key}") for row, bank in banks.items()}

    def _add(self, tensor: torch.Tensor, place: str) -> str:
        key = place
        while key in self.tensors:  # x=(t,) and x__0=u would otherwise share kwarg_x__0
            key += "_"
        self.keys[place] = key
        self.tensors[key] = tensor
        first = self._first.setdefault(id(tensor), key)
        if first != key:
            self.aliases[key] = first
        return first


def decode(
    encoded: Mapping[str, Any],
    tensors: Mapping[str, torch.Tensor],
    place: Callable[[torch.device], torch.device],
    find_object: Callable[[Mapping[str, Any]], Any],
) -> Any:
    """Invert :meth:`Encoder.encode`; ``place`` maps recorded devices, ``find_object`` supplies foreign objects."""
    kind, value = encoded["type"], encoded.get("value")
    if kind == "tensor":
        return tensors[encoded["key"]]
    if kind == "value":
        return value
    if kind == "float":
        return float(str(value))
    if kind == "torch.dtype":
        return torch_dtype(value)
    if kind == "torch.device":
        return place(torch.device(str(value)))
    if kind == "torch.Size":
        return torch.Size(value or [])
    if kind == "enum":
        cls = load_class(encoded["class"])
        if not issubclass(cls, enum.Enum):
            raise RuntimeError(f"replay: {encoded['class']} must be an Enum, got {cls!r}")
        return cls[encoded["name"]]
    if kind in ("list", "tuple"):
        items = [decode(item, tensors, place, find_object) for item in encoded["items"]]
        if "class" in encoded:
            cls = load_class(encoded["class"])
            if not (issubclass(cls, tuple) and hasattr(cls, "_fields")):
                raise RuntimeError(f"replay: {encoded['class']} must be a named tuple, got {cls!r}")
            return cls(*items)
        return items if kind == "list" else tuple(items)
    if kind == "dict":
        pairs = [[decode(part, tensors, place, find_object) for part in pair] for pair in encoded["items"]]
        return dict(pairs)
    if kind == "torch.Generator" and (encoded["device"] == "cpu" or torch.cuda.is_available()):
        generator = torch.Generator(encoded["device"])  # on the recorded device: a state is valid only there
        generator.set_state(tensors[encoded["key"]].cpu())
        return generator
    return find_object(encoded)


def tensor_bytes(tensor: torch.Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def describe_layout(tensor: torch.Tensor) -> dict[str, Any]:
    """Return the ``tensor_details`` entry of one tensor."""
    stride = list(tensor.stride()) if tensor.layout is torch.strided else None
    return {"shape": list(tensor.shape), "dtype": str(tensor.dtype), "stride": stride, "device": str(tensor.device)}


def host_copy(tensor: torch.Tensor) -> torch.Tensor:
    """Return a private CPU copy with the strides of ``tensor``.

    Views that skip most of their memory (one column of a wide matrix) are packed instead: keeping the gaps would write
    far more than the values. The true strides are in the metadata, and a replay restores them from there.
    """
    source = tensor.detach()
    if source.layout is not torch.strided:
        return source.cpu().clone()
    shape, stride = tuple(source.shape), tuple(source.stride())
    if _extent(_base_shape(shape, stride), stride) > 2 * source.numel():
        return source.cpu().contiguous().clone()
    return with_layout(source, shape, stride, torch.device("cpu"))


def host_copies(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Copy each tensor; all keys of the same tensor share one copy, which ``torch.save`` then writes once."""
    copies = {id(tensor): host_copy(tensor) for tensor in {id(tensor): tensor for tensor in tensors.values()}.values()}
    return {key: copies[id(tensor)] for key, tensor in tensors.items()}


def with_layout(
    source: torch.Tensor, shape: Sequence[int], stride: Optional[Sequence[int]], device: torch.device
) -> torch.Tensor:
    """Copy ``source`` to ``device`` with exactly these strides; broadcast (stride 0) dimensions stay broadcast."""
    if stride is None:
        return source.to(device)
    base = _base_shape(shape, stride)
    for dim, size in enumerate(base):
        source = source.narrow(dim, 0, size)
    # Bytes, because some packed dtypes cannot be filled; zeros, because the gaps end up in a file.
    storage = torch.zeros(_extent(base, stride) * source.element_size(), dtype=torch.uint8, device=device)
    target = storage.view(source.dtype).as_strided(base, stride)
    target.copy_(source)
    return target.expand(shape)


def _base_shape(shape: Sequence[int], stride: Sequence[int]) -> list[int]:
    return [min(size, 1) if step == 0 else size for size, step in zip(shape, stride, strict=True)]


def _extent(shape: Sequence[int], stride: Sequence[int]) -> int:
    """Return the number of elements in memory from the first to the last one, both included."""
    return 0 if 0 in shape else 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
