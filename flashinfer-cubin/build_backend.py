# SPDX-License-Identifier: Apache-2.0
"""PEP 517 build backend: compiles kernels to cubins with the flashinfer of this repository, and packs them.

The options of ``python -m flashinfer.jit.cubins`` are given as ``-C cubins="--family norm"``.
"""

from __future__ import annotations

import importlib.util
import os
import shlex
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any, Optional

from setuptools import build_meta as _setuptools

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
PACKAGE = "flashinfer_cubin"


def _main_backend() -> Any:
    """Return the build backend of flashinfer-python."""
    spec = importlib.util.spec_from_file_location("main_build_backend", ROOT / "build_backend.py")
    assert spec and spec.loader
    main = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(main)
    return main


def version_to_build(config_settings: Any) -> str:
    """Return the version of flashinfer-python that the same settings and environment build."""
    return str(_main_backend().version_to_build(ROOT, config_settings))


def build_wheel(wheel_directory: str, config_settings: Any = None, metadata_directory: Optional[str] = None) -> str:
    sys.path.insert(0, str(ROOT))
    from flashinfer.jit import cubins

    target, before = os.path.abspath(wheel_directory), Path.cwd()
    version = version_to_build(config_settings)
    options = shlex.split((config_settings or {}).get("cubins", ""))
    with tempfile.TemporaryDirectory(prefix="flashinfer-cubin-") as name:
        stage = Path(name)
        shutil.copytree(HERE / "src" / PACKAGE, stage / PACKAGE)
        for file in ("pyproject.toml", "README.md"):
            shutil.copy2(HERE / file, stage / file)
        (stage / "version.txt").write_text(f"{version}\n")
        commit = _main_backend()._git_commit(ROOT)
        (stage / PACKAGE / "_version.py").write_text(f'__version__ = "{version}"\n__git_version__ = "{commit}"\n')
        cubins.main([*options, "--out-dir", str(stage / PACKAGE / "cubins")])
        os.chdir(stage)
        try:
            return _setuptools.build_wheel(target)
        finally:
            os.chdir(before)


def build_sdist(sdist_directory: str, config_settings: Any = None) -> str:
    raise RuntimeError("flashinfer-cubin: only wheels can be built (python -m build --no-isolation --wheel)")


def get_requires_for_build_wheel(config_settings: Any = None) -> list[str]:
    """Return no requirements beyond ``build-system.requires``."""
    return []
