// SPDX-License-Identifier: Apache-2.0
// Launcher of the two-sided exchange of rows: argument checks, stream.
#include "tvm_ffi_utils.h"
// clang-format off
#include <flashinfer/comm/alltoall/fifo.h>
#ifdef FLASHINFER_CPU
#include <flashinfer/comm/alltoall/fifo_cpu.h>
#endif
// clang-format on

namespace comm = flashinfer::comm;

namespace {

constexpr const char* OP = "moe_comm";

/// Check sums of rows by rank and their indices, and return the pointers; on the CPU the values too.
std::pair<const int32_t*, const int32_t*> PartsOf(const std::string& side, const TensorView& sums,
                                                  const TensorView& indices, const TensorView& workspace,
                                                  [[maybe_unused]] int64_t rows) {
  const std::string sums_name = side + "_rank_cum_sum", indices_name = side + "_indices";
  Expect(OP, sums_name.c_str(), sums).same_device(workspace, "all_workspaces").rank(1).dtype({dl_int32}).contiguous();
  Expect(OP, sums_name.c_str(), sums).dim(0, workspace.size(0), "ep_size");
  Expect(OP, indices_name.c_str(), indices).same_device(workspace, "all_workspaces").dtype({dl_int32}).contiguous();
  const int32_t *const s = sums.data_ptr<int32_t>(), *const x = indices.data_ptr<int32_t>();
#ifdef FLASHINFER_CPU
  for (int64_t r = 0; r < sums.size(0); ++r) {
    if (s[r] < (r == 0 ? 0 : s[r - 1]) || s[r] > indices.numel()) {
      FLASHINFER_THROW(ArgumentError) << OP << ": " << sums_name << " must ascend from 0 to at most " << indices.numel()
                                      << " (" << indices_name << ".numel()), got " << s[r] << " for rank " << r;
    }
  }
  for (int64_t i = 0; i < s[sums.size(0) - 1]; ++i) {
    if (x[i] < 0 || x[i] >= rows) {
      FLASHINFER_THROW(ArgumentError) << OP << ": " << indices_name << " must be in [0, " << rows << "), got " << x[i];
    }
  }
#endif
  return {s, x};
}

}  // namespace

int64_t moe_comm_slot_bytes() { return comm::FIFO_SLOT_BYTES; }

int64_t moe_comm_workspace_bytes(int64_t ep_size) {
  return comm::FIFO_SLOTS + ep_size * comm::FIFO_DEPTH * comm::FIFO_SLOT_BYTES;
}

/// `workspace`: [ranks][bytes]. `progress`: on the CPU 2 * ranks words of this call, zero at its begin.
int64_t moe_comm(TensorView input, TensorView send_sums, TensorView send_indices, TensorView output,
                 TensorView recv_sums, TensorView recv_indices, TensorView workspace, int64_t rank, TensorView progress,
                 bool resume, int64_t wait_us, int64_t max_blocks, int64_t timeout_ns, int64_t record) {
  Expect(OP, "all_workspaces", workspace).on_device().rank(2).dtype({dl_uint8}).last_dim_contiguous();
  const int64_t world = workspace.size(0);
  if (world < 1 || world > comm::MAX_EP || rank < 0 || rank >= world) {
    FLASHINFER_THROW(ArgumentError) << OP << ": ep_rank must be in [0, ep_size) and ep_size at most " << comm::MAX_EP
                                    << ", got " << rank << " and " << world;
  }
  if (workspace.size(1) < moe_comm_workspace_bytes(world)) {
    FLASHINFER_THROW(ArgumentError) << OP << ": all_workspaces must have at least " << moe_comm_workspace_bytes(world)
                                    << " bytes a rank, got " << workspace.size(1);
  }
  Expect(OP, "input", input).same_device(workspace, "all_workspaces").rank(2).contiguous();
  Expect(OP, "output", output).same_device(input, "input").same_dtype(input, "input").rank(2).contiguous();
  Expect(OP, "output", output).dim(1, input.size(1), "input.shape[1]").apart(input, "input");
  comm::FifoParams p{};
  p.row_bytes = input.size(1) * input.dtype().bits * input.dtype().lanes / 8;
  if (p.row_bytes % 16 != 0 || p.row_bytes == 0 || p.row_bytes > comm::FIFO_SLOT_BYTES) {
    FLASHINFER_THROW(ArgumentError) << OP << ": input must have rows of a positive multiple of 16 bytes, at most "
                                    << comm::FIFO_SLOT_BYTES << ", got " << p.row_bytes;
  }
  p.table.memory = static_cast<char*>(workspace.data_ptr());
  p.table.stride = workspace.stride(0);
  p.table.rank = int(rank);
  p.table.world = int(world);
  p.table.active = ~uint64_t{0};
  p.table.meta[comm::kDispatchFlags] = comm::FIFO_FILLED;
  p.table.meta[comm::kCombineFlags] = comm::FIFO_TAKEN;
  p.input = static_cast<const char*>(input.data_ptr());
  p.output = static_cast<char*>(output.data_ptr());
  p.input_rows = input.size(0);
  p.output_rows = output.size(0);
  p.sends = send_indices.numel();
  p.receives = recv_indices.numel();
  std::tie(p.send_sums, p.send_indices) = PartsOf("send", send_sums, send_indices, workspace, input.size(0));
  std::tie(p.recv_sums, p.recv_indices) = PartsOf("recv", recv_sums, recv_indices, workspace, output.size(0));
  Expect(OP, "progress", progress).dtype({dl_int64}).numel(2 * world).contiguous();
  p.progress = progress.data_ptr<int64_t>();
  p.wait.resume = resume;
  p.wait.wait_us = wait_us;
  p.wait.max_blocks = int32_t(max_blocks);
  p.wait.timeout_ns = uint64_t(timeout_ns);
  p.wait.record = reinterpret_cast<uint32_t*>(record);
#ifdef FLASHINFER_CPU
  return comm::MoeCommOnHost(p);
#else
  DeviceGuard guard(workspace.device());
  CheckStatus(OP, comm::MoeComm(p, get_stream(workspace.device())));
  return -1;
#endif
}
