# SPDX-License-Identifier: Apache-2.0
"""A copy of the tree and a wheel of it, shared by the packaging tests."""

from __future__ import annotations

import pytest

from .tree import build, copy_tree, listing


@pytest.fixture(scope="package")
def tree(tmp_path_factory):
    return copy_tree(tmp_path_factory.mktemp("packaging") / "tree")


@pytest.fixture(scope="package")
def wheel(tree, tmp_path_factory):
    before = listing(tree)
    path = build(tree, "build_wheel", tmp_path_factory.mktemp("wheel"))
    assert listing(tree) == before, "building a wheel changed the checkout"
    return path
