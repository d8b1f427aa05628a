# SPDX-License-Identifier: Apache-2.0
"""The path under which published code imports Mamba-2 over whole sequences."""

from flashinfer.recurrent.mamba_chunk import SSDCombined as SSDCombined
from flashinfer.recurrent.mamba_chunk import _get_seq_chunk_cumsum_module as _get_seq_chunk_cumsum_module
from flashinfer.recurrent.mamba_chunk import ssd_combined_fwd as ssd_combined_fwd
