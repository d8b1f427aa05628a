// SPDX-License-Identifier: Apache-2.0
// Launchers of the one-sided exchange of tokens: argument checks, dtype dispatch, stream.
#include "tvm_ffi_utils.h"
// clang-format off
#include <flashinfer/comm/alltoall/params.h>
#ifdef FLASHINFER_CPU
#include <flashinfer/comm/alltoall/one_sided_cpu.h>
#endif
// clang-format on

namespace comm = flashinfer::comm;
using MaybeTensor = Optional<TensorView>;

namespace {

/// Table of a workspace [ranks][bytes], checked.
comm::ExchangeTable TableOf(const char* op, const TensorView& workspace, const TensorView& metainfo, int64_t rank,
                            uint64_t active) {
  Expect(op, "workspace", workspace).on_device().rank(2).dtype({dl_uint8}).last_dim_contiguous();
  Expect(op, "metainfo", metainfo)
      .rank(1)
      .dtype({dl_int64})
      .contiguous()
      .dim(0, comm::kMetaCount, "of moe_a2a_initialize");
  const int64_t world = workspace.size(0);
  if (world < 1 || world > comm::MAX_EP) {
    FLASHINFER_THROW(ArgumentError) << op << ": ep_size must be from 1 to " << comm::MAX_EP << ", got " << world;
  }
  if (rank < 0 || rank >= world) {
    FLASHINFER_THROW(ArgumentError) << op << ": ep_rank must be in [0, " << world << "), got " << rank;
  }
  comm::ExchangeTable t{};
  t.memory = static_cast<char*>(workspace.data_ptr());
  t.stride = workspace.stride(0);
  t.rank = int(rank);
  t.world = int(world);
  t.active = active;
  for (int i = 0; i < comm::kMetaCount; ++i) t.meta[i] = metainfo.data_ptr<int64_t>()[i];
  return t;
}

comm::ExchangeWait WaitOf(bool resume, int64_t wait_us, int64_t max_blocks, int64_t timeout_ns, int64_t record,
                          bool enable_pdl, DLDevice device) {
  comm::ExchangeWait wait{};
  wait.resume = resume;
  wait.wait_us = wait_us;
  wait.max_blocks = int32_t(max_blocks);
  wait.timeout_ns = uint64_t(timeout_ns);
  wait.record = reinterpret_cast<uint32_t*>(record);
  wait.enable_pdl = UsePdl(enable_pdl, device);
  return wait;
}

}  // namespace

int64_t moe_a2a_get_aux_data_size(int64_t ep_size, int64_t max_num_tokens, int64_t eplb_stats_num_experts) {
  int64_t meta[comm::kMetaCount];
  return comm::ExchangeOffsets(ep_size, max_num_tokens, eplb_stats_num_experts, meta);
}

void moe_a2a_offsets(TensorView metainfo, int64_t ep_size, int64_t max_num_tokens, int64_t eplb_stats_num_experts) {
  Expect("moe_a2a_initialize", "metainfo", metainfo).dtype({dl_int64}).numel(comm::kMetaCount);
  int64_t meta[comm::kMetaCount];
  comm::ExchangeOffsets(ep_size, max_num_tokens, eplb_stats_num_experts, meta);
  for (int i = 0; i < comm::kMetaCount; ++i) metainfo.data_ptr<int64_t>()[i] = meta[i];
}

