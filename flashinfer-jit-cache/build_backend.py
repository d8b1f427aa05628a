# SPDX-License-Identifier: Apache-2.0
"""PEP 517 build backend: builds modules ahead of time with the flashinfer of this repository, and packs them.

The options of ``python -m flashinfer.aot`` are given as ``-C aot="--cpu-target x86-64-v3 --family norm"``.
``-C provider=sm90a`` makes a package of one CUDA architecture, ``-C shim="sm80 sm90a"`` the one that requires them.
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
PACKAGE, DISTRIBUTION = "flashinfer_jit_cache", "flashinfer-jit-cache"


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
def _staged(package: str, distribution: str, source: str) -> Iterator[Path]:
    """Make a temporary copy of the package the working directory: the checkout stays as it was."""
    with tempfile.TemporaryDirectory(prefix="flashinfer-jit-cache-") as name:
        stage, before = Path(name), Path.cwd()
        shutil.copy2(HERE / "README.md", stage / "README.md")
        project = (HERE / "pyproject.toml").read_text()
        for old, new in ((f'name = "{DISTRIBUTION}"', f'name = "{distribution}"'), (PACKAGE, package)):
            project = project.replace(old, new)
        (stage / "pyproject.toml").write_text(project)
        (stage / package).mkdir()
        shutil.copy2(HERE / "src" / PACKAGE / source, stage / package / "__init__.py")
        os.chdir(stage)
        try:
            yield stage
        finally:
            os.chdir(before)


def _target(provider: str) -> str:
    """Return the target ``9.0a`` of the provider ``sm90a``."""
    found = re.fullmatch(r"sm(\d+)(\d[af]?)", provider)
    if found is None:
        raise ValueError(f"provider must be an architecture such as sm80, sm90a or sm120f, got {provider!r}")
    return f"{found[1]}.{found[2]}"


def build_wheel(wheel_directory: str, config_settings: Any = None, metadata_directory: Optional[str] = None) -> str:
    sys.path.insert(0, str(ROOT))
    settings = dict(config_settings or {})
    target, provider = os.path.abspath(wheel_directory), settings.get("provider", "")
    if "shim" in settings:
        return _build_shim(target, settings)
    if provider:
        os.environ["FLASHINFER_CUDA_ARCH_LIST"] = _target(provider)
    from flashinfer import aot

    package, distribution, source = PACKAGE, DISTRIBUTION, "__init__.py"
    if provider:
        package, distribution, source = f"{PACKAGE}_{provider}", f"{DISTRIBUTION}-{provider}", "_provider.py"
    with _staged(package, distribution, source) as stage:
        os.environ["FLASHINFER_AOT_DIR"] = str(stage / "none")  # modules of an installed package are built all the same
        modules, version = stage / package / "jit_cache", _version(settings)
        # Finished modules stay in build/: an interrupted build goes on where it stopped.
        build = HERE / "build" / "-".join([version, *os.environ.get("FLASHINFER_CUDA_ARCH_LIST", "").split()])
        aot.main([*shlex.split(settings.get("aot", "")), "--out-dir", str(modules), "--build-dir", str(build)])
        _write_version(stage, package, version)
        return _setuptools.build_wheel(target, {"--build-option": [f"--plat-name={_platform_tag(modules)}"]})


def _build_shim(target: str, settings: Any) -> str:
    """Build the wheel without modules that requires a provider for each architecture."""
    names = settings["shim"].split()
    os.environ["FLASHINFER_CUDA_ARCH_LIST"] = " ".join(_target(name) for name in names)
    if not names:
        raise ValueError("shim must name architectures, such as 'sm80 sm90a', got none")
    version = _version(settings)
    with _staged(PACKAGE, DISTRIBUTION, "_shim.py") as stage:
        required = "".join(f'  "{DISTRIBUTION}-{name}=={version}",\n' for name in names)
        project = (stage / "pyproject.toml").read_text()
        dynamic = 'dynamic = ["version"]\n'
        (stage / "pyproject.toml").write_text(project.replace(dynamic, f"{dynamic}dependencies = [\n{required}]\n"))
        _write_version(stage, PACKAGE, version)
        (stage / PACKAGE / "_names.py").write_text(f"NAMES = {tuple(names)!r}\n")
        return _setuptools.build_wheel(target)


def _write_version(stage: Path, package: str, version: str) -> None:
    (stage / "version.txt").write_text(f"{version}\n")
    (stage / package / "_version.py").write_text(f'__version__ = "{version}"\n')


def build_sdist(sdist_directory: str, config_settings: Any = None) -> str:
    raise RuntimeError("flashinfer-jit-cache: only wheels can be built (python -m build --no-isolation --wheel)")


def get_requires_for_build_wheel(config_settings: Any = None) -> list[str]:
    """Return no requirements beyond ``build-system.requires``."""
    return []
