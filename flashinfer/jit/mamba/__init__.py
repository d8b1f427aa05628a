# SPDX-License-Identifier: Apache-2.0
"""Published paths of generators of Mamba; they are defined in ``flashinfer.jit.recurrent.mamba``."""