/// `offsets`: of the receive buffers in the memory of a rank. Returns the outcome of the CPU form, -1 on CUDA.
int64_t moe_a2a_dispatch(TensorView experts, MaybeTensor payload0, MaybeTensor payload1, MaybeTensor payload2,
                         MaybeTensor payload3, MaybeTensor payload4, MaybeTensor payload5, TensorView offsets,
                         TensorView workspace, TensorView metainfo, int64_t ep_rank, int64_t num_experts, int64_t rows,
                         int64_t layout, int64_t active, MaybeTensor eplb_stats, bool resume, int64_t wait_us,
                         int64_t max_blocks, int64_t timeout_ns, int64_t record, bool enable_pdl) {
  constexpr const char* OP = "moe_a2a_dispatch";
  comm::DispatchParams p{};
  p.table = TableOf(OP, workspace, metainfo, ep_rank, uint64_t(active));
  Expect(OP, "token_selected_experts", experts)
      .same_device(workspace, "workspace")
      .rank(2)
      .dtype({dl_int32})
      .contiguous();
  const int64_t tokens = experts.size(0), top_k = experts.size(1);
  if (top_k < 1 || top_k > comm::MAX_TOP_K) {
    FLASHINFER_THROW(ArgumentError) << OP << ": top_k must be from 1 to " << comm::MAX_TOP_K << ", got " << top_k;
  }
  if (num_experts < p.table.world) {
    FLASHINFER_THROW(ArgumentError) << OP << ": num_experts must be at least ep_size " << p.table.world << ", got "
                                    << num_experts;
  }
  if (rows < 1 || rows > p.table.meta[comm::kMaxTokens]) {
    FLASHINFER_THROW(ArgumentError) << OP
                                    << ": runtime_max_tokens_per_rank must be from 1 to the max_num_tokens of the "
                                    << "workspace, " << p.table.meta[comm::kMaxTokens] << ", got " << rows;
  }
  if (tokens > rows) {
    FLASHINFER_THROW(ArgumentError) << OP << ": token_selected_experts must have at most runtime_max_tokens_per_rank "
                                    << "rows, " << rows << ", got " << tokens;
  }
  const MaybeTensor* const payloads[comm::MAX_PAYLOADS] = {&payload0, &payload1, &payload2,
                                                           &payload3, &payload4, &payload5};
  int64_t count = 0;
  while (count < comm::MAX_PAYLOADS && payloads[count]->has_value()) ++count;
  Expect(OP, "offsets", offsets).dtype({dl_int64}).numel(count);
  p.num_payloads = int32_t(count);
  for (int64_t i = 0; i < count; ++i) {
    const TensorView x = payloads[i]->value();
    const std::string name = "input_payloads[" + std::to_string(i) + "]";
    Expect(OP, name.c_str(), x).same_device(workspace, "workspace").rank(2).contiguous();
    Expect(OP, name.c_str(), x).dim(0, tokens, "token_selected_experts.shape[0]");
    const int64_t row_bytes = x.size(1) * x.dtype().bits * x.dtype().lanes / 8;
    const int64_t offset = offsets.data_ptr<int64_t>()[i];
    if (offset + p.table.world * rows * row_bytes > workspace.size(1)) {
      FLASHINFER_THROW(ArgumentError) << OP << ": input_payloads must fit in the workspace (" << workspace.size(1)
                                      << " bytes a rank), got " << offset + p.table.world * rows * row_bytes
                                      << " bytes";
    }
    p.payloads[i] = {static_cast<const char*>(x.data_ptr()), row_bytes, offset};
  }
  if (eplb_stats.has_value()) {
    const TensorView stats = eplb_stats.value();
    Expect(OP, "eplb_local_stats", stats).same_device(workspace, "workspace").rank(1).dtype({dl_int32}).contiguous();
    Expect(OP, "eplb_local_stats", stats).dim(0, p.table.meta[comm::kEplbExperts], "eplb_stats_num_experts");
    p.eplb_stats = stats.data_ptr<int32_t>();
  }
  p.experts = experts.data_ptr<int32_t>();
  p.tokens = int32_t(tokens);
  p.top_k = int32_t(top_k);
  p.num_experts = int32_t(num_experts);
  p.request = {uint32_t(rows), uint32_t(layout)};
  p.wait = WaitOf(resume, wait_us, max_blocks, timeout_ns, record, enable_pdl, workspace.device());
#ifdef FLASHINFER_CPU
  return comm::DispatchOnHost(p);
#else
  DeviceGuard guard(workspace.device());
  CheckStatus(OP, comm::Dispatch(p, get_stream(workspace.device())));
  return -1;
#endif
}

void moe_a2a_sanitize_expert_ids(TensorView expert_ids, TensorView workspace, TensorView metainfo, int64_t ep_rank,
                                 int64_t invalid_expert_id, bool enable_pdl) {
  constexpr const char* OP = "moe_a2a_sanitize_expert_ids";
  comm::SanitizeParams p{};
  p.table = TableOf(OP, workspace, metainfo, ep_rank, ~uint64_t{0});
  Expect(OP, "expert_ids", expert_ids).same_device(workspace, "workspace").rank(3).dtype({dl_int32}).contiguous();
  Expect(OP, "expert_ids", expert_ids).dim(0, p.table.world, "ep_size");
  p.ids = expert_ids.data_ptr<int32_t>();
  p.rows = expert_ids.size(1);
  p.top_k = expert_ids.size(2);
  p.invalid = int32_t(invalid_expert_id);
  p.enable_pdl = UsePdl(enable_pdl, workspace.device());
  DeviceGuard guard(workspace.device());
  CheckStatus(OP, comm::SanitizeExpertIds(p, get_stream(workspace.device())));
}

