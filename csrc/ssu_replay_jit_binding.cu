// SPDX-License-Identifier: Apache-2.0
// Exports of an ssu_replay module.
#include "ssu_replay.cu"

FLASHINFER_EXPORT(checkpointing_ssu, checkpointing_ssu)
FLASHINFER_EXPORT(replayssm_materialize, replayssm_materialize)
