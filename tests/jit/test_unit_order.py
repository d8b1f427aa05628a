# SPDX-License-Identifier: Apache-2.0
"""The order in which a build starts its units: by the bytes of ours that they include, over all modules."""

from __future__ import annotations

import re

from flashinfer.jit import build_jit_specs, cpp_ext, gen_jit_spec
from flashinfer.jit.norm import gen_norm_module
from flashinfer.jit.unit_order import own_bytes

from .toolbox import TINY


def started(*specs) -> list[str]:
    """Return the sources in the order of the graph, which is the order in which ninja starts them."""
    text = cpp_ext.group_ninja_text({spec: spec.build_dir for spec in specs})
    return re.findall(r"^  what = (.*)$", text, re.MULTILINE)


def test_headers_count_once(workshop):
    """Count a header that is reached on two ways once, and system headers not at all."""
    source = workshop.source("op", ".cpp", '#include <vector>\n#include "a.h"\n  #  include "b.h"\n')
    (source.parent / "a.h").write_text('#include "b.h"\n' + "a" * 100)
    (source.parent / "b.h").write_text('#include "a.h"\n' + "b" * 1000)
    texts = [source, source.parent / "a.h", source.parent / "b.h"]
    spec = gen_jit_spec("op", [source], backend="cpu")
    assert own_bytes(spec, source, True) == sum(len(path.read_text()) for path in texts)


def test_generated_sources_count(workshop):
    """Count sources and headers that a build writes, before it has written them."""
    folder = workshop.source().parent / "generated"
    source, header = folder / "unit.cpp", folder / "config.inc"
    generated = {source: '#include "config.inc"\n', header: "x" * 500}
    spec = gen_jit_spec("op", [source], backend="cpu", generated=generated)
    assert own_bytes(spec, source, True) == sum(map(len, generated.values()))


def test_launchers_count_without_kernels(toolkit, workshop):
    """Kernels that a launcher includes for other compilers are not part of it; units of kernels come first."""
    spec = gen_norm_module("cuda")
    binding = spec.sources[1]  # includes the launcher
    kernels = max(own_bytes(spec, source, True) for source in spec.sources[2:])
    assert own_bytes(spec, binding, False) < kernels < own_bytes(spec, binding, True)
    assert started(spec)[-1] == binding.name


def test_longest_first(workshop):
    """Sort the units of all modules together, and build what they describe."""
    sizes = {"one": (300, 10), "two": (200, 400)}
    specs = []
    for name, lengths in sizes.items():
        extra = [workshop.source(f"{name}{n}", ".cpp", f"// {'x' * n}\n") for n in lengths]
        specs.append(gen_jit_spec(name, [workshop.source(name, ".cpp", TINY), *extra], backend="cpu"))
    order = [name for name in started(*specs) if name[3:-4].isdigit()]
    assert order == ["two400.cpp", "one300.cpp", "two200.cpp", "one10.cpp"]
    build_jit_specs(specs)
    assert all(spec.build_and_load().answer() == 42 for spec in specs)
