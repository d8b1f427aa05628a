# SPDX-License-Identifier: Apache-2.0
"""Build the documentation site in build/site: the pages of docs/, and API pages from docstrings.

make docs                                 needs MkDocs (pip install -e ".[docs]"), no network
python scripts/build_site.py --pages      writes the Markdown pages to build/site_pages only; needs no MkDocs

Links to files outside docs/ lead to the repository if its address is known (build_backend.py), else become plain text.
"""

from __future__ import annotations

import argparse
import importlib
import inspect
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any, Iterator, Optional, Sequence

ROOT = Path(__file__).resolve().parents[1]
PAGES = ROOT / "build" / "site_pages"  # docs_dir of mkdocs.yml
sys.path.insert(0, str(ROOT))

LINK = re.compile(r"(!?)\[([^\]]+)\]\((?!https?://|#)([^)\s#]+)(#[^)\s]*)?\)")
SECTION = re.compile(r"^(\w[\w ]*)\n-{3,}\n", re.M)
ENTRY = re.compile(r"^([*\w]+(?:, [*\w]+)*)(?: : (.*))?$")


def rewrite_links(text: str, page: Path, url: str) -> str:
    """Return the text of a page with links that the site can follow. ``page`` is its path in the tree."""

    def new_link(link: re.Match[str]) -> str:
        is_image, label, target, anchor = link.groups()
        path = (page.parent / target).resolve()
        moved = site_path(path)
        if moved is not None:
            here = site_path(page)
            assert here is not None
            up = "../" * (len(here.parts) - 1)
            return f"{is_image}[{label}]({up}{moved.as_posix()}{anchor or ''})"
        return f"[{label}]({url}/blob/HEAD/{path.relative_to(ROOT).as_posix()})" if url else label

    return LINK.sub(new_link, text)


def site_path(path: Path) -> Optional[Path]:
    """Return where a file of the tree lies in the site; None if it is not there."""
    if path == ROOT / "docs" / "README.md":
        return Path("guides.md")  # README.md is another name of index.md for MkDocs
    if path.is_relative_to(ROOT / "docs"):
        return path.relative_to(ROOT / "docs")
    tops = {"README.md": "index.md", "CHANGELOG.md": "changelog.md", "CONTRIBUTING.md": "contributing.md"}
    return Path(tops[path.name]) if path.parent == ROOT and path.name in tops else None


