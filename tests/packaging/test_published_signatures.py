# SPDX-License-Identifier: Apache-2.0
"""Published names that a Hopper GPU can use: each exists and takes the published parameters, in their order.

``published_signatures.json`` holds the signatures of 0.6.18. Ours may take more, with defaults. ``DIFFERENT`` has the
names whose level 0.7.2 differs, or that a change of level made into another thing.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import json
from pathlib import Path
from typing import Any, Callable, Iterator, Optional

FILE = Path(__file__).parent / "published_signatures.json"
PUBLISHED: list[dict[str, Any]] = json.loads(FILE.read_text())

DIFFERENT = {
    "flashinfer.fused_moe.QuantConfig",  # 0.7.2: formats per operand; the older keywords stay
    "flashinfer.jit.JitSpec",  # concrete here; published, an abstract base without fields
    "flashinfer.jit.JitSpecNvcc",  # 0.7.2: build(need_lock=True)
}


def resolve(module: str, name: str) -> Any:
    """Return an object: an attribute of the module first, because functions hide modules of their name."""
    parts = f"{module}.{name}".split(".")
    for count in (len(module.split(".")), *range(len(parts), 0, -1)):
        try:
            found = importlib.import_module(".".join(parts[:count]))
            for part in parts[count:]:
                found = getattr(found, part)
        except (ImportError, AttributeError):
            continue
        return found
    raise AttributeError(f"{module}.{name}")


def literal(node: ast.expr) -> Any:
    try:
        return ast.literal_eval(node)
    except ValueError:  # a dtype or a member of an enum
        return ...


def is_same(published: Any, ours: Any) -> bool:
    if published is ... or ours is inspect.Parameter.empty or not isinstance(ours, (int, float, str, type(None))):
        return True
    return bool(published == ours) or str(published) == str(ours)


def faults(function: Callable[..., Any], signature: str) -> Iterator[str]:
    """Yield what the published call cannot pass to a function: names, positions and defaults that differ."""
    arguments = ast.parse(f"def f{signature}: pass").body[0].args  # type: ignore[attr-defined]
    ours = [p for p in inspect.signature(function).parameters.values() if p.name not in ("self", "cls")]
    kinds = {p.kind for p in ours}
    by_name = {p.name: p for p in ours}
    places = [p.name for p in ours if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    by_place = [each.arg for each in arguments.args if each.arg not in ("self", "cls")]
    defaults: list[Optional[ast.expr]] = [None] * (len(by_place) - len(arguments.defaults)) + arguments.defaults
    published = [*zip(by_place, defaults, strict=True)]
    published += zip([each.arg for each in arguments.kwonlyargs], arguments.kw_defaults, strict=True)
    for i, (name, default) in enumerate(published):
        given = by_name.get(name)
        takes_rest = inspect.Parameter.VAR_POSITIONAL in kinds and i < len(by_place)
        if given is None:
            if inspect.Parameter.VAR_KEYWORD not in kinds and not takes_rest:
                yield f"lacks {name}"
        elif i < len(by_place) and not takes_rest and places[i : i + 1] != [name]:
            yield f"has {name} elsewhere"
        elif default is not None and not is_same(literal(default), given.default):
            yield f"has {name}={given.default!r}"
        elif default is not None and given.default is given.empty and given.kind is given.POSITIONAL_OR_KEYWORD:
            yield f"requires {name}"
    known = {name for name, _ in published}
    for p in ours:
        if (
            arguments.vararg is None
            and p.name not in known
            and p.default is p.empty
            and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
        ):
            yield f"requires {p.name}"


def wrong_parts(entry: dict[str, Any]) -> list[str]:
    try:
        found = resolve(entry["module"], entry["name"])
    except AttributeError:
        return ["is missing"]
    wrong = list(faults(found, entry["signature"])) if "signature" in entry else []
    for method, signature in entry.get("methods", {}).items():
        function = getattr(found, method, None)
        wrong += (
            [f".{method} is missing"] if function is None else [f".{method} {x}" for x in faults(function, signature)]
        )
    return wrong


def test_published_signatures():
    wrong = {f"{entry['module']}.{entry['name']}": wrong_parts(entry) for entry in PUBLISHED}
    wrong = {name: parts for name, parts in wrong.items() if parts}
    assert len(PUBLISHED) == 523
    assert {name: parts for name, parts in wrong.items() if name not in DIFFERENT} == {}


def test_differences_are_told():
    """Check that the comparison sees a missing, a moved, a renamed and a required parameter, and another default."""

    def ours(a, *, b=1, c=2, d):
        return a

    assert [*faults(ours, "(a, b=1, c=3, e=None)")] == ["has b elsewhere", "has c elsewhere", "lacks e", "requires d"]
    assert [*faults(lambda a, b=2: a, "(a, b=1)")] == ["has b=2"]
