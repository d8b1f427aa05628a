// SPDX-License-Identifier: Apache-2.0
// Launcher of the SM90 GEMM kernels: checks, the choice of a tile, stream. One module has the kernels of one element
// type and scaling, listed in gemm_sm90_config.inc.
#include <tvm/ffi/container/map.h>

#include "stream_memory.h"
// clang-format off
#include <flashinfer/gemm/sm90/choose.h>
#include <flashinfer/quantize_1x128.h>
#include <flashinfer/device/sm_count.h>
#include "gemm_sm90_config.inc"
// clang-format on

using namespace flashinfer::gemm;

namespace {

constexpr int TILE_COUNT = sizeof(TILES) / sizeof(TILES[0]);
const char* const OP = "gemm_sm90";

DLDataType ElementDtype() {
  if (std::is_same_v<Element, flashinfer::bfloat16_t>) return dl_bfloat16;
  return std::is_same_v<Element, flashinfer::float16_t> ? dl_float16 : dl_float8_e4m3fn;
}

bool TakesBulkCopies(const TensorView& x) {
  return flashinfer::gemm::TakesBulkCopies(x.data_ptr(), x.dtype().bits / 8, x.ndim(), x.shape().data(),
                                           x.strides().data());
}

bool HasDtype(const TensorView& x, DLDataType dtype) {
  return encode_dlpack_dtype(x.dtype()) == encode_dlpack_dtype(dtype);
}

/// Return true if the kernels of this module take the dtypes and layouts of the operands. `tokens`: the dtype of a.
bool Serves(const TensorView& out, const TensorView& a, const TensorView& b, const Optional<TensorView>& bias,
            DLDataType tokens = ElementDtype()) {
  if (!HasDtype(a, tokens) || !HasDtype(b, ElementDtype())) return false;
  if (bias.has_value() && !HasDtype(bias.value(), dl_bfloat16)) return false;
  if (HasDtype(out, dl_float32)) {
    // Tensor cores keep 13 bits of sums of 8-bit products; the general kernel sums in fp32.
    if (ElementDtype().bits == 8) return false;
  } else if (!HasDtype(out, dl_bfloat16) && !HasDtype(out, dl_float16)) {
    return false;
  }
  const bool has_rows = a.ndim() >= 2 && b.ndim() >= 2 && out.ndim() >= 2;
  return has_rows && a.size(-1) > 0 && TakesBulkCopies(a) && TakesBulkCopies(b) && TakesBulkCopies(out);
}

void CheckMatrix(const char* name, const TensorView& x, int64_t rows, int64_t columns) {
  const int last = x.ndim() - 1;
  Expect(OP, name, x).dim(last - 1, rows, "rows").dim(last, columns, "columns");
}

/// Strides of a (rows, columns) or (batch, rows, columns) tensor.
int64_t RowStride(const TensorView& x) { return x.stride(x.ndim() - 2); }
int64_t BatchStride(const TensorView& x) { return x.ndim() == 3 ? x.stride(0) : 0; }

/// Validate block scales, logically (batch, rows, k blocks) with any strides, and return a view.
ScaleView BlockScale(const char* name, const TensorView& x, const TensorView& of, int64_t rows, int64_t k,
                     int rows_per_scale) {
  Expect(OP, name, x).same_device(of, "a").dtype({dl_float32}).rank(of.ndim());
  const int last = x.ndim() - 1;
  const int64_t expected = (rows + rows_per_scale - 1) / rows_per_scale;
  Expect(OP, name, x).dim(last - 1, expected, rows_per_scale == 1 ? "rows" : "blocks of 128 rows");
  Expect(OP, name, x).dim(last, (k + SCALE_BLOCK - 1) / SCALE_BLOCK, "blocks of 128 of K");
  return {x.data_ptr<float>(), BatchStride(x), RowStride(x), x.stride(last), rows_per_scale};
}

ScaleView TensorScaleOf(const char* name, const Optional<TensorView>& x, const TensorView& a) {
  ScaleView view;
  if (!x.has_value()) return view;
  Expect(OP, name, x.value()).same_device(a, "a").dtype({dl_float32}).numel(1);
  view.data = x.value().data_ptr<float>();
  return view;
}

void FillScales(GemmProblem* p, const TensorView& a, const TensorView& b, const Optional<TensorView>& a_scale,
                const Optional<TensorView>& b_scale, int64_t scale_rows) {
  if constexpr (SCALING == Scaling::kBlock) {
    p->a_scale = BlockScale("a_scale", a_scale.value(), a, p->m, p->k, 1);
    p->b_scale = BlockScale("b_scale", b_scale.value(), b, p->n, p->k, int(scale_rows));
  } else {
    p->a_scale = TensorScaleOf("a_scale", a_scale, a);
    p->b_scale = TensorScaleOf("b_scale", b_scale, a);
  }
}

void FillGroups(GemmProblem* p, const TensorView& a, const TensorView& b, const Optional<TensorView>& groups,
                const Optional<TensorView>& weight_indices) {
  const bool has_batch = p->grouping == Grouping::kMasked || p->grouping == Grouping::kBatched;
  const int rank = p->grouping == Grouping::kBatched ? b.ndim() : 3;
  Expect(OP, "b", b).rank(rank);
  Expect(OP, "a", a).rank(has_batch ? rank : 2);
  p->weights = b.ndim() == 3 ? b.size(0) : 1;
  p->batch = p->weights;
  if (weight_indices.has_value()) {
    if (p->grouping != Grouping::kPacked) {
      FLASHINFER_THROW(ArgumentError) << OP
                                      << ": weight_indices must be None unless grouping is 3 (packed), got a tensor";
    }
    Expect(OP, "weight_indices", weight_indices.value()).same_device(a, "a").dtype({dl_int32}).rank(1).contiguous();
    p->weight_indices = weight_indices.value().data_ptr<int32_t>();
    p->batch = weight_indices.value().size(0);
  }
  if (has_batch && a.ndim() == 3) Expect(OP, "a", a).dim(0, p->batch, "b.shape[0]");
  if (p->grouping == Grouping::kBatched) return;
  if (!groups.has_value()) FLASHINFER_THROW(ArgumentError) << OP << ": groups must be given for grouped products";
  const int64_t counts[] = {0, p->m, p->batch, p->batch + 1};
  Expect(OP, "groups", groups.value()).same_device(a, "a").dtype({dl_int32}).rank(1).contiguous();
  Expect(OP, "groups", groups.value()).numel(counts[int(p->grouping)]);
  p->groups = groups.value().data_ptr<int32_t>();
}

GemmShape ShapeOf(const GemmProblem& p, int64_t rows) {
  GemmShape x{rows, p.n, p.k};
  x.batch = p.batch, x.grouping = p.grouping;
  x.element_bytes = ElementDtype().bits / 8;
  x.is_block = SCALING == Scaling::kBlock;
  x.needs_swapped = x.is_block && p.b_scale.rows == 1;
  x.is_gated = p.activation.is_active;
  return x;
}

int IndexOf(const GemmConfig& c) {
  for (int i = 0; i < TILE_COUNT; ++i) {
    const TileShape& t = TILES[i];
    if (t.swapped == c.swapped && t.block_m == c.block_m && t.block_n == c.block_n) return i;
  }
  FLASHINFER_THROW(RuntimeError) << OP << ": the rule chose a tile that this module does not have";
  return 0;
}

/// Validate the arguments of a product and describe it. Returns false if it has no elements.
bool Describe(GemmProblem* p, const TensorView& out, const TensorView& a, const TensorView& b,
              const Optional<TensorView>& bias, const Optional<TensorView>& groups,
              const Optional<TensorView>& weight_indices, int64_t grouping) {
  if (grouping < 0 || grouping > 3) {
    FLASHINFER_THROW(ArgumentError) << OP << ": grouping must be in 0 .. 3, got " << grouping;
  }
  Expect(OP, "a", a).on_device().rank(2, 3);
  Expect(OP, "b", b).same_device(a, "a").rank(2, 3);
  Expect(OP, "out", out).same_device(a, "a").rank(a.ndim());
  p->grouping = Grouping(grouping);
  p->m = a.size(-2), p->k = a.size(-1), p->n = b.size(-2);
  FillGroups(p, a, b, groups, weight_indices);
  CheckMatrix("b", b, p->n, p->k);
  CheckMatrix("out", out, p->m, p->n);
  Expect(OP, "out", out).distinct().apart(a, "a").apart(b, "b").apart(bias, "bias");
  if (out.ndim() == 3) Expect(OP, "out", out).dim(0, p->batch, "b.shape[0]");
  p->a = a.data_ptr(), p->b = b.data_ptr(), p->d = out.data_ptr();
  p->a_stride = RowStride(a), p->b_stride = RowStride(b), p->d_stride = RowStride(out);
  p->a_batch_stride = BatchStride(a), p->b_batch_stride = BatchStride(b), p->d_batch_stride = BatchStride(out);
  p->out = out.dtype().bits == 32         ? flashinfer::gemm::Element::kFloat32
           : out.dtype().code == kDLFloat ? flashinfer::gemm::Element::kFloat16
                                          : flashinfer::gemm::Element::kBFloat16;
  if (bias.has_value()) {
    Expect(OP, "bias", bias.value()).same_device(a, "a").rank(1).numel(p->n).contiguous();
    p->bias = static_cast<const flashinfer::bfloat16_t*>(bias.value().data_ptr());
  }
  return p->m != 0 && p->n != 0 && p->batch != 0;
}

/// Return true unless a scale is missing or that of a whole tensor.
bool IsBlockScale(const Optional<TensorView>& scale, const TensorView& of) {
  return scale.has_value() && scale.value().ndim() == of.ndim();
}

/// Operands and options of one product, as callers pass them.
struct Call {
  TensorView out, a, b;
  Optional<TensorView> a_scale, b_scale, bias, groups, weight_indices;
  int64_t grouping;
  int64_t scale_rows;  // rows of b that share a block scale: 1 or 128
  bool enable_pdl;
  bool weights_first;
};

/// Multiply with the configuration `choose(problem, sms)`. Returns false if this module does not take the operands.
template <typename ChooseConfig>
bool Multiply(const Call& x, const ChooseConfig& choose) {
  if (!Serves(x.out, x.a, x.b, x.bias)) return false;
  if (SCALING == Scaling::kBlock && !(IsBlockScale(x.a_scale, x.a) && IsBlockScale(x.b_scale, x.b))) return false;
  GemmProblem p;
  if (!Describe(&p, x.out, x.a, x.b, x.bias, x.groups, x.weight_indices, x.grouping)) return true;
  FillScales(&p, x.a, x.b, x.a_scale, x.b_scale, x.scale_rows);
  const DLDevice device = x.a.device();
  GemmConfig c = choose(p, flashinfer::device::SmCount(device.device_id));
  c.enable_pdl = UsePdl(x.enable_pdl, device);
  c.weights_first = x.weights_first;
  DeviceGuard guard(device);
  const auto entry = (c.split_k ? SPLIT_ENTRIES : ENTRIES)[IndexOf(c)];
  if (entry == nullptr) FLASHINFER_THROW(RuntimeError) << OP << ": the tile has no kernel that splits K";
  CheckStatus(OP, entry(p, c, get_stream(device)));
  return true;
}

GemmConfig ChooseByRule(const GemmProblem& p, int64_t rows, int sms) {
  const GemmShape shape = ShapeOf(p, rows);
  return FindChoice(shape, sms, [&] { return ChooseSm90(shape, TILES, TILE_COUNT, sms); });
}

/// A batch of matrices, or one matrix, with rows and columns exchanged.
class Transposed {
 public:
  explicit Transposed(const TensorView& x) {
    const int rank = x.ndim();
    for (int i = 0; i < rank; ++i) shape_[i] = x.size(i), strides_[i] = x.stride(i);
    std::swap(shape_[rank - 1], shape_[rank - 2]);
    std::swap(strides_[rank - 1], strides_[rank - 2]);
    tensor_ = {x.data_ptr(), x.device(), rank, x.dtype(), shape_, strides_, 0};
  }
  Transposed(const Transposed&) = delete;  // the tensor points to members
  Transposed& operator=(const Transposed&) = delete;
  TensorView view() const { return TensorView(&tensor_); }

