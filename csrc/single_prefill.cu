// SPDX-License-Identifier: Apache-2.0
// Launcher of a single_prefill module: many tokens of one request.
#include "attention_scratch.h"

using namespace flashinfer;
using namespace flashinfer::attention;

/// run(q, k, v, tmp | None, o, lse | None, mask_mode, layout, window_left, *extras). tmp is scratch memory.
void single_prefill_run(Arguments& args) {
  args.ExpectCount(9);
  const char* op = "single_prefill";
  const TensorView q = args.Next<TensorView>(), k = args.Next<TensorView>(), v = args.Next<TensorView>();
  const Optional<TensorView> tmp = args.Next<Optional<TensorView>>();
  const TensorView o = args.Next<TensorView>();
  const Optional<TensorView> lse = args.Next<Optional<TensorView>>();
  const int64_t mask_mode = args.Next<int64_t>(), layout = args.Next<int64_t>(), window_left = args.Next<int64_t>();
  Params p{};
  Expect(op, "q", q).rank(3);
  SetQueries(p, op, q, o, lse);
  SetKeys(p, op, q, k, v, layout, false);
  ExtrasReader reader(args, q, layout, false);
  ReadExtras(p, reader);
  p.qo_len = int32_t(q.size(0));
  p.window_left = int32_t(window_left);
  SetMaskMode(p, op, mask_mode);
  DeviceGuard guard(q.device());
  const Scratch scratch(tmp, tmp.has_value() ? 0 : ScratchBytes<true>(p), q.device());
  RunUniform<true>(SiteOf(op, q.device()), p, scratch.view(), WantsAll(mask_mode));
}
