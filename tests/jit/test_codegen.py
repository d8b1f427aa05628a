# SPDX-License-Identifier: Apache-2.0
"""Generators: templates rendered to constants, sources copied, modules cached; ours and the kind a user writes."""

from __future__ import annotations

import functools
import shutil

import jinja2
import pytest
import torch

from flashinfer.jit import JitSpec, codegen, gen_jit_spec
from flashinfer.jit import env as jit_env
from flashinfer.jit.core import write_if_different
from flashinfer.jit.scale import gen_scale_module
from flashinfer.jit.utils import dtype_map, filename_safe_dtype_map

from .toolbox import TINY

CONFIG = """
using DTypeIn = {{ dtype_in }};
constexpr int PARAM = {{ param }};
"""
USES_CONFIG = TINY.replace(
    '#include "answer.h"', '#include "op_config.inc"\n#define ANSWER (PARAM * 100 + sizeof(DTypeIn))'
)


def gen_op_module(workshop, param: int, template: bool = True) -> JitSpec:
    """The steps of the guide: name from the parameters, render, copy, describe."""
    uri = f"op_param_{param}"
    folder = jit_env.FLASHINFER_GEN_SRC_DIR / uri
    folder.mkdir(parents=True, exist_ok=True)
    if template:
        text = jinja2.Template(CONFIG).render(dtype_in="short", param=param)
        write_if_different(folder / "op_config.inc", text)
    shutil.copy(workshop.src / "op.cu", folder / "op.cu")
    return gen_jit_spec(uri, [folder / "op.cu"], extra_cuda_cflags=["-DX"])


def test_rendered_constants(workshop, toolkit):
    workshop.source("op", ".cu", USES_CONFIG)
    assert gen_op_module(workshop, 3).build_and_load().answer() == 302
    assert gen_op_module(workshop, 4).build_and_load().answer() == 402
    assert "constexpr int PARAM = 4;" in (jit_env.FLASHINFER_GEN_SRC_DIR / "op_param_4" / "op_config.inc").read_text()


def test_generator_without_a_template(workshop, toolkit):
    workshop.source("op", ".cu", TINY.replace("ANSWER;", "5;").replace('#include "answer.h"', ""))
    assert gen_op_module(workshop, 1, template=False).build_and_load().answer() == 5


def test_copying_again_does_not_rebuild(workshop, toolkit):
    """A plain copy has a new time each start; content decides."""
    workshop.source("op", ".cu", USES_CONFIG)
    gen_op_module(workshop, 3).build()
    before = len(workshop.calls)
    gen_op_module(workshop, 3).build()
    assert len(workshop.calls) == before


def test_nested_dispatch_macros_from_a_template(workshop):
    """A loop of the template makes the cases of the macros."""
    macros = """
#define DISPATCH_DTYPE(code, T, ...) \\
  switch (code) { {% for t in types %} case {{ loop.index0 }}: { using T = {{ t }}; __VA_ARGS__ break; } {% endfor %} }
#define DISPATCH_BLOCK_SIZE(size, SIZE, ...) \\
  switch (size) { {% for n in sizes %} case {{ n }}: { constexpr int SIZE = {{ n }}; __VA_ARGS__ break; } {% endfor %} }
template <typename T, int SIZE> int Work() { return sizeof(T) * SIZE; }
inline int Run(int code, int size) {
  int result = -1;
  DISPATCH_DTYPE(code, DType, DISPATCH_BLOCK_SIZE(size, BLOCK, { result = Work<DType, BLOCK>(); }));
  return result;
}
"""
    text = jinja2.Template(macros).render(types=["short", "double"], sizes=[32, 64])
    (workshop.src / "answer.h").write_text(text + "\n#define ANSWER (Run(0, 32) + 10000 * Run(1, 64))\n")
    assert workshop.spec().build_and_load().answer() == 2 * 32 + 10000 * 8 * 64


# ------------------------------------------------------------------------------------------------ ours


def test_stage_finds_sources_by_stem(toolkit):
    spec = gen_scale_module("float16", "float16")
    csrc = jit_env.FLASHINFER_CSRC_DIR
    folder = jit_env.FLASHINFER_GEN_SRC_DIR / spec.name
    assert spec.sources == [csrc / "scale.cu", csrc / "scale_jit_binding.cu", folder / "scale_kernel.cu"]
    assert "using DType = flashinfer::float16_t;" in spec.generated[folder / "scale_config.inc"]
    assert not folder.exists()  # written inside the lock of the build


def test_missing_template_value_is_an_error(toolkit):
    with pytest.raises(jinja2.UndefinedError, match="dtype"):
        codegen.render("scale_kernels.jinja")


def test_module_accessor_is_cached(workshop):
    made = []

    def gen_tiny_module(name: str) -> JitSpec:
        made.append(name)
        return workshop.spec(name)

    get_tiny_module = codegen.module_cache(gen_tiny_module)
    assert get_tiny_module.__name__ == "get_tiny_module"
    assert get_tiny_module("a") is get_tiny_module("a")
    assert get_tiny_module("a") is not get_tiny_module("b")
    assert made == ["a", "b"]
    assert isinstance(get_tiny_module, type(functools.cache(len)))


def test_dtype_names():
    assert dtype_map[torch.float16] == "flashinfer::float16_t"
    assert dtype_map.keys() == filename_safe_dtype_map.keys()
    assert len(set(filename_safe_dtype_map.values())) == len(filename_safe_dtype_map)
