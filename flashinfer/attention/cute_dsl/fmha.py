# SPDX-License-Identifier: Apache-2.0
"""The path that the guide names beside ``FLASHINFER_DSL_FMHA_LOCAL_DIR``: the loader looks in that folder first."""

from ...jit.cubin_loader import DSL_FMHA as DSL_FMHA
from ...jit.cubin_loader import find_artifact as find_artifact
