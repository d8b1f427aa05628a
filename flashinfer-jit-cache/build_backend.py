# SPDX-License-Identifier: Apache-2.0
"""PEP 517 build backend: builds modules ahead of time with the flashinfer of this repository, and packs them.

The options of ``python -m flashinfer.aot`` are given as ``-C aot="--cpu-target x86-64-v3 --family norm"``.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import platform
import re
import shlex
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any, Iterator, Optional

from setuptools import build_meta as _setuptools

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
PACKAGE = "flashinfer_jit_cache"


def _platform_tag(libraries: Path) -> str:
    """Return ``manylinux_2_N_x86_64`` for the newest glibc that a library asks for."""
    text = b"".join(path.read_bytes() for path in libraries.rglob("*.so"))
    minors = [int(minor) for minor in re.findall(rb"\bGLIBC_2\.(\d+)", text)]
    return f"manylinux_2_{max([17, *minors])}_{platform.machine()}"


def version_to_build(config_settings: Any) -> str:
    """Return the version of flashinfer-python that the same settings and environment build."""
    spec = importlib.util.spec_from_file_location("main_build_backend", ROOT / "build_backend.py")
    assert spec and spec.loader
    main = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(main)
    return main.version_to_build(ROOT, config_settings)


def _version(config_settings: Any) -> str:
    from flashinfer._runtime.knobs import knobs
    from flashinfer.jit.cpp_ext import get_cuda_version

    label = "cpu"
    if knobs.cuda_arch_list:
        release = get_cuda_version()
        label = f"cu{release.major}{release.minor}"
    version = version_to_build(config_settings)
    return f"{version}{'.' if '+' in version else '+'}{label}"


@contextlib.contextmanager
def _staged() -> Iterator[Path]:
    """Make a temporary copy of the package the working directory: the checkout stays as it was."""
    with tempfile.TemporaryDirectory(prefix="flashinfer-jit-cache-") as name:
        stage, before = Path(name), Path.cwd()
        for file in ("pyproject.toml", "README.md"):
            shutil.copy2(HERE / file, stage / file)
        (stage / PACKAGE).mkdir()
        shutil.copy2(HERE / "src" / PACKAGE / "__init__.py", stage / PACKAGE)
        os.chdir(stage)
        try:
            yield stage
        finally:
            os.chdir(before)


def build_wheel(wheel_directory: str, config_settings: Any = None, metadata_directory: Optional[str] = None) -> str:
    sys.path.insert(0, str(ROOT))
    from flashinfer import aot

    target = os.path.abspath(wheel_directory)
    options = shlex.split((config_settings or {}).get("aot", ""))
    with _staged() as stage:
        os.environ["FLASHINFER_AOT_DIR"] = str(stage / "none")  # modules of an installed package are built all the same
        modules, version = stage / PACKAGE / "jit_cache", _version(config_settings)
        # Finished modules stay in build/: an interrupted build goes on where it stopped.
        aot.main([*options, "--out-dir", str(modules), "--build-dir", str(HERE / "build" / version)])
        (stage / "version.txt").write_text(f"{version}\n")
        (stage / PACKAGE / "_version.py").write_text(f'__version__ = "{version}"\n')
        return _setuptools.build_wheel(target, {"--build-option": [f"--plat-name={_platform_tag(modules)}"]})


def build_sdist(sdist_directory: str, config_settings: Any = None) -> str:
    raise RuntimeError("flashinfer-jit-cache: only wheels can be built (python -m build --no-isolation --wheel)")


def get_requires_for_build_wheel(config_settings: Any = None) -> list[str]:
    """Return no requirements beyond ``build-system.requires``."""
    return []
