# SPDX-License-Identifier: Apache-2.0
"""The module that reads the GPU's clock compiles."""

from __future__ import annotations

from flashinfer.jit.globaltimer import gen_globaltimer_module


def test_globaltimer_compiles(hopper):
    spec = gen_globaltimer_module()
    spec.build()
    assert spec.get_library_path().exists()