 private:
  DLTensor tensor_;
  int64_t shape_[3], strides_[3];
};

bool IsMatrixOrBatch(const TensorView& x) { return x.ndim() == 2 || x.ndim() == 3; }

}  // namespace

/// Return by names what the rule chooses for a product; `is_gated`: for one that activates its results.
tvm::ffi::Map<tvm::ffi::String, tvm::ffi::Any> gemm_sm90_choose(int64_t rows, int64_t n, int64_t k, int64_t batch,
                                                                int64_t grouping, bool needs_swapped, bool is_gated,
                                                                int64_t sms) {
  GemmProblem p;
  p.n = n, p.k = k, p.batch = batch, p.grouping = Grouping(grouping);
  p.b_scale.rows = needs_swapped ? 1 : SCALE_BLOCK;
  p.activation.is_active = is_gated;
  const GemmConfig c = ChooseByRule(p, rows, int(sms));
  return {{"tile", IndexOf(c)},   {"swap_ab", c.swapped}, {"block_m", c.block_m},
          {"block_n", c.block_n}, {"cluster", c.cluster}, {"split_k", c.cluster > 1 && (c.swapped || c.split_k)},
          {"share_b", c.share_b}, {"raster", c.raster},   {"reason", tvm::ffi::String(ReasonOf(ShapeOf(p, rows), c))}};
}