int64_t moe_a2a_combine(TensorView payload, TensorView output, TensorView workspace, TensorView metainfo,
                        int64_t ep_rank, int64_t top_k, int64_t offset, bool is_in_place, bool is_e4m3, int64_t active,
                        bool resume, int64_t wait_us, int64_t max_blocks, int64_t timeout_ns, int64_t record,
                        bool enable_pdl) {
  constexpr const char* OP = "moe_a2a_combine";
  const comm::ExchangeTable table = TableOf(OP, workspace, metainfo, ep_rank, uint64_t(active));
  Expect(OP, "payload", payload).same_device(workspace, "workspace").rank(3).contiguous();
  Expect(OP, "payload", payload).dtype({dl_float16, dl_bfloat16, dl_float32}).dim(0, table.world, "ep_size");
  Expect(OP, "output", output).same_device(payload, "payload").same_dtype(payload, "payload").rank(2).contiguous();
  const int64_t rows = payload.size(1), hidden = payload.size(2), element = payload.dtype().bits / 8;
  Expect(OP, "output", output).dim(1, hidden, "payload.shape[2]");
  if (hidden * element % 16 != 0) {
    FLASHINFER_THROW(ArgumentError) << OP << ": payload must have rows of a multiple of 16 bytes, got "
                                    << hidden * element << " bytes";
  }
  if (output.size(0) > rows || rows > table.meta[comm::kMaxTokens]) {
    FLASHINFER_THROW(ArgumentError) << OP << ": payload must have at least " << output.size(0) << " rows per rank "
                                    << "(local_num_tokens) and at most " << table.meta[comm::kMaxTokens]
                                    << " (max_num_tokens), got " << rows;
  }
  if (offset < table.meta[comm::kPayload] || offset + table.world * rows * hidden * element > workspace.size(1)) {
    FLASHINFER_THROW(ArgumentError) << OP << ": payload must fit in the workspace (" << workspace.size(1)
                                    << " bytes a rank), got " << table.world * rows * hidden * element << " bytes from "
                                    << offset << " on";
  }
  const char* const place = table.Of(table.rank) + offset;
  if (is_in_place && payload.data_ptr() != place) {
    FLASHINFER_THROW(ArgumentError) << OP << ": payload must be at combine_payload_offset of the workspace with "
                                    << "payload_in_workspace, got another address";
  }
  if (is_e4m3 && encode_dlpack_dtype(payload.dtype()) != encode_dlpack_dtype(dl_bfloat16)) {
    FLASHINFER_THROW(ArgumentError) << OP << ": payload must be bfloat16 with use_low_precision, got "
                                    << payload.dtype();
  }
  int64_t outcome = -1;
  DeviceGuard guard(workspace.device());
  DispatchFloat(payload.dtype(), [&](auto tag) {
    using T = typename decltype(tag)::type;
    comm::CombineParams<T> p{};
    p.table = table;
    p.wait = WaitOf(resume, wait_us, max_blocks, timeout_ns, record, enable_pdl, workspace.device());
    p.payload = payload.data_ptr() == place ? nullptr : payload.data_ptr<T>();
    p.offset = offset;
    p.rows = rows;
    p.hidden = hidden;
    p.tokens = int32_t(output.size(0));
    p.top_k = int32_t(top_k);
    p.is_e4m3 = is_e4m3;
    p.out = output.data_ptr<T>();
#ifdef FLASHINFER_CPU
    outcome = comm::CombineOnHost<T>(p);
#else
    CheckStatus(OP, comm::Combine<T>(p, get_stream(workspace.device())));
#endif
  });
  return outcome;
}

