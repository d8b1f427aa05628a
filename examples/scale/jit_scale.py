# SPDX-License-Identifier: Apache-2.0
"""The generator: says what to compile. Nothing is compiled here; ``build_and_load()`` of the result does that."""

from flashinfer.jit import JitSpec, current_compilation_context, gen_jit_spec
from flashinfer.jit import env as jit_env
from flashinfer.jit.core import write_if_different


def get_scale_uri(dtype_in: str, dtype_out: str) -> str:
    """Names the module; everything that makes two modules different belongs into it."""
    return f"scale_dtype_in_{dtype_in}_dtype_out_{dtype_out}"


def gen_scale_module(dtype_in: str, dtype_out: str) -> JitSpec:
    uri = get_scale_uri(dtype_in, dtype_out)
    # The package's own directories are read-only; sources are copied to the cache and compiled there. An operator that
    # fixes types or sizes at compile time would render a template next to them.
    directory = jit_env.FLASHINFER_GEN_SRC_DIR / uri
    sources = []
    for name in ("scale.cu", "scale_jit_binding.cu"):
        write_if_different(directory / name, (jit_env.FLASHINFER_CSRC_DIR / name).read_text())
        sources.append(directory / name)
    return gen_jit_spec(
        name=uri,
        sources=sources,
        # None: every GPU generation. A kernel that needs Hopper's instructions would say [9].
        extra_cuda_cflags=current_compilation_context.get_nvcc_flags_list(supported_major_versions=None),
    )
