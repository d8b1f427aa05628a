# SPDX-License-Identifier: Apache-2.0
"""Steps that all generators share: find the sources of a stem, render templates, describe the module.

A stem ``op`` has a launcher ``csrc/op.cu``, a binding ``csrc/op_jit_binding.cu`` and kernels in
``include/flashinfer/op.cuh`` and ``op_cpu.h``.

* CPU: the host compiler takes launcher and binding, as one unit if the binding includes its launcher (ours do: the
  TVM-FFI headers take 1.3 s); the launcher includes the kernels.
* CUDA: the host compiler takes them too, against declarations only (3 s instead of 9 s under nvcc, whose front end
  is slow on the TVM-FFI headers); the kernels come from units rendered from ``csrc/op_kernels.jinja``, one per
  element type, which nvcc compiles in parallel.
"""

from __future__ import annotations

import functools
from typing import Any, Callable, Mapping, Optional, Sequence

from . import env as jit_env
from .core import JitSpec, describe_module

__all__ = ["module_cache", "render", "stage"]

#: Include guard of the special functions of C++17 (std::beta and others): no kernel of ours calls them, and <cmath> of
#: libstdc++ includes them into every unit. Modules with code of users do not have this flag.
NO_SPECIAL_FUNCTIONS = "-D_GLIBCXX_BITS_SPECFUN_H"


def render(template: str, **values: Any) -> str:
    """Render ``csrc/<template>`` with jinja; a name in the template without a value is an error."""
    return _compiled((jit_env.FLASHINFER_CSRC_DIR / template).read_text()).render(values)


@functools.lru_cache(maxsize=64)
def _compiled(text: str) -> Any:
    """Return the template of a text. Modules share few templates, and to compile one takes longer than to render it."""
    import jinja2

    return jinja2.Environment(undefined=jinja2.StrictUndefined, keep_trailing_newline=True).from_string(text)


def stage(
    stem: str,
    *,
    backend: str,
    name: Optional[str] = None,
    template: Optional[str] = None,
    kernels: Mapping[str, Mapping[str, Any]],
    config: Optional[Mapping[str, Any]] = None,
    extra_cuda_cflags: Sequence[str] = (),
) -> JitSpec:
    """Describe the module of one stem.

    ``kernels`` maps the name of each CUDA kernel unit to the values with which ``csrc/<stem>_kernels.jinja`` is
    rendered, or that of the stem ``template``, where modules share one. ``config``, if given, renders
    ``csrc/<stem>_customize_config.jinja`` to ``<stem>_config.inc``, which the launcher includes. The name of a CPU
    module ends in ``_cpu``.
    """
    name = name or stem
    name = f"{name}_cpu" if backend == "cpu" else name
    csrc = jit_env.FLASHINFER_CSRC_DIR
    sources = [csrc / f"{stem}.cu", csrc / f"{stem}_jit_binding.cu"]
    directory = jit_env.gen_src_dir(backend) / name
    units = {
        directory / f"{stem}_{unit}.cu": render(f"{template or stem}_kernels.jinja", **values)
        for unit, values in kernels.items()
        if backend == "cuda"
    }
    inc = {directory / f"{stem}_config.inc": render(f"{stem}_customize_config.jinja", **config)} if config else {}
    return describe_module(
        name,
        [*sources, *units],
        extra_cuda_cflags=[NO_SPECIAL_FUNCTIONS, *extra_cuda_cflags],
        extra_include_paths=[directory] if config else [],
        backend=backend,
        host_sources=frozenset(sources if backend == "cuda" else sources[1:]),
        generated={**units, **inc},
    )


def module_cache(generate: Callable[..., JitSpec]) -> Callable[..., Any]:
    """Return ``get_<op>_module`` of a generator: builds and loads on the first call, a dictionary look-up later."""

    @functools.cache
    def get_module(*key: Any, **by_name: Any) -> Any:
        return generate(*key, **by_name).build_and_load()

    get_module.__name__ = generate.__name__.replace("gen_", "get_", 1)
    get_module.__doc__ = f"The loaded module of ``{generate.__name__}``, built on first use."
    return get_module