/// Multiply with the tile of an index, or by the rule if `tile` is negative; the numbers after it are not read then.
/// `sharing`: operand that the blocks of a cluster share if tokens are on the M side: 0: tokens, 1: weights, 2: K. With 0,
/// `raster` and `blocks` are those of the rule.
bool gemm_sm90(TensorView out, TensorView a, TensorView b, Optional<TensorView> a_scale, Optional<TensorView> b_scale,
               Optional<TensorView> bias, Optional<TensorView> groups, Optional<TensorView> weight_indices,
               int64_t grouping, int64_t scale_rows, int64_t expected_m, int64_t tile, int64_t cluster, int64_t sharing,
               int64_t raster, int64_t blocks, bool enable_pdl, bool weights_first) {
  const Call call{out,      a,          b,          a_scale,      b_scale, bias, groups, weight_indices,
                  grouping, scale_rows, enable_pdl, weights_first};
  if (tile < 0) {
    return Multiply(call, [expected_m](const GemmProblem& p, int sms) {
      return ChooseByRule(p, p.grouping == Grouping::kMasked ? std::max<int64_t>(expected_m, 1) : p.m, sms);
    });
  }
  if (tile >= TILE_COUNT) {
    FLASHINFER_THROW(ArgumentError) << OP << ": tile must be at most " << TILE_COUNT - 1 << ", got " << tile;
  }
  const TileShape& shape = TILES[tile];
  if (!shape.swapped && SCALING == Scaling::kBlock && scale_rows == 1) {
    FLASHINFER_THROW(ArgumentError) << OP << ": tile must be a swapped one for scales of single weight rows, got "
                                    << tile;
  }
  return Multiply(call, [&](const GemmProblem&, int sms) {
    GemmConfig c;
    c.swapped = shape.swapped, c.block_m = shape.block_m, c.block_n = shape.block_n;
    c.cluster = int(cluster), c.share_b = sharing == 1, c.split_k = sharing == 2;
    c.raster = raster > 0 ? int(raster) : ChooseRaster(c.block_m, c.block_n, sms);
    c.blocks = blocks > 0 ? int(std::min<int64_t>(blocks, sms)) : sms;
    return c;
  });
}

