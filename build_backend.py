# SPDX-License-Identifier: Apache-2.0
"""PEP 517 build backend: setuptools, plus the C++ sources that the JIT compiles at run time.

No kernel is compiled here. Three things are added to what setuptools does:

* ``flashinfer/_build_meta.py`` is written from ``version.txt`` (or ``-C version=0.7.2``) and the git commit;
* ``flashinfer/data/`` receives the folders of ``DATA``. An editable install links to them, so that an edited header is
  picked up by the next call. A wheel holds copies;
* the package page gets URLs, and absolute links in place of the README's relative ones: from ``[project.urls]`` if
  pyproject.toml has it, else from the git remote ``origin``. Without either, links to files become their names.

Wheels and sdists are built in a temporary copy of the tree: the checkout stays as it was, a read-only one works, and no
stale ``build/`` folder can leak a deleted file into a wheel.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any, Iterator, Optional

import setuptools
from setuptools import build_meta as _setuptools

if int(setuptools.__version__.split(".")[0]) < 77:  # with --no-build-isolation, pip does not check build requirements
    raise RuntimeError(
        f"setuptools is {setuptools.__version__}, expected 77 or newer (which reads the license of pyproject.toml): "
        "pip install --upgrade setuptools"
    )

ROOT = Path(__file__).resolve().parent
PACKAGE = Path("flashinfer")
BUILD_META = PACKAGE / "_build_meta.py"

# name under flashinfer/data -> folder of the tree
DATA = {"csrc": "csrc", "include": "include", "cutlass": "3rdparty/cutlass"}

# All that a wheel or an sdist is made from; tests, docs and benchmarks stay in the repository.
SHIPPED_FILES = (
    "build_backend.py",
    "LICENSE",
    "MANIFEST.in",
    "pyproject.toml",
    "README.md",
    "requirements.txt",
    "version.txt",
)
SHIPPED_FOLDERS = ("3rdparty", "csrc", "flashinfer", "include")


def _git_commit(root: Path) -> str:
    """Return the commit of a checkout, or the commit recorded in an unpacked sdist."""
    if (root / ".git").exists():
        command = ["git", "-C", str(root), "rev-parse", "HEAD"]
        with contextlib.suppress(OSError, subprocess.CalledProcessError):
            return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    shipped: dict[str, str] = {}
    with contextlib.suppress(OSError):
        exec((root / BUILD_META).read_text(), shipped)
    return shipped.get("__git_commit__", "unknown")


def _source_url(root: Path) -> str:
    """Return the web address of the repository, or "" if neither pyproject.toml nor git names one."""
    stated = re.search(r'^Source = "([^"]+)"', (root / "pyproject.toml").read_text(), re.M)
    if stated:
        return stated[1].rstrip("/")
    command = ["git", "-C", str(root), "config", "--get", "remote.origin.url"]
    remote = ""
    if (root / ".git").exists():
        with contextlib.suppress(OSError, subprocess.CalledProcessError):
            remote = subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()
    # https://user:password@host/path.git, git@host:path.git and ssh://git@host/path.git; a path is no web address
    found = re.fullmatch(r"(?:https?://(?:[^/@]*@)?|(?:ssh://)?git@)([\w.-]+)[:/](.+?)(?:\.git)?/?", remote)
    return f"https://{found[1]}/{found[2]}" if found else ""


def _write_package_page(root: Path, url: str, commit: str) -> None:
    """Add URLs to pyproject.toml, and make the README's links to files absolute: a package index has no files."""
    project = root / "pyproject.toml"
    if url and "[project.urls]" not in project.read_text():
        urls = {"Source": url, "Documentation": f"{url}/tree/HEAD/docs", "Changelog": f"{url}/blob/HEAD/CHANGELOG.md"}
        lines = "".join(f'{name} = "{value}"\n' for name, value in urls.items())
        project.write_text(f"{project.read_text()}\n[project.urls]\n{lines}")
    version = "HEAD" if commit == "unknown" else commit

    def absolute(link: re.Match[str]) -> str:
        is_image, label, target = link.groups()
        if not url:
            return "" if is_image else label
        return f"{is_image}[{label}]({url}/{'raw' if is_image else 'blob'}/{version}/{target})"

    readme = root / "README.md"
    readme.write_text(re.sub(r"(!?)\[([^\]]+)\]\((?!https?://|#)([^)\s]+)\)", absolute, readme.read_text()))


