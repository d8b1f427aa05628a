// SPDX-License-Identifier: Apache-2.0
// Exports of a single_prefill module.
#include "attention_arguments.h"

void single_prefill_run(flashinfer::attention::Arguments& args);

FLASHINFER_EXPORT_RUN(run, single_prefill_run)
