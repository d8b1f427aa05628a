// SPDX-License-Identifier: Apache-2.0
// Exports of a single_decode module.
#include "attention_arguments.h"

void single_decode_run(flashinfer::attention::Arguments& args);

FLASHINFER_EXPORT_RUN(run, single_decode_run)
