// SPDX-License-Identifier: Apache-2.0
// Records: a checked call that its caller keeps. A later call with the same plan, tables and parameters gives q, k, v,
// o and lse only, which is most of what a call costs on the host.
#pragma once
#include <cstring>

#include "attention_launch.h"
#include "attention_check_pages.h"

namespace flashinfer {
namespace attention {

/// Record of a call: plain bytes that live in a tensor of the caller.
struct Record {
  int64_t bytes;  ///< sizeof(Record) once it was written
  CheckedCall call;
  bool is_capturable;
};
static_assert(std::is_trivially_copyable_v<Record>, "kept as bytes");

/// Address of a record: a CPU tensor of bytes, large enough.
inline void* RecordAddress(const char* op, const TensorView& t, int64_t bytes = sizeof(Record)) {
  if (t.device().device_type != kDLCPU || t.numel() < bytes || t.dtype().bits != 8) {
    FLASHINFER_THROW(ArgumentError) << op << ": record must have " << bytes << " bytes on the CPU, got " << t.numel()
                                    << " elements";
  }
  return t.data_ptr();
}

inline void WriteRecord(void* to, const CheckedCall& call, bool is_capturable) {
  const Record record{sizeof(Record), call, is_capturable};
  std::memcpy(to, &record, sizeof(Record));
}

inline Record ReadRecord(const char* op, const TensorView& from) {
  Record record;
  std::memcpy(&record, RecordAddress(op, from), sizeof(Record));
  if (record.bytes != sizeof(Record)) {
    FLASHINFER_THROW(ArgumentError) << op << ": the record must be what record_run wrote, got an empty one";
  }
  return record;
}

/// Takes the first two arguments of a function that records: the record, and whether repetitions may be captured.
class Recorder {
 public:
  explicit Recorder(Arguments& args)
      : to_(RecordAddress(args.function(), args.Next<TensorView>())), is_capturable_(args.Next<bool>()) {}

  void Keep(const CheckedCall& call) const { WriteRecord(to_, call, is_capturable_); }

 private:
  void* const to_;
  const bool is_capturable_;
};

/// Keys or values as pages, in any form that a cache has: half of a tensor that holds both, with or without the
/// dimension of a page's tokens.
class Pages {
 public:
  /// `half` is 0 for keys and 1 for values of a tensor of both, -1 for a tensor of one.
  Pages(const TensorView& t, int half, int64_t layout) {
    const int rank = half < 0 ? t.ndim() : t.ndim() - 1;
    if ((rank != 3 && rank != 4) || (half >= 0 && t.size(1) != 2)) {
      FLASHINFER_THROW(ArgumentError) << "the cache must have pages in 3 to 5 dimensions, got " << t.ndim();
    }
    const int one = rank == 4 ? -1 : layout == 0 ? 1 : 2;  // where a page's only token goes
    for (int from = 0, to = 0; to < 4; ++to) {
      if (to == one) {
        shape_[to] = strides_[to] = 1;
        continue;
      }
      shape_[to] = t.size(from);
      strides_[to] = t.stride(from);
      from += from == 0 && half >= 0 ? 2 : 1;
    }
    view_.data = t.data_ptr();
    if (half > 0) view_.data = static_cast<char*>(view_.data) + t.stride(1) * ((t.dtype().bits + 7) / 8);
    view_.device = t.device();
    view_.ndim = 4;
    view_.dtype = t.dtype();
    view_.shape = shape_;
    view_.strides = strides_;
  }
  Pages(const Pages&) = delete;

  TensorView view() const { return TensorView(tvm::ffi::TensorView(&view_)); }

 private:
  int64_t shape_[4], strides_[4];
  DLTensor view_{};
};

inline void RefuseCapture(const char* op, Stream stream) {
#ifndef FLASHINFER_CPU
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  if (cudaStreamIsCapturing(stream, &status) != cudaSuccess || status != cudaStreamCaptureStatusNone) {
    FLASHINFER_THROW(ArgumentError)
        << op << ": the record must be one for captures, got another while a CUDA graph is captured";
  }
#endif
}

/// Arguments of a repeated call besides the record: q, k, v | None, o, lse | None, sm_scale, enable_pdl. Without v, k
/// holds both.
struct Repetition {
  TensorView q, k;
  Optional<TensorView> v;
  TensorView o;
  Optional<TensorView> lse;
  double sm_scale;
  bool enable_pdl;