/// Exchange the parts of rows [begin, end) of tensors [rows][cp][...]. With `out_stats` they are stored as they are, else
/// they are merged into `out_o` [rows][...] by their LSE.
int64_t decode_cp_exchange(TensorView o, TensorView stats, TensorView out_o, MaybeTensor out_stats,
                           TensorView workspace, int64_t cp_rank, int64_t begin, int64_t end, bool is_base_e,
                           bool resume, int64_t wait_us, int64_t max_blocks, int64_t timeout_ns, int64_t record,
                           bool enable_pdl) {
  const char* const OP = out_stats.has_value() ? "decode_cp_a2a_alltoall" : "decode_cp_a2a_lse_reduce";
  Expect(OP, "workspace", workspace).on_device().rank(2).dtype({dl_uint8}).last_dim_contiguous();
  const int64_t world = workspace.size(0);
  Expect(OP, "partial_o", o).same_device(workspace, "workspace").rank(3).dtype({dl_float16, dl_bfloat16}).contiguous();
  Expect(OP, "partial_o", o).dim(1, world, "cp_size");
  Expect(OP, "statistics", stats).same_device(o, "partial_o").rank(3).dtype({dl_float32}).contiguous();
  Expect(OP, "statistics", stats).dim(0, o.size(0), "partial_o.shape[0]").dim(1, world, "cp_size");
  comm::DecodeCpParams p{};
  p.o_bytes = o.size(2) * 2;
  p.stats_bytes = stats.size(2) * 4;
  if (p.o_bytes % 16 != 0) {
    FLASHINFER_THROW(ArgumentError) << OP << ": partial_o must have rows of a multiple of 16 bytes, got " << p.o_bytes;
  }
  Expect(OP, "out", out_o).same_device(o, "partial_o").same_dtype(o, "partial_o").contiguous().apart(o, "partial_o");
  Expect(OP, "out", out_o).numel(out_stats.has_value() ? o.numel() : o.size(0) * o.size(2));
  if (out_stats.has_value()) {
    const TensorView x = out_stats.value();
    Expect(OP, "out statistics", x).same_device(o, "partial_o").dtype({dl_float32}).contiguous().numel(stats.numel());
  }
  p.table.memory = static_cast<char*>(workspace.data_ptr());
  p.table.stride = workspace.stride(0);
  p.table.rank = int(cp_rank);
  p.table.world = int(world);
  p.table.active = ~uint64_t{0};
  p.table.meta[comm::kDispatchFlags] = sizeof(comm::ExchangeHead);
  p.slots = (int64_t(sizeof(comm::ExchangeHead)) + 8 * world + 15) / 16 * 16;
  p.slot_bytes = (workspace.size(1) - p.slots) / (2 * world) / 16 * 16;
  p.rows = end - begin;
  if (begin < 0 || end > o.size(0) || p.rows * (p.o_bytes + p.stats_bytes) > p.slot_bytes) {
    FLASHINFER_THROW(ArgumentError) << OP << ": partial_o must have rows that fit in the workspace ("
                                    << p.slot_bytes / (p.o_bytes + p.stats_bytes) << "), got " << p.rows;
  }
  p.o = static_cast<const char*>(o.data_ptr()) + begin * world * p.o_bytes;
  p.stats = static_cast<const char*>(stats.data_ptr()) + begin * world * p.stats_bytes;
  const int64_t parts = out_stats.has_value() ? world : 1;
  p.out_o = static_cast<char*>(out_o.data_ptr()) + begin * parts * p.o_bytes;
  if (out_stats.has_value()) {
    p.out_stats = static_cast<char*>(out_stats.value().data_ptr()) + begin * world * p.stats_bytes;
  }
  p.is_base_e = is_base_e;
  uint64_t digest = 0;
  for (int64_t x :
       {o.size(0), begin, p.o_bytes, p.stats_bytes, int64_t(out_stats.has_value()), int64_t(o.dtype().code)}) {
    digest = (digest + uint64_t(x)) * 0x9E3779B97F4A7C15ull;  // the top bits depend on all
  }
  p.request = uint16_t(digest >> 48);
  p.wait = WaitOf(resume, wait_us, max_blocks, timeout_ns, record, enable_pdl, workspace.device());
  int64_t outcome = -1;
  DeviceGuard guard(workspace.device());
  const bool is_half = encode_dlpack_dtype(o.dtype()) == encode_dlpack_dtype(dl_float16);
#ifdef FLASHINFER_CPU
  outcome = is_half ? comm::DecodeCpOnHost<flashinfer::float16_t>(p) : comm::DecodeCpOnHost<flashinfer::bfloat16_t>(p);
#else
  const auto stream = get_stream(workspace.device());
  CheckStatus(OP, is_half ? comm::DecodeCpExchange<flashinfer::float16_t>(p, stream)
                          : comm::DecodeCpExchange<flashinfer::bfloat16_t>(p, stream));
#endif
  return outcome;
}
