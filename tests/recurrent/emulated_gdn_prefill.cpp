// SPDX-License-Identifier: Apache-2.0
// The kernels of the chunked gated delta rule on the CPU (tests/emulation).
#ifdef PORTABLE
#include <flashinfer/recurrent/chunk/launch.cuh>
#else
#include <flashinfer/recurrent/chunk_sm90/launch.cuh>
#include <flashinfer/recurrent/chunk_sm90/scan_launch.cuh>
#include <flashinfer/recurrent/chunk_sm90/start_states.cuh>
#endif

using namespace flashinfer;             // NOLINT(build/namespaces)
using namespace flashinfer::recurrent;  // NOLINT(build/namespaces)

/// Struct of test_emulated_gdn_prefill.py.
struct Call {
  const void *q, *k, *v;
  void* o;
  const float *g, *beta;
  int64_t q_heads, k_heads, v_heads, tokens, requests;
  const int64_t* offsets;
  float *initial, *final, *checkpoints;
  const int64_t* slots;
  const int64_t* rows;
  int64_t interval;
  void* blocks;
  int64_t num_sms, segment;
  float* parts;
  double scale;
};

template <typename T>
DeltaParams<T> ParamsOf(const Call& c) {
  DeltaParams<T> p;
  p.q = static_cast<const T*>(c.q), p.k = static_cast<const T*>(c.k), p.v = static_cast<const T*>(c.v);
  p.o = static_cast<T*>(c.o);
  p.g = c.g, p.beta = c.beta;
  p.num_q_heads = int(c.q_heads), p.num_k_heads = int(c.k_heads), p.num_v_heads = int(c.v_heads);
  p.num_heads = int(std::max(c.q_heads, c.v_heads));
  p.scale = float(c.scale);
  p.tokens = c.tokens, p.requests = int(c.requests);
  p.offsets = {c.offsets, true}, p.slots = {c.slots, true}, p.rows = {c.rows, true};
  auto states = [&](float* data) {
    return States{data, StateType::kF32, int64_t(p.num_heads) * DIM * DIM, DIM * DIM, DIM, 1};
  };
  p.initial = states(c.initial), p.final = states(c.final), p.checkpoints = states(c.checkpoints);
  p.interval = c.interval;
  p.blocks = static_cast<char*>(c.blocks);
  p.num_sms = int(c.num_sms);
  p.segment = c.segment, p.parts = c.parts;
  return p;
}

EMULATION_EXPORT int prepare_bf16(const Call* c) { return int(PrepareChunks(ParamsOf<__nv_bfloat16>(*c), nullptr)); }
EMULATION_EXPORT int prepare_f16(const Call* c) { return int(PrepareChunks(ParamsOf<__half>(*c), nullptr)); }
EMULATION_EXPORT int prefill_bf16(const Call* c) { return int(GdnPrefill(ParamsOf<__nv_bfloat16>(*c), nullptr)); }
EMULATION_EXPORT int prefill_f16(const Call* c) { return int(GdnPrefill(ParamsOf<__half>(*c), nullptr)); }
EMULATION_EXPORT int64_t bytes_of_blocks(int64_t requests, int64_t tokens, int64_t heads) {
  return BytesOfBlocks(requests, tokens, heads);
}
