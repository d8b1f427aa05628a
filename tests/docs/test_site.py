# SPDX-License-Identifier: Apache-2.0
"""The documentation site: its pages, and its build without a network."""

from __future__ import annotations

import importlib.util
import os
import re
import subprocess
import sys

import pytest

from .documents import ROOT

spec = importlib.util.spec_from_file_location("build_site", ROOT / "scripts" / "build_site.py")
assert spec is not None and spec.loader is not None
site = importlib.util.module_from_spec(spec)
spec.loader.exec_module(site)

DOC = """Add ``x`` and ``y``. See :func:`subtract`.

Parameters
----------
x, y : torch.Tensor
    ``(rows,)``,
    float32.

Examples
--------
>>> add(1, 2)
3
"""

PAGE = """Add `x` and `y`. See `subtract`.

**Parameters**

- **x, y** (`torch.Tensor`)
  `(rows,)`,
  float32.

**Examples**

```python
>>> add(1, 2)
3
```"""


def test_docstrings_become_markdown():
    assert site.docstring_page(DOC) == PAGE


@pytest.mark.parametrize(
    "url, expected",
    [
        ("", "norm.py, [gemm](../gemm.md#tiles), [start](../index.md) and [web](https://w.example.org)"),
        (
            "https://f.example.org/x",
            "[norm.py](https://f.example.org/x/blob/HEAD/flashinfer/norm/rmsnorm.py), [gemm](../gemm.md#tiles), "
            "[start](../index.md) and [web](https://w.example.org)",
        ),
    ],
)
def test_links_lead_into_the_site_or_the_repository(url, expected):
    text = (
        "[norm.py](../../flashinfer/norm/rmsnorm.py), [gemm](../gemm.md#tiles), [start](../../README.md) and "
        "[web](https://w.example.org)"
    )
    assert site.rewrite_links(text, ROOT / "docs" / "performance" / "norm.md", url) == expected


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    """Write the Markdown pages to a temporary folder."""
    site.PAGES = tmp_path_factory.mktemp("site") / "pages"
    site.copy_documents("")
    assert site.write_api_pages() > 150
    return site.PAGES


def test_pages_of_the_api(pages):
    text = (pages / "api" / "norm.md").read_text()
    assert "## rmsnorm" in text and "- **weight** (`torch.Tensor`)" in text and ">>> " in text


def test_code_and_tables_fit_their_column(pages):
    """Check that the site has our rules for wide code and tables; their layout was checked in a browser."""
    config = (ROOT / "mkdocs.yml").read_text()
    assert "extra_css:\n  - site.css\n" in config
    rules = (pages / "site.css").read_text()
    for selector in (".rst-content table", ".rst-content pre"):
        assert re.search(rf"^{re.escape(selector)} \{{[^}}]*overflow-x: auto;", rules, re.M), selector


def test_site_builds_without_a_network(pages, tmp_path):
    """Check every link between pages (``--strict``), and that no page loads anything from another host.

    Without MkDocs the test skips, or fails if ``FLASHINFER_TEST_REQUIRE_MKDOCS=1`` is set, as in CI.
    """
    if importlib.util.find_spec("mkdocs") is None:
        refuse = pytest.fail if os.environ.get("FLASHINFER_TEST_REQUIRE_MKDOCS") == "1" else pytest.skip
        refuse("MkDocs is not installed: pip install -e '.[docs]'")
    config = (ROOT / "mkdocs.yml").read_text().replace("build/site_pages", str(pages))
    (tmp_path / "mkdocs.yml").write_text(config.replace("build/site", str(tmp_path / "site")))
    env = {**os.environ, **dict.fromkeys(("http_proxy", "https_proxy"), "http://127.0.0.1:9")}
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "-f", str(tmp_path / "mkdocs.yml")]
    done = subprocess.run(command, env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    for page in (tmp_path / "site").rglob("*.html"):
        loaded = re.findall(r"<(?:script|link|img)[^>]+(?:src|href)=\"?(https?://[^\" >]+)", page.read_text())
        assert not loaded, f"{page.name} loads {loaded}"