/// Multiply by the rule.
static bool MultiplyByRule(const TensorView& out, const TensorView& a, const TensorView& b,
                           const Optional<TensorView>& a_scale, const Optional<TensorView>& b_scale,
                           const Optional<TensorView>& bias, const Optional<TensorView>& groups, int64_t grouping,
                           int64_t scale_rows, int64_t expected_m, bool enable_pdl) {
  return gemm_sm90(out, a, b, a_scale, b_scale, bias, groups, {}, grouping, scale_rows, expected_m, -1, 1, 0, 0, 0,
                   enable_pdl, false);
}

// Ordinary calls of public functions, with the tensors as callers pass them. Each returns false, having done nothing,
// for operands that the checks in Python must look at; errors have no meaning to callers but that.

/// Multiply by the rule, with PDL: groups of rows of contiguous tensors with weights (groups, n, k), or without groups
/// matrices or batches of them with weights (.., k, n).
bool gemm_sm90_ordinary(TensorView out, TensorView a, TensorView b, Optional<TensorView> a_scale,
                        Optional<TensorView> b_scale, Optional<TensorView> bias, Optional<TensorView> groups,
                        int64_t grouping, int64_t expected_m) {
  if (groups.has_value()) {
    if (!out.IsContiguous() || !a.IsContiguous() || !b.IsContiguous() || b.ndim() != 3) return false;
    return MultiplyByRule(out, a, b, a_scale, b_scale, bias, groups, grouping, SCALE_BLOCK, expected_m, true);
  }
  if (SCALING == Scaling::kBlock || !IsMatrixOrBatch(b)) return false;
  const Transposed weights(b);
  return MultiplyByRule(out, a, weights.view(), a_scale, b_scale, bias, {}, int64_t(Grouping::kBatched), 1, 0, true);
}

