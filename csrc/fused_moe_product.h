// SPDX-License-Identifier: Apache-2.0
// Products of a mixture of experts on CUDA: calls of the function that a GEMM module exports. The module for SM90 takes
// a description of the product, because its checks would repeat those of fused_moe.cu; the general one takes views. Those
// for four-bit weights take a description with their scales.
#pragma once
#include "fused_moe_arguments.h"
// clang-format off
#include <flashinfer/gemm/w4_sm90/choose.h>
// clang-format on

namespace moe_arguments {

/// A tensor argument on the stack.
class View {
 public:
  View(const void* data, DLDataType dtype, DLDevice device, std::initializer_list<int64_t> shape,
       std::initializer_list<int64_t> strides) {
    int32_t rank = 0;
    for (int64_t size : shape) shape_[rank++] = size;
    rank = 0;
    for (int64_t stride : strides) strides_[rank++] = stride;
    tensor_ = {const_cast<void*>(data), device, rank, dtype, shape_, strides_, 0};
  }
  View(const View&) = delete;  // the tensor points to members
  View& operator=(const View&) = delete;
  DLTensor* get() { return &tensor_; }

 private:
  int64_t shape_[3], strides_[3];
  DLTensor tensor_;
};

inline DLDataType DtypeOf(Element x) {
  switch (x) {
    case Element::kFloat32:
      return dl_float32;
    case Element::kFloat16:
      return dl_float16;
    case Element::kBFloat16:
      return dl_bfloat16;
    default:
      return dl_float8_e4m3fn;
  }
}

/// Rows of fc1 up to which GEMM 1 gathers its tokens: three tiles. Each tile reads the tokens again, by copies of 16
/// bytes, which take longer than loads of copied rows.
constexpr int64_t GATHERED_FC1_ROWS = 768;

/// Enqueues the products of a layer: rows grouped by expert (packed), offsets on the device.
class GroupedProduct {
 public:
  GroupedProduct(const Tensors& tensors, const LayerSizes& sizes, const void* const* scales,
                 const Optional<tvm::ffi::Function>& product, bool use_sm90, bool enable_pdl)
      : x_(tensors), s_(sizes), scales_(scales), product_(product), use_sm90_(use_sm90), enable_pdl_(enable_pdl) {
    if (!product_.has_value()) Refuse("product must be the function of a GEMM module, got None");
  }

  /// Enqueue GEMM 1 and the activation as one kernel. Returns false if the activation must be a kernel of its own.
  bool MultiplyAndActivate(const Operand& a, const SortedPairs& pairs, const Sums& sums,
                           const ActivationParams& activation, const Operand& to) const {
    if (s_.has_sums1 && !ActivatesBlocks(activation.type)) return false;
    flashinfer::gemm::W4Problem p = ActivatedProblem(a, pairs, sums, activation, to);
    EnqueueSm90(&p, 1);
    return true;
  }

  /// Enqueue the same with rows that the kernel gathers from the tokens, which are quantised once each. `tokens`: the copies
  /// that this saves. Returns false if rows must be copied.
  bool GatherAndActivate(const PermuteParams& tokens, const Sums& sums, const ActivationParams& activation,
                         const Operand& to, flashinfer::Stream stream) const {
    const Operand& a = tokens.output;
    constexpr int64_t ALIGNMENT = 16;  // bytes of a load of the quantiser
    if (!ActivatesBlocks(activation.type) || !HasManyRows() || s_.fc1_rows() > GATHERED_FC1_ROWS) return false;
    if (a.columns % flashinfer::gemm::SCALE_BLOCK != 0) return false;
    if (tokens.input_stride * ElementBytes(tokens.element) % ALIGNMENT != 0) return false;
    CheckStatus(OP, QuantizeTokens(tokens, stream));
    flashinfer::gemm::W4Problem p = ActivatedProblem(a, tokens.pairs, sums, activation, to);
    p.row_indices = tokens.pairs.row_to_pair, p.row_divisor = tokens.pairs.top_k;
    EnqueueSm90(&p, 1);
    return true;
  }

  /// Enqueue a product. Factors of experts and rows that it has applied are removed from `d`.
  void Multiply(const Operand& a, int index, const SortedPairs& pairs, Sums* d) const {
    if (!use_sm90_) {
      MultiplyGeneral(a, index, pairs, *d);
      return;
    }
    flashinfer::gemm::W4Problem p = ProblemOf(a, index, pairs, d->columns);
    p.d = d->data, p.d_stride = p.n, p.out = d->element;
    p.weight_factors = d->expert_factor;
    d->expert_factor = nullptr;
    if (d->row_factor != nullptr) p.a_scale = {d->row_factor};
    d->row_factor = nullptr;
    EnqueueSm90(&p, index);
  }

