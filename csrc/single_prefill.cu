// SPDX-License-Identifier: Apache-2.0
// Launcher of a single_prefill module: many tokens of one request.
#include "attention_single.h"

using namespace flashinfer;
using namespace flashinfer::attention;

/// run(q, k, v, tmp | None, o, lse | None, mask_mode, layout, window_left, *extras). tmp is scratch memory.
void single_prefill_run(Arguments& args) {
  args.ExpectCount(SINGLE_ARGUMENTS);
  const char* op = "single_prefill";
  const SingleCall call = NextSingle(op, args);
  const DeviceGuard guard(call.device);
  RunSingle(SiteOf(op, call.device), call);
}