/// Enqueue the product of experts `p`. Rows are gathered for gated products with block scales only, which have one tile.
static void EnqueueExperts(const GemmProblem& p, GemmConfig c, DLDevice device, bool enable_pdl, bool weights_first) {
  const auto entry = (p.row_indices == nullptr ? ENTRIES : GATHER_ENTRIES)[IndexOf(c)];
  if (entry == nullptr) FLASHINFER_THROW(RuntimeError) << OP << ": the tile has no kernel that gathers rows";
  c.enable_pdl = enable_pdl;
  c.weights_first = c.groups_first = weights_first;
  CheckStatus(OP, entry(p, c, get_stream(device)));
}

/// Return the product of experts for fused_moe.cu, with the tile and cluster of each GEMM of a layer. The rule chooses for a
/// tile of -1, and where a tile cannot serve a product. The function takes the address of a flashinfer::gemm::GemmProblem
/// and runs on the current device; `weights_first`: the kernel before this one wrote neither weights nor `groups`.
tvm::ffi::Function gemm_sm90_experts(int64_t tile1, int64_t cluster1, int64_t tile2, int64_t cluster2) {
  for (int64_t tile : {tile1, tile2}) {
    if (tile >= TILE_COUNT) {
      FLASHINFER_THROW(ArgumentError) << OP << ": tile must be at most " << TILE_COUNT - 1 << ", got " << tile;
    }
  }
  const auto multiply = [=](void* problem, int64_t device_id, bool enable_pdl, bool weights_first) {
    const GemmProblem& p = *static_cast<const GemmProblem*>(problem);
    const DLDevice device{kDLCUDA, int32_t(device_id)};
    // GEMM 2 alone reads weights before the kernel before it ends.
    const int64_t tile = weights_first ? tile2 : tile1;
    GemmConfig c = ChooseByRule(p, p.ExpectedRows(), flashinfer::device::SmCount(device.device_id));
    if (tile >= 0) UseTile(ShapeOf(p, p.ExpectedRows()), TILES[tile], int(weights_first ? cluster2 : cluster1), &c);
    EnqueueExperts(p, c, device, enable_pdl, weights_first);
  };
  return tvm::ffi::Function::FromTyped(multiply);
}

/// Multiply few rows that the product quantises itself. Returns false, having done nothing, for other operands and where two
/// kernels are faster.
static bool MultiplyUnquantized(const TensorView& out, const TensorView& input, const TensorView& weight,
                                const TensorView& weight_scale, int64_t scale_rows, bool enable_pdl) {
  const bool are_matrices = input.ndim() == 2 && weight.ndim() == 2 && out.ndim() == 2;
  if (QUANTIZING_ENTRY == nullptr || scale_rows != SCALE_BLOCK || !are_matrices) return false;
  if (input.size(0) > QUANTIZING_TILE.block_m || input.size(1) % SCALE_BLOCK != 0) return false;
  if (!Serves(out, input, weight, {}, dl_bfloat16)) return false;
  GemmProblem p;
  if (!Describe(&p, out, input, weight, {}, {}, {}, int64_t(Grouping::kBatched))) return true;
  p.b_scale = BlockScale("b_scale", weight_scale, weight, p.n, p.k, SCALE_BLOCK);
  p.is_unquantized = true;
  const DLDevice device = input.device();
  const GemmShape shape = ShapeOf(p, p.m);
  GemmConfig c = ChooseSm90(shape, &QUANTIZING_TILE, 1, flashinfer::device::SmCount(device.device_id));
  if (!QuantizesFaster(shape, c)) return false;
  c.enable_pdl = UsePdl(enable_pdl, device);
  DeviceGuard guard(device);
  CheckStatus(OP, QUANTIZING_ENTRY(p, c, get_stream(device)));
  return true;
}

