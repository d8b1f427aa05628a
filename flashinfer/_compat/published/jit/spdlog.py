# SPDX-License-Identifier: Apache-2.0
"""The path under which published code imports the generator of a logger in C++, of which there is none here."""

from flashinfer._compat.unsupported import needs

gen_spdlog_module = needs(
    "gen_spdlog_module", "the library spdlog and a module for it, which this package does not have"
)