def copy_documents(url: str) -> None:
    """Copy the documents and their pictures."""
    top = [ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md")]
    for path in [*top, *sorted((ROOT / "docs").rglob("*"))]:
        place = site_path(path)
        if place is None or path.is_dir():
            continue
        (PAGES / place).parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".md":
            (PAGES / place).write_text(rewrite_links(path.read_text(), path, url))
        else:
            shutil.copy2(path, PAGES / place)


# ------------------------------------------------------------------------------------------------ API pages


def api_modules() -> list[str]:
    """Return the modules that get a page: each family and service with public names."""
    from flashinfer.aot import FAMILIES

    services = ["attention", "autotuner", "cudnn", "logits_processor", "pod", "profiler", "sparse", "testing", "xqa"]
    return sorted({*(family for family in FAMILIES if family != "api_log_stats"), *services})


def public_things(module: Any) -> Iterator[tuple[str, Any]]:
    """Yield the public functions and classes of a module, with their names."""
    names = getattr(module, "__all__", None) or [name for name in dir(module) if not name.startswith("_")]
    for name in names:
        thing = getattr(module, name)
        is_ours = getattr(thing, "__module__", "").startswith("flashinfer")
        if is_ours and (inspect.isfunction(thing) or inspect.isclass(thing)) and inspect.getdoc(thing):
            yield name, thing


def signature(name: str, thing: Any) -> str:
    """Return the definition as code, one argument per line if it is long."""
    keyword = "class" if inspect.isclass(thing) else "def"
    try:
        text = str(inspect.signature(thing))
    except (TypeError, ValueError):  # some enums have none
        return f"{keyword} {name}"
    line = f"{keyword} {name}{text}"
    if len(line) <= 100:
        return line
    parameters = [f"    {parameter}," for parameter in inspect.signature(thing).parameters.values()]
    result = text.rpartition(")")[2]
    return "\n".join([f"{keyword} {name}(", *parameters, f"){result}"])


def entries(body: str) -> str:
    """Return ``name : type`` and its indented text as a list."""
    lines = []
    for line in body.strip("\n").splitlines():
        head = None if line.startswith(" ") else ENTRY.fullmatch(line)
        if head:
            lines.append(f"- **{head[1]}**" + (f" (`{head[2]}`)" if head[2] else ""))
        else:
            lines.append(f"  {line.strip()}" if line.startswith(" ") else line)
    return "\n".join(lines)


def docstring_page(doc: str) -> str:
    """Turn a numpy docstring into Markdown: sections become headings, parameters lists, examples code."""
    doc = re.sub(r":\w+:`~?\.?([^`]+)`", r"`\1`", doc.replace("``", "`"))
    parts = SECTION.split(doc)
    text = [parts[0].strip()]
    for title, body in zip(parts[1::2], parts[2::2], strict=True):
        if title == "Examples":
            content = f"```python\n{body.strip()}\n```"
        elif title in ("Parameters", "Returns", "Attributes", "Raises", "Yields"):
            content = entries(body)
        else:
            content = inspect.cleandoc(body)
        text.append(f"**{title}**\n\n{content}")
    return "\n\n".join(text)


def thing_page(name: str, thing: Any) -> str:
    parts = [f"## {name}", f"```python\n{signature(name, thing)}\n```", docstring_page(inspect.getdoc(thing) or "")]
    if inspect.isclass(thing):
        for method, function in vars(thing).items():
            if not method.startswith("_") and inspect.isfunction(function) and function.__doc__:
                parts.append(f"### {name}.{method}\n\n```python\n{signature(method, function)}\n```")
                parts.append(docstring_page(inspect.getdoc(function) or ""))
    return "\n\n".join(parts)


def write_api_pages() -> int:
    """Write a page per module; return the number of functions and classes."""
    count, index = (
        0,
        ["# API", "", "Printed from the docstrings. The most used names are also in `flashinfer` itself.", ""],
    )
    (PAGES / "api").mkdir(parents=True, exist_ok=True)
    for name in api_modules():
        module = importlib.import_module(f"flashinfer.{name}")
        things = list(public_things(module))
        summary = (module.__doc__ or "").strip().partition("\n")[0]
        pages = [f"# flashinfer.{name}", docstring_page(inspect.cleandoc(module.__doc__ or ""))]
        pages += [thing_page(*thing) for thing in things]
        (PAGES / "api" / f"{name}.md").write_text("\n\n".join(pages) + "\n")
        index.append(f"- [flashinfer.{name}]({name}.md): {summary.replace('``', '`')}")
        count += len(things)
    (PAGES / "api" / "index.md").write_text("\n".join(index) + "\n")
    return count


def main(argv: Optional[Sequence[str]] = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--pages", action="store_true", help="write the Markdown pages only")
    arguments = parser.parse_args(argv)
    from build_backend import _source_url

    shutil.rmtree(PAGES, ignore_errors=True)
    copy_documents(_source_url(ROOT))
    count = write_api_pages()
    print(f"{count} functions and classes: {PAGES}")
    if not arguments.pages:
        command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "-f", str(ROOT / "mkdocs.yml")]
        if subprocess.run(command, check=False).returncode:
            raise SystemExit('build_site.py: mkdocs failed; pip install -e ".[docs]" installs it')
        print(f"site: {ROOT / 'build' / 'site' / 'index.html'}")


if __name__ == "__main__":
    main()