  explicit Repetition(Arguments& args)
      : q(args.Next<TensorView>()),
        k(args.Next<TensorView>()),
        v(args.Next<Optional<TensorView>>()),
        o(args.Next<TensorView>()),
        lse(args.Next<Optional<TensorView>>()),
        sm_scale(args.Next<double>()),
        enable_pdl(args.Next<bool>()) {}
};
constexpr int REPETITION_ARGUMENTS = 7;

/// Replace the tensors of a recorded call by others of equal shapes. Any other difference is an error, after which the
/// caller makes the whole call.
template <typename P = Params>
void GiveTensors(const char* op, Record& record, const Repetition& given, bool same_strides) {
  const auto& [q, k, v, o, lse, sm_scale, enable_pdl] = given;
  CheckedCall& call = record.call;
  if (!call.is_paged && !v.has_value()) FLASHINFER_THROW(ArgumentError) << op << ": v must be a tensor, got None";
  P& p = call.params;
  const P before = p;
  Expect(op, "q", q).rank(3);
  p.lse = nullptr;
  SetQueries(p, op, q, o, lse);
  if (lse.has_value()) Expect(op, "lse", *lse).rank(2).dim(0, q.size(0), "q.shape[0]");
  if (call.is_paged) {
    const Pages keys(k, v.has_value() ? -1 : 0, call.layout);
    const Pages values(v.has_value() ? *v : k, v.has_value() ? -1 : 1, call.layout);
    SetKeys(p, op, q, o, keys.view(), values.view(), call.layout, true);
  } else {
    SetKeys(p, op, q, o, k, *v, call.layout, false);
  }
  if constexpr (HasScale<P>::value) p.sm_scale = sm_scale;
  call.enable_pdl = enable_pdl;
  if (!SameDevice(q.device(), call.device) || q.size(0) != call.rows || p.num_qo_heads != before.num_qo_heads ||
      p.num_kv_heads != before.num_kv_heads || p.kv_len != before.kv_len ||
      (same_strides &&
       (p.k_stride_page != p.v_stride_page || p.k_stride_n != p.v_stride_n || p.k_stride_h != p.v_stride_h))) {
    FLASHINFER_THROW(ArgumentError) << op << ": tensors must have the shapes that were recorded, got others";
  }
  if (!record.is_capturable) RefuseCapture(op, get_stream(call.device));
}

/// rerun(record, *what a Repetition takes): the call of the record with these tensors.
inline CheckedCall Repeat(const char* op, Arguments& args, bool same_strides) {
  args.ExpectLast(1 + REPETITION_ARGUMENTS);
  Record record = ReadRecord(op, args.Next<TensorView>());
  GiveTensors(op, record, Repetition(args), same_strides);
  return record.call;
}

/// The first arguments of replan: a record, and another plan and page table for its call.
struct Replanned {
  TensorView memory, float_ws, int_ws;
  PlanInfo info;
  TensorView kv_indptr, kv_indices, last_page_len;

  Replanned(const char* op, Arguments& args)
      : memory(args.Next<TensorView>()),
        float_ws(args.Next<TensorView>()),
        int_ws(args.Next<TensorView>()),
        info(ReadPlan(op, args.Next<Numbers>())),
        kv_indptr(args.Next<TensorView>()),
        kv_indices(args.Next<TensorView>()),
        last_page_len(args.Next<TensorView>()) {}

  /// The call of the record with this plan, this table of `batch_size` requests and these tensors.
  CheckedCall Call(const char* op, Record& record, const Repetition& given, int64_t batch_size,
                   bool same_strides) const {
    record.call.rows = int32_t(given.q.size(0));  // rows of the plan; the caller has checked them
    GiveTensors(op, record, given, same_strides);
    const CheckedCall& before = record.call;
    Params p = before.params;
    if (p.qo_indptr != nullptr) p.qo_len = before.rows;  // tensor maps of queries end there
    p.kv_indptr = Indices(op, "kv_indptr", kv_indptr, given.q, batch_size + 1);
    p.kv_indices = Indices(op, "kv_indices", kv_indices, given.q, 0);
    p.last_page_len = Indices(op, "kv_last_page_len", last_page_len, given.q, batch_size);
    CheckPageIds(op, p, batch_size, kv_indices.size(0), given.k.size(0));
    CheckedCall call = CallOf(op, p, info, float_ws, int_ws, given.q);
    call.layout = before.layout;
    call.is_paged = before.is_paged;
    call.all_masked = before.all_masked;
    call.enable_pdl = before.enable_pdl;
    return call;
  }
};
constexpr int REPLANNED_ARGUMENTS = 7;

}  // namespace attention
}  // namespace flashinfer
