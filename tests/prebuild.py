# SPDX-License-Identifier: Apache-2.0
"""Build the modules that many test files need in one parallel graph: ``python -m tests.prebuild``.

Without it the workers of pytest-xdist would build them one after the other, and wait for each other's locks. A module
that only one file needs is built by its first test.
"""

from __future__ import annotations

import time

import torch

from flashinfer.aot import FAMILIES, gen_family_modules
from flashinfer.jit import JitSpec, attention, build_jit_specs

from .attention import matrix
from .conftest import DEVICES

#: Families whose default modules have the sizes of real models; the tests use smaller ones, of the attention matrix.
LARGE = ("decode", "prefill")


def specs(device: str) -> list[JitSpec]:
    """Return the modules of one device, those that compile longest first."""
    f16, bf16, e4m3, ids = torch.float16, torch.bfloat16, torch.float8_e4m3fn, torch.int32
    found = [
        *matrix.specs(device),
        attention.gen_batch_prefill_module("fa2", bf16, e4m3, bf16, ids, 64, 64, 0, False, False, False, device=device),
        attention.gen_batch_mla_module("fa2", f16, f16, f16, ids, 128, 0, False, device=device),
    ]
    for family in FAMILIES:
        found += gen_family_modules(family, device) if family not in LARGE else ()
    return list({spec.name: spec for spec in found}.values())


def main() -> None:
    for device in DEVICES:
        start, wanted = time.perf_counter(), specs(device)
        build_jit_specs(wanted)
        print(f"{len(wanted)} modules for {device}: {time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
