# SPDX-License-Identifier: Apache-2.0
"""The path under which published code imports Mamba.

``flashinfer.mamba.checkpointing_ssu`` is a function and, in ``from flashinfer.mamba.checkpointing_ssu import ...``, a
module. The import system sets the attribute when it first imports a module, which happens here, before the names of the
functions are bound: so the order in which programs import does not matter.
"""

from flashinfer.mamba.checkpointing_ssu import (
    allocate_checkpointing_ssu_scratch as allocate_checkpointing_ssu_scratch,
)
from flashinfer.mamba.checkpointing_ssu import checkpointing_ssu as checkpointing_ssu
from flashinfer.mamba.checkpointing_ssu import replayssm_materialize as replayssm_materialize
from flashinfer.mamba.selective_state_update import cake_selective_state_update as cake_selective_state_update
from flashinfer.mamba.selective_state_update import selective_state_update as selective_state_update
from flashinfer.mamba.ssd_combined import SSDCombined as SSDCombined
from flashinfer.mamba.ssd_combined import ssd_combined_fwd as ssd_combined_fwd
