# SPDX-License-Identifier: Apache-2.0
"""Flat form of a call's values that other readers of dumps know, one entry per argument that is not a tensor.

    arg_0, arg_1, ...  kwarg_<name>  result  result_<i>     the values; for a method, arg_0 is the object
    arg_1__0  kwarg_x__value_0  kwarg_x__key_0              tensors inside a list, or values and keys of a dict

The flat form has less information than :mod:`.codec`, which our own replay prefers: no aliases, classes or states of
generators. Records that other tools have written may have even less, down to tensors without any metadata.
"""

from __future__ import annotations

import enum
import numbers
import re
from typing import Any, Callable, Iterable, Mapping, Optional

import torch

from .._compat import tllm_enums
from .._runtime import enums
from .codec import describe_layout, item_key, torch_dtype

__all__ = ["arguments_of", "describe_value", "result_of"]

_MAX_TEXT = 1000  # characters of a repr
_NESTED = re.compile(r"__(?:(key|value)_)?(\d+)")


def describe_value(value: Any, key: str, keys: Mapping[str, str], may_read: bool = True) -> Any:
    """Return the entry of one value.

    Parameters
    ----------
    value : Any
        The argument or result.
    key : str
        Where it is in the call: ``arg_0``, ``kwarg_x``, ``result``.
    keys : Mapping[str, str]
        Place of each tensor to its key in the file.
    may_read : bool
        Whether objects may print themselves, which may read tensors.
    """
    if isinstance(value, torch.Tensor):
        flags = {"requires_grad": value.requires_grad, "is_contiguous": _is_contiguous(value)}
        return {"type": "torch.Tensor", **describe_layout(value), **flags, "tensor_key": keys[key]}
    if isinstance(value, enum.Enum):
        plain = value.value if isinstance(value.value, (bool, int, float, str, type(None))) else repr(value.value)
        return {"type": "enum", "name": f"{type(value).__name__}.{value.name}", "value": plain}
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, numbers.Integral):
        return int(value)
    if isinstance(value, numbers.Real):
        return float(value)
    if isinstance(value, torch.dtype):
        return {"type": "torch.dtype", "value": str(value)}
    if isinstance(value, (list, tuple)):
        items: list[Any] = [describe_value(item, item_key(key, i), keys, may_read) for i, item in enumerate(value)]
        kind = "list" if isinstance(value, list) else "tuple"
    elif isinstance(value, dict):
        kind, items = "dict", []
        for i, (k, v) in enumerate(value.items()):
            pair = (describe_value(x, f"{key}__{name}_{i}", keys, may_read) for name, x in (("key", k), ("value", v)))
            items.append(dict(zip(("key", "value"), pair, strict=True)))
    else:
        return {"type": type(value).__name__, "repr": _text(value, may_read)}
    return {"type": kind, "length": len(items), "items": items, "truncated": False}


def _is_contiguous(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and tensor.is_contiguous()


def _text(value: Any, may_read: bool) -> str:
    text = object.__repr__(value)
    if may_read:
        try:
            text = repr(value)
        except Exception as error:  # an object whose __init__ has not run yet may raise
            text += f" (repr raised {type(error).__name__})"
    return text[:_MAX_TEXT]


Missing = Callable[[str, str], Any]  # (place, text) of a value that the record does not hold -> placeholder


def arguments_of(
    record: Mapping[str, Any], tensors: Mapping[str, torch.Tensor], missing: Missing
) -> tuple[list[Any], dict[str, Any]]:
    """Decode positional and keyword arguments from the flat entries of a record and the keys of its tensors."""
    entries = record.get("input_metadata") or {}
    tops = _top_keys([*entries, *tensors])
    positions = sorted(int(key[4:]) for key in tops if re.fullmatch(r"arg_\d+", key))
    if "self_id" in record:  # arg_0 is the object itself, if the entry exists
        positions = [i for i in positions if i > 0]
    args = [_value(f"arg_{i}", entries, tensors, missing) for i in positions]
    names = [key.removeprefix("kwarg_") for key in tops if key.startswith("kwarg_")]
    return args, {name: _value(f"kwarg_{name}", entries, tensors, missing) for name in names}


def result_of(record: Mapping[str, Any], tensors: Mapping[str, torch.Tensor], missing: Missing) -> Any:
    """Rebuild the return value of the recorded call: one value, or a tuple of ``result_<i>``."""
    entries = record.get("output_metadata") or {}
    tops = _top_keys([*entries, *tensors])
    positions = sorted(int(key[7:]) for key in tops if re.fullmatch(r"result_\d+", key))
    if "result" in tops or not positions:
        return _value("result", entries, tensors, missing)
    return tuple(_value(f"result_{i}", entries, tensors, missing) for i in positions)


def _top_keys(keys: Iterable[str]) -> list[str]:
    """Return the keys of whole values, in order; the key of a part is replaced by the key of the whole value."""
    return list(dict.fromkeys(re.sub(rf"(?:{_NESTED.pattern})+$", "", key) for key in keys))


def _value(key: str, entries: Mapping[str, Any], tensors: Mapping[str, torch.Tensor], missing: Missing) -> Any:
    if key in tensors:
        return tensors[key]
    if key in entries:
        return _decode(entries[key], key, tensors, missing)
    children = {int(match[2]): match[0] for match in map(_first_step(key), tensors) if match is not None}
    return tuple(_value(key + children[i], entries, tensors, missing) for i in sorted(children)) if children else None


def _first_step(parent: str) -> Callable[[str], Optional[re.Match[str]]]:
    return lambda key: _NESTED.match(key.removeprefix(parent)) if key.startswith(parent) else None


def _decode(entry: Any, key: str, tensors: Mapping[str, torch.Tensor], missing: Missing) -> Any:
    if not isinstance(entry, Mapping):
        return entry
    kind = entry.get("type")
    if kind == "torch.Tensor":
        found = tensors.get(entry.get("tensor_key") or key)
        return missing(key, "a tensor that was not saved") if found is None else found
    if kind == "torch.dtype":
        return torch_dtype(entry.get("value"))
    if kind == "enum":
        return _enum_member(str(entry.get("name")), entry.get("value"))
    items = entry.get("items")
    if isinstance(items, list) and kind == "dict":
        return {
            _decode(item["key"], f"{key}__key_{i}", tensors, missing): _decode(
                item["value"], f"{key}__value_{i}", tensors, missing
            )
            for i, item in enumerate(items)
        }
    if isinstance(items, list):
        values = [_decode(item, item_key(key, i), tensors, missing) for i, item in enumerate(items)]
        return values if kind == "list" else tuple(values)
    if kind == "device" and (match := re.match(r"device\(type='(\w+)'", str(entry.get("repr")))) is not None:
        return torch.device(match[1])
    return missing(key, str(entry.get("repr") or kind))


def _enum_member(name: str, value: Any) -> Any:
    """Return a member of an enum of this package; for other enums, only the value."""
    cls_name, _, member = name.partition(".")
    cls = getattr(tllm_enums, cls_name, getattr(enums, cls_name, None))
    if isinstance(cls, type) and issubclass(cls, enum.Enum):
        return cls.__members__.get(member, value)
    return value
