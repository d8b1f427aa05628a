// SPDX-License-Identifier: Apache-2.0
// Exports of the api_log_stats module.
#include "api_log_stats.cu"

FLASHINFER_EXPORT(api_log_stats, api_log_stats)