def version_to_build(root: Path, config_settings: Any = None) -> str:
    """Return the text of ``version.txt``, or of ``-C version=``, with the suffixes that the environment asks for.

    Engines pin releases of one API level that exclude each other (0.7.2 and 0.7.2.post1). A wheel of either can be made
    from one tree: the option may change the post-release number, and nothing else.
    """
    version = level = (root / "version.txt").read_text().strip()
    if config_settings and "version" in config_settings:
        version, release = config_settings["version"], ".".join(level.split(".")[:3])
        if not re.fullmatch(re.escape(release) + r"(\.post\d+)?", version):
            raise ValueError(
                f"version must be {release} or {release}.postN (the API level of this tree), got {version!r}"
            )
    dev, local = (os.environ.get(f"FLASHINFER_{name}") for name in ("DEV_RELEASE_SUFFIX", "LOCAL_VERSION"))
    return version + (f".dev{dev}" if dev else "") + (f"+{local}" if local else "")


def _write_build_meta(root: Path, commit: str, version: str) -> None:
    text = (
        '"""Generated by build_backend.py; not tracked by git."""\n\n'
        f'__version__ = "{version}"\n'
        f'__git_commit__ = "{commit}"\n'
    )
    (root / BUILD_META).write_text(text)


def _remove(path: Path) -> None:
    if path.is_symlink() or path.is_file():
        path.unlink()
    elif path.is_dir():
        shutil.rmtree(path)


def _link_data(root: Path) -> None:
    """Link ``flashinfer/data/<name>`` to the folders of the tree. Relative links, so that the checkout can be moved."""
    data = root / PACKAGE / "data"
    data.mkdir(exist_ok=True)
    for name, folder in DATA.items():
        _remove(data / name)
        (data / name).symlink_to(os.path.relpath(root / folder, data), target_is_directory=True)


def _copy_data(root: Path) -> None:
    for name, folder in DATA.items():
        shutil.copytree(root / folder, root / PACKAGE / "data" / name)


def _generated(folder: str, names: list[str]) -> set[str]:
    """Return the generated names of a folder, which are not copied: caches, build metadata and linked data."""
    skip = {n for n in names if n == "__pycache__" or n.endswith(".pyc")}
    if Path(folder) == ROOT / PACKAGE:
        skip |= {"data", BUILD_META.name}
    return skip


@contextlib.contextmanager
def _staged_tree(config_settings: Any = None) -> Iterator[Path]:
    """Make a temporary copy of the shipped files the working directory."""
    with tempfile.TemporaryDirectory(prefix="flashinfer-build-") as name:
        stage = Path(name)
        for file in SHIPPED_FILES:
            shutil.copy2(ROOT / file, stage / file)
        for folder in SHIPPED_FOLDERS:
            shutil.copytree(ROOT / folder, stage / folder, ignore=_generated)
        commit, version = _git_commit(ROOT), version_to_build(ROOT, config_settings)
        (stage / "version.txt").write_text(f"{version}\n")
        _write_build_meta(stage, commit, version)
        _write_package_page(stage, _source_url(ROOT), commit)
        before = Path.cwd()
        os.chdir(stage)
        try:
            yield stage
        finally:
            os.chdir(before)


def build_wheel(wheel_directory: str, config_settings: Any = None, metadata_directory: Optional[str] = None) -> str:
    target = os.path.abspath(wheel_directory)
    metadata = os.path.abspath(metadata_directory) if metadata_directory else None
    with _staged_tree(config_settings) as stage:
        _copy_data(stage)
        return _setuptools.build_wheel(target, config_settings, metadata)


def build_sdist(sdist_directory: str, config_settings: Any = None) -> str:
    target = os.path.abspath(sdist_directory)
    with _staged_tree(config_settings):
        return _setuptools.build_sdist(target, config_settings)


def prepare_metadata_for_build_wheel(metadata_directory: str, config_settings: Any = None) -> str:
    target = os.path.abspath(metadata_directory)
    with _staged_tree(config_settings):
        return _setuptools.prepare_metadata_for_build_wheel(target, config_settings)


def build_editable(wheel_directory: str, config_settings: Any = None, metadata_directory: Optional[str] = None) -> str:
    _write_build_meta(ROOT, _git_commit(ROOT), version_to_build(ROOT, config_settings))
    _link_data(ROOT)
    return _setuptools.build_editable(wheel_directory, config_settings, metadata_directory)


def prepare_metadata_for_build_editable(metadata_directory: str, config_settings: Any = None) -> str:
    _write_build_meta(ROOT, _git_commit(ROOT), version_to_build(ROOT, config_settings))
    return _setuptools.prepare_metadata_for_build_editable(metadata_directory, config_settings)


def _no_requirements(config_settings: Any = None) -> list[str]:
    """Return no requirements beyond ``build-system.requires``. setuptools would leave an egg-info in the checkout."""
    return []


get_requires_for_build_wheel = get_requires_for_build_sdist = get_requires_for_build_editable = _no_requirements
