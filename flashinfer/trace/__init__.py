# SPDX-License-Identifier: Apache-2.0
"""Definitions of calls: what shapes and dtypes an API was used with, and what it must compute.

template.py     what an API takes and returns, in named axes
notation.py     a template in a few lines of text
definition.py   template + arguments of one call -> definition (a dict, written as JSON)
function_text.py a Python function and what it uses -> self-contained text
source.py       the reference of a template -> the text of ``run``
check.py        tolerances and comparison of outputs
solution.py     kernels written for a definition
apply/          such kernels in the place of our ops
templates/      the templates and references, one module per family
"""

import importlib
from typing import TYPE_CHECKING, Any

from .check import default_check, default_tolerances, standard_check
from .template import Const, Scalar, Tensor, TraceDispatch, TraceTemplate, Var

if TYPE_CHECKING:
    from .solution import BuildSpec, Solution, SourceFile, SupportedBindings, SupportedLanguages

__all__ = [
    "BuildSpec",
    "Const",
    "Scalar",
    "Solution",
    "SourceFile",
    "SupportedBindings",
    "SupportedLanguages",
    "Tensor",
    "TraceDispatch",
    "TraceTemplate",
    "Var",
    "default_check",
    "default_tolerances",
    "standard_check",
]

_OF_SOLUTION = ("BuildSpec", "Solution", "SourceFile", "SupportedBindings", "SupportedLanguages")


def __getattr__(name: str) -> Any:
    """Import the classes of kernels written for a definition when they are used: every start would wait for them."""
    if name not in _OF_SOLUTION:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(".solution", __name__), name)