 private:
  /// Return true if experts have rows for tiles of 128 tokens.
  bool HasManyRows() const { return s_.expected_pairs() >= 128 * s_.num_experts; }

  /// Return true if GEMM 1 quantises hidden values by blocks.
  bool ActivatesBlocks(ActivationType type) const {
    return use_sm90_ && s_.format == Format::kFp8Block && s_.intermediate % flashinfer::gemm::SCALE_BLOCK == 0 &&
           (type == ActivationType::kSwiglu || type == ActivationType::kSwigluBias);
  }

  /// Describe GEMM 1 of the SM90 module with the activation of its sums.
  flashinfer::gemm::W4Problem ActivatedProblem(const Operand& a, const SortedPairs& pairs, const Sums& sums,
                                               const ActivationParams& activation, const Operand& to) const {
    flashinfer::gemm::W4Problem p = ProblemOf(a, 1, pairs, sums.columns);
    p.d = to.data, p.d_stride = to.columns, p.out = to.element;
    flashinfer::gemm::GatedActivation& gate = p.activation;
    gate.is_active = true;
    if (activation.type == ActivationType::kSwigluBias) {
      gate.alpha = activation.alpha, gate.beta = activation.beta, gate.limit = activation.limit;
    }
    gate.factor = sums.expert_factor;
    gate.bias = sums.bias, gate.is_bias_half = sums.bias_element == Element::kFloat16;
    gate.quantizer = to.factor, gate.is_quantizer_of_group = to.is_factor_of_expert;
    gate.scales = to.scales, gate.scale_stride = to.scale_stride;
    return p;
  }

  const void* WeightsOf(int index) const { return (index == 1 ? x_.fc1 : x_.fc2).data_ptr(); }

  /// Describe a product of the SM90 module, but for its results.
  flashinfer::gemm::W4Problem ProblemOf(const Operand& a, int index, const SortedPairs& pairs, int64_t columns) const {
    flashinfer::gemm::W4Problem p;
    p.codes_scales = IsPacked(s_.format) ? scales_[index - 1] : nullptr;
    p.a = a.data, p.b = WeightsOf(index);
    p.m = s_.pairs(), p.expected_rows = s_.expected_pairs(), p.n = columns, p.k = a.columns;
    p.batch = p.weights = s_.num_experts;
    p.a_stride = p.b_stride = p.k;
    p.b_batch_stride = p.n * p.k;
    p.grouping = flashinfer::gemm::Grouping::kPacked, p.groups = pairs.expert_offsets;
    p.tile_counter = pairs.tile_counters == nullptr ? nullptr : pairs.tile_counters + (index - 1);
    if (s_.format == Format::kFp8Block) {
      const int64_t depth = (p.k + 127) / 128, blocks = (p.n + 127) / 128;
      p.a_scale = {a.scales, 0, 1, a.scale_stride, 1};
      p.b_scale = {static_cast<const float*>(scales_[index - 1]), blocks * depth, depth, 1, 128};
    }
    return p;
  }

  /// Weights and offsets of GEMM 2 are older than the kernel before it, which is not the sort: it loads weights early.
  void EnqueueSm90(flashinfer::gemm::W4Problem* p, int index) const {
    void* const problem = IsPacked(s_.format) ? static_cast<void*>(p) : static_cast<flashinfer::gemm::GemmProblem*>(p);
    product_.value()(problem, x_.input.device().device_id, enable_pdl_, index == 2);
  }

  void MultiplyGeneral(const Operand& a, int index, const SortedPairs& pairs, const Sums& d) const {
    const DLDevice device = x_.input.device();
    const int64_t rows = s_.pairs(), k = a.columns, n = d.columns, e = s_.num_experts;
    View out(d.data, DtypeOf(d.element), device, {rows, n}, {n, 1});
    View tokens(a.data, DtypeOf(a.element), device, {rows, k}, {k, 1});
    View weights(WeightsOf(index), DtypeOf(a.element), device, {e, n, k}, {n * k, k, 1});
    View groups(pairs.expert_offsets, dl_int32, device, {e + 1}, {1});
    constexpr int PACKED = 3;  // Grouping::kPacked
    product_.value()(out.get(), tokens.get(), weights.get(), nullptr, nullptr, nullptr, groups.get(), nullptr, PACKED,
                     1, 128, 128, 1.0, 0.0, enable_pdl_);
  }

  const Tensors& x_;
  const LayerSizes& s_;
  const void* const* scales_;
  const Optional<tvm::ffi::Function>& product_;
  bool use_sm90_, enable_pdl_;
};

}  // namespace moe_arguments
