// SPDX-License-Identifier: Apache-2.0
// The kernels of chunked Kimi delta attention on the CPU (tests/emulation).
#include <flashinfer/recurrent/chunk_sm90/kda_launch.cuh>
#include <flashinfer/recurrent/chunk_sm90/scan_launch.cuh>

using namespace flashinfer;             // NOLINT(build/namespaces)
using namespace flashinfer::recurrent;  // NOLINT(build/namespaces)

/// Struct of test_emulated_kda_prefill.py.
struct Call {
  const void *q, *k, *v;
  void* o;
  const void *g, *beta;
  const float *a_log, *dt_bias;
  int64_t heads, value_heads, tokens, requests;
  const int64_t* offsets;
  float *initial, *checkpoints;
  const int64_t *slots, *rows;
  int64_t interval, keeps_starts, gate, normalise;
  double lower_bound;
  void* blocks;
  int64_t num_sms;
};

EMULATION_EXPORT int prefill(const Call* c) {
  using T = __nv_bfloat16;
  KdaParams<T> p;
  p.q = static_cast<const T*>(c->q), p.k = static_cast<const T*>(c->k), p.v = static_cast<const T*>(c->v);
  p.o = static_cast<T*>(c->o);
  p.gates = static_cast<const T*>(c->g), p.betas = c->beta;
  p.a_log = c->a_log, p.dt_bias = c->dt_bias, p.bias_is_float = true;
  p.gate = static_cast<KimiDeltaRule::Gate>(c->gate), p.lower_bound = float(c->lower_bound);
  p.beta_is_logit = p.gate != KimiDeltaRule::Gate::kLogDecay, p.normalise = c->normalise;
  p.num_q_heads = p.num_k_heads = int(c->heads), p.num_v_heads = p.num_heads = int(c->value_heads);
  p.scale = 0.125f;
  p.tokens = c->tokens, p.requests = int(c->requests);
  p.offsets = {c->offsets, true}, p.slots = {c->slots, true}, p.rows = {c->rows, true};
  auto states = [&](float* data) {
    return States{data, StateType::kF32, int64_t(p.num_heads) * DIM * DIM, DIM * DIM, DIM, 1};
  };
  p.initial = p.final = states(c->initial), p.checkpoints = states(c->checkpoints);
  p.interval = c->interval, p.keeps_starts = c->keeps_starts;
  p.blocks = static_cast<char*>(c->blocks);
  p.num_sms = int(c->num_sms);
  return int(KdaPrefill(p, nullptr));
}

EMULATION_EXPORT int64_t bytes_of_blocks(int64_t requests, int64_t tokens, int64_t heads) {
  return BytesOfKdaBlocks(requests, tokens, heads);
}
