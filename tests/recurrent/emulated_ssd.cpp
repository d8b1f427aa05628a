// SPDX-License-Identifier: Apache-2.0
// The Hopper kernel of SSD on the emulated device: one batch entry, or packed sequences by their bounds.
#include <flashinfer/recurrent/ssd_sm90/launch.cuh>

using namespace flashinfer;
using namespace flashinfer::recurrent;

EMULATION_EXPORT int run(const void* x, const void* b, const void* c, const void* dt, const float* a, const void* d,
                         const float* initial, float* final, float* kept, const int32_t* kept_tokens,
                         const int32_t* kept_slots, const int32_t* bounds, void* out, int64_t sequences, int64_t tokens,
                         int64_t heads, int64_t groups) {
  using Input = __nv_bfloat16;
  constexpr int DIM = 64, DSTATE = 128;
  SsdParams<Input> p{};
  p.x = {static_cast<const Input*>(x), tokens * heads * DIM, heads * DIM, DIM};
  p.b = {static_cast<const Input*>(b), tokens * groups * DSTATE, groups * DSTATE, DSTATE};
  p.c = {static_cast<const Input*>(c), tokens * groups * DSTATE, groups * DSTATE, DSTATE};
  p.out = {static_cast<Input*>(out), tokens * heads * DIM, heads * DIM, DIM};
  p.out_row = 1;
  p.dt = {dt, WeightType::kFloat, tokens * heads, heads, 1, 0};
  p.d = {d, WeightType::kFloat, 0, 0, 1, 0};
  p.a = a;
  const int64_t row = heads * DIM * DSTATE;
  p.initial = {const_cast<float*>(initial), WeightType::kFloat, row};
  p.final = {final, WeightType::kFloat, row};
  if (kept != nullptr) {
    p.kept = {kept, WeightType::kFloat, row};
    p.kept_tokens = {kept_tokens, false, 1, 1, 0};
    p.kept_slots = {kept_slots, false, 1, 1, 0};
    p.kept_rows = sequences;
  }
  p.bounds = bounds;
  p.sequences = int(sequences);
  p.tokens = int(tokens);
  p.heads = int(heads);
  p.heads_per_group = int(heads / groups);
  p.dim = DIM;
  p.dstate = DSTATE;
  p.dt_min = 0.f;
  p.dt_max = INFINITY;
  return int(ssd_sm90::Launch<Input>(p, nullptr));
}
