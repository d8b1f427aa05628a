// SPDX-License-Identifier: Apache-2.0
// Launcher of a single_decode module: one token of one request.
#include "attention_single.h"

using namespace flashinfer;
using namespace flashinfer::attention;

/// run(q, k, v, tmp | None, o, lse | None, layout, window_left, *extras). q is [heads, head_dim]; tmp is scratch memory.
void single_decode_run(Arguments& args) {
  args.ExpectCount(8);
  const char* op = "single_decode";
  const TensorView q = args.Next<TensorView>(), k = args.Next<TensorView>(), v = args.Next<TensorView>();
  const Optional<TensorView> tmp = args.Next<Optional<TensorView>>();
  const TensorView o = args.Next<TensorView>();
  const Optional<TensorView> lse = args.Next<Optional<TensorView>>();
  const int64_t layout = args.Next<int64_t>(), window_left = args.Next<int64_t>();
  Params p{};
  Expect(op, "q", q).rank(2);
  SetQueries(p, op, q, o, lse);
  SetKeys(p, op, q, o, k, v, layout, false);
  ExtrasReader reader(args, q, layout, false);
  ReadExtras(p, reader);
  p.qo_len = 1;
  p.window_left = int32_t(window_left);
  DeviceGuard guard(q.device());
  const Scratch scratch(tmp, tmp.has_value() ? 0 : ScratchBytes<false>(p), q.device());
  RunPlannedSingle<false>(SiteOf(op, q.device()), p, scratch.view(), false);
}
