// SPDX-License-Identifier: Apache-2.0
// Decode attention for C++ programs: include/ on the include path and cudart, nothing else (examples/header_only). A
// unit that includes this is no unit of a JIT module, whose variant has the same name.
//   test  pytest tests/cuda_compile/test_header_only.py
#pragma once
#include <cmath>

#include "variants.h"

namespace flashinfer {
template <bool use_custom_mask>
using Variant = DefaultAttention<use_custom_mask, false, false, false>;
}  // namespace flashinfer

#include "common/merge.cuh"
#include "decode/kernel.cuh"
#include "plan/single.h"

namespace flashinfer {

/// Keys and values are [kv_len, num_kv_heads, HEAD_DIM] or [num_kv_heads, kv_len, HEAD_DIM].
enum class QKVLayout : int32_t { kNHD = 0, kHND = 1 };

template <int HEAD_DIM, typename DType>
struct SingleDecodeParams : AttentionParams<DType, DType, DType> {
  static constexpr int HEAD_DIM_QK = HEAD_DIM, HEAD_DIM_VO = HEAD_DIM;
  static constexpr PosEncodingMode POS_ENCODING = PosEncodingMode::kNone;
  float sm_scale;
};

/// Bytes of `tmp` that a call on the current device can use.
template <int HEAD_DIM, typename DType>
int64_t SingleDecodeTmpBytes() {
  using Params = SingleDecodeParams<HEAD_DIM, DType>;
  constexpr int64_t SLOT_BYTES = attention::DECODE_TILE * (HEAD_DIM + 1) * int64_t(sizeof(float));
  return attention::MaxActiveDecodeBlocks<Params, false, false>() * SLOT_BYTES;
}

/// o = softmax(sm_scale q k^T) v for one token: q and o are [num_qo_heads, HEAD_DIM]. `tmp` is SingleDecodeTmpBytes() of
/// device memory for partial results, so that all multiprocessors take part, or null. sm_scale 0 means 1 / sqrt(HEAD_DIM).
/// lse, if not null, gets the base-2 logarithm of the sum of weights of each head.
template <int HEAD_DIM, typename DType>
cudaError_t SingleDecodeWithKVCache(const DType* q, const DType* k, const DType* v, DType* o, void* tmp,
                                    uint32_t num_qo_heads, uint32_t num_kv_heads, uint32_t kv_len,
                                    QKVLayout layout = QKVLayout::kNHD, cudaStream_t stream = nullptr,
                                    float sm_scale = 0.f, float* lse = nullptr) {
  static_assert(HEAD_DIM % 16 == 0 && HEAD_DIM <= 256, "HEAD_DIM is a multiple of 16 up to 256");
  using Params = SingleDecodeParams<HEAD_DIM, DType>;
  constexpr int TILE = attention::DECODE_TILE;
  constexpr int64_t SLOT_FLOATS = TILE * (HEAD_DIM + 1);
  if (num_kv_heads == 0 || num_kv_heads > INT16_MAX || num_qo_heads % num_kv_heads != 0 || kv_len > INT32_MAX) {
    return cudaErrorInvalidValue;
  }
  if (num_qo_heads == 0) return cudaSuccess;
  Params p{};
  p.q = const_cast<DType*>(q);
  p.k = const_cast<DType*>(k);
  p.v = const_cast<DType*>(v);
  p.o = o;
  p.lse = lse;
  p.q_stride_h = p.o_stride_h = HEAD_DIM;
  p.k_stride_n = p.v_stride_n = layout == QKVLayout::kNHD ? int64_t(num_kv_heads) * HEAD_DIM : HEAD_DIM;
  p.k_stride_h = p.v_stride_h = layout == QKVLayout::kNHD ? HEAD_DIM : int64_t(kv_len) * HEAD_DIM;
  p.qo_len = 1;
  p.kv_len = int32_t(kv_len);
  p.page_size = FastDivisor(1);
  p.kv_heads = FastDivisor(num_kv_heads);
  p.group = FastDivisor(num_qo_heads / num_kv_heads);
  p.num_qo_heads = int32_t(num_qo_heads);
  p.num_kv_heads = int32_t(num_kv_heads);
  p.window_left = -1;
  p.out_scale = p.lse_scale = 1.f;
  p.sm_scale = sm_scale != 0.f ? sm_scale : 1.f / std::sqrt(float(HEAD_DIM));

  const int64_t blocks = attention::MaxActiveDecodeBlocks<Params, false, false>();
  WorkList work =
      attention::PlanSingle(p.group.divisor, num_kv_heads, kv_len, TILE, blocks, tmp == nullptr ? 0 : blocks);
  work.partial_o = static_cast<float*>(tmp);
  if (tmp != nullptr) work.partial_lse = work.partial_o + work.blocks * (SLOT_FLOATS - TILE);
  const cudaError_t status = attention::LaunchDecode<Params, false, false>(p, work, false, stream);
  if (status != cudaSuccess || work.merge_blocks == 0) return status;
  return attention::LaunchMerge<Params, TILE>(p, work, false, stream);
}

}  // namespace flashinfer
