# SPDX-License-Identifier: Apache-2.0
"""The path under which published code imports the selective state update."""

from flashinfer.recurrent.mamba_update import cake_selective_state_update as cake_selective_state_update
from flashinfer.recurrent.mamba_update import get_selective_state_update_module as get_selective_state_update_module
from flashinfer.recurrent.mamba_update import selective_state_update as selective_state_update