/// Return the bytes of codes and scales of a quantised (m, k) input. Rows of scales are padded as in quantize_rows.
static int64_t QuantizedBytes(int64_t m, int64_t k) {
  return m * k + (m + 3) / 4 * 4 * (k / SCALE_BLOCK) * int64_t(sizeof(float));
}

/// Quantise a checked input into `memory` and multiply. Returns false, having done nothing, for layouts of other kernels.
static bool QuantizeAndMultiply(const TensorView& out, const TensorView& input, const TensorView& weight,
                                const TensorView& weight_scale, int64_t scale_rows, void* memory, bool enable_pdl) {
  const int64_t m = input.size(0), k = input.size(1), padded = (m + 3) / 4 * 4;
  auto* const codes = static_cast<uint8_t*>(memory);
  auto* const scales = reinterpret_cast<float*>(codes + m * k);
  int64_t code_shape[] = {m, k}, code_strides[] = {k, 1};
  int64_t scale_shape[] = {m, k / SCALE_BLOCK}, scale_strides[] = {1, padded};
  const DLTensor a{codes, input.device(), 2, dl_float8_e4m3fn, code_shape, code_strides, 0};
  const DLTensor a_scale{scales, input.device(), 2, dl_float32, scale_shape, scale_strides, 0};
  Call call{out,        TensorView(&a), weight, TensorView(&a_scale), weight_scale, {}, {}, {}, 0,
            scale_rows, enable_pdl,     true};
  if (!Serves(call.out, call.a, call.b, call.bias)) return false;
  const Quantize1x128Params p{input.data_ptr(),
                              input.stride(0),
                              codes,
                              k,
                              scales,
                              padded,
                              m,
                              int(k / SCALE_BLOCK),
                              UsePdl(enable_pdl, input.device())};
  CheckStatus(OP, Quantize1x128<flashinfer::bfloat16_t>(p, get_stream(input.device())));
  return Multiply(call, [](const GemmProblem& p, int sms) { return ChooseByRule(p, p.m, sms); });
}

/// Multiply an input with block scales, or one that is quantised by this call: in `workspace` if it is given, which has
/// QuantizedBytes, else in memory of the stream.
bool gemm_sm90_blockscale(TensorView out, TensorView input, TensorView weight, Optional<TensorView> input_scale,
                          TensorView weight_scale, Optional<TensorView> workspace, bool enable_pdl) {
  if (input.ndim() != 2 || weight.ndim() != 2 || weight_scale.ndim() != 2) return false;
  const int64_t m = input.size(0), k = input.size(1), n = weight.size(0);
  const int64_t unit = workspace.has_value() ? 8 : 64;  // a caller with a workspace has checked the weights
  if (k % SCALE_BLOCK != 0 || n % unit != 0 || n == 0) return false;
  const int64_t scale_rows = weight_scale.size(0) == n ? 1 : SCALE_BLOCK;
  if (input_scale.has_value()) {
    if (input_scale.value().ndim() != 2) return false;
    const Transposed scales(input_scale.value());
    return MultiplyByRule(out, input, weight, scales.view(), weight_scale, {}, {}, int64_t(Grouping::kBatched),
                          scale_rows, 0, enable_pdl);
  }
  if constexpr (SCALING == Scaling::kBlock) {
    if (!HasDtype(input, dl_bfloat16) || !TakesBulkCopies(input)) return false;
    Expect(OP, "input", input).on_device();
    const int64_t bytes = QuantizedBytes(m, k);
    if (workspace.has_value()) {
      Expect(OP, "workspace", workspace.value()).same_device(input, "input").dtype({dl_uint8}).rank(1).contiguous();
      Expect(OP, "workspace", workspace.value()).numel(bytes);
    }
    if (MultiplyUnquantized(out, input, weight, weight_scale, scale_rows, enable_pdl)) return true;
    DeviceGuard guard(input.device());
    flashinfer::CallMemory memory;
    void* const quantized = workspace.has_value() ? workspace.value().data_ptr() : memory.Take(input.device(), bytes);
    return QuantizeAndMultiply(out, input, weight, weight_scale, scale_rows, quantized, enable_pdl);
  }
  return false;  // the other modules have no quantiser
}
