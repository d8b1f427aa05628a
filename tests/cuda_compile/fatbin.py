# SPDX-License-Identifier: Apache-2.0
"""Device code of kernel units, without the host half of nvcc, which takes as long and checks no kernel."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Iterable, Mapping

from flashinfer.jit import gen_jit_spec
from flashinfer.jit.cpp_ext import Commands


def compile_units(folder: Path, sources: Iterable[Path], generated: Mapping[Path, str]) -> None:
    """Compile CUDA sources with the flags of a module, for the targets of the environment; fail with nvcc's output.

    They are compiled as one unit, which takes a quarter less time: most of what they include is the same.
    """
    for path, text in generated.items():
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    includes = sorted({path.parent for path in generated if path.suffix == ".inc"})
    whole = folder / "units.cu"
    whole.write_text("".join(f'#include "{source}"\n' for source in sources))
    spec = gen_jit_spec("device_code", [whole], generated=generated, extra_include_paths=includes)
    commands = Commands(spec)
    for unit in commands.units:
        assert unit.tool == "nvcc", unit
        output = folder / f"{unit.object_name}.fatbin"
        done = subprocess.run(
            f"{commands.compile(unit)} -fatbin {unit.source} -o {output}", shell=True, capture_output=True, text=True
        )
        assert done.returncode == 0, f"{unit.source.name}: {done.stdout}{done.stderr}"
        assert output.stat().st_size > 0
