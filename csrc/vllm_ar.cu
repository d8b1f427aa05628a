// SPDX-License-Identifier: Apache-2.0
// Launcher of the all-reduce of vLLM's operators: argument checks, dtype dispatch, stream.
#include "tvm_ffi_utils.h"
// clang-format off
#include <flashinfer/comm/pull/params.h>
#ifdef FLASHINFER_CPU
#include <flashinfer/comm/pull/cpu.h>
#endif
// clang-format on

using flashinfer::comm::MAX_RANKS;
using flashinfer::comm::PullParams;

int64_t vllm_meta_size() { return flashinfer::comm::PULL_HEAD_BYTES; }

/// `inp` gives shape and type; what is read are the addresses at `inputs`. `heads`: the shared memory of each rank.
int64_t vllm_all_reduce(TensorView inp, TensorView out, TensorView heads, int64_t rank, int64_t inputs,
                        bool is_two_shot, int64_t blocks, int64_t stage, int64_t wait_us, int64_t timeout_ns,
                        int64_t record) {
  constexpr const char* OP = "vllm_all_reduce";
  Expect(OP, "inp", inp).on_device().dtype({dl_float16, dl_bfloat16, dl_float32}).contiguous();
  Expect(OP, "out", out).same_device(inp, "inp").same_dtype(inp, "inp").contiguous().numel(inp.numel());
  Expect(OP, "out", out).apart(inp, "inp");
  const int64_t nbytes = inp.numel() * inp.dtype().bits / 8;
  if (nbytes % 16 != 0) {
    FLASHINFER_THROW(ArgumentError) << OP << ": inp must have a multiple of 16 bytes, got " << nbytes;
  }
  Expect(OP, "heads", heads).rank(1).dtype({dl_int64}).contiguous();
  const int64_t world = heads.size(0);
  if (world > MAX_RANKS || rank < 0 || rank >= world) {
    FLASHINFER_THROW(ArgumentError) << OP << ": rank must be in [0, world size), got " << rank << " of " << world;
  }
  int64_t outcome = -1;
  DeviceGuard guard(inp.device());
  DispatchFloat(inp.dtype(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    PullParams<T> p{};
    for (int r = 0; r < world; ++r) p.peers.memory[r] = reinterpret_cast<char*>(heads.data_ptr<int64_t>()[r]);
    p.peers.rank = int(rank);
    p.peers.world = int(world);
    p.inputs = reinterpret_cast<const int64_t*>(inputs);
    p.out = out.data_ptr<T>();
    p.size = inp.numel();
    p.is_two_shot = is_two_shot;
    p.blocks = int32_t(blocks);
    p.stage = int32_t(stage);
    p.wait_us = wait_us;
    p.timeout_ns = uint64_t(timeout_ns);
    p.record = reinterpret_cast<uint32_t*>(record);
#ifdef FLASHINFER_CPU
    outcome = flashinfer::comm::PullOnHost<T>(p);
#else
    CheckStatus(OP, flashinfer::comm::Pull<T>(p, get_stream(inp.device())));
#endif
  });
  return outcome;
}
