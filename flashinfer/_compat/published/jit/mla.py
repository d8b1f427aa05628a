# SPDX-License-Identifier: Apache-2.0
"""The path under which published code imports the generator of MLA."""

from flashinfer.jit.attention.modules import gen_batch_mla_module as gen_batch_mla_module
