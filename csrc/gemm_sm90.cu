// SPDX-License-Identifier: Apache-2.0
// Launcher of the SM90 GEMM kernels: checks, the choice of a tile, stream. One module has the kernels of one element
// type and scaling, listed in gemm_sm90_config.inc.
#include "tvm_ffi_utils.h"
// clang-format off
#include <flashinfer/gemm/choose_sm90.h>
#include <flashinfer/gemm/entries_sm90.h>
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

/// Return the number of SMs of a device, queried once.
int SmCount(int device) {
  constexpr int MAX_DEVICES = 64;
  static std::atomic<int> counts[MAX_DEVICES];
  int count = device < MAX_DEVICES ? counts[device].load(std::memory_order_relaxed) : 0;
  if (count == 0) {
    cudaDeviceGetAttribute(&count, cudaDevAttrMultiProcessorCount, device);
    if (device < MAX_DEVICES) counts[device].store(count, std::memory_order_relaxed);
  }
  return count;
}

/// Validate a matrix, or a batch of matrices, for TMA: rows are aligned to 16 bytes.
void CheckMatrix(const char* name, const TensorView& x, int64_t rows, int64_t columns) {
  const int bytes = x.dtype().bits / 8, last = x.ndim() - 1;
  Expect(OP, name, x).last_dim_contiguous().dim(last - 1, rows, "rows").dim(last, columns, "columns");
  for (int i = 0; i < last; ++i) {
    if (x.size(i) > 1 && x.stride(i) * bytes % 16 != 0) {
      TVM_FFI_THROW(ArgumentError) << OP << ": " << name << ".stride(" << i << ") must be a multiple of " << 16 / bytes
                                   << " elements (alignment of 16 bytes), got " << x.stride(i);
    }
  }
  if (reinterpret_cast<uintptr_t>(x.data_ptr()) % 16 != 0) {
    TVM_FFI_THROW(ArgumentError) << OP << ": " << name << " must have an alignment of 16 bytes, got address "
                                 << x.data_ptr();
  }
}

/// Strides of a (rows, columns) or (batch, rows, columns) tensor.
int64_t RowStride(const TensorView& x) { return x.stride(x.ndim() - 2); }
int64_t BatchStride(const TensorView& x) { return x.ndim() == 3 ? x.stride(0) : 0; }

/// Validate block scales, logically (batch, rows, k blocks) with any strides, and return a view.
ScaleView BlockScale(const char* name, const TensorView& x, const TensorView& of, int64_t rows, int64_t k,
                     bool may_be_blocks) {
  Expect(OP, name, x).same_device(of, "a").dtype({dl_float32}).rank(of.ndim());
  const int last = x.ndim() - 1;
  const bool is_blocks = may_be_blocks && x.size(last - 1) != rows;
  const int64_t expected = is_blocks ? (rows + SCALE_BLOCK - 1) / SCALE_BLOCK : rows;
  Expect(OP, name, x).dim(last - 1, expected, is_blocks ? "blocks of 128 rows" : "rows");
  Expect(OP, name, x).dim(last, (k + SCALE_BLOCK - 1) / SCALE_BLOCK, "blocks of 128 of K");
  return {x.data_ptr<float>(), BatchStride(x), RowStride(x), x.stride(last), is_blocks ? SCALE_BLOCK : 1};
}

ScaleView TensorScaleOf(const char* name, const Optional<TensorView>& x, const TensorView& a) {
  ScaleView view;
  if (!x.has_value()) return view;
  Expect(OP, name, x.value()).same_device(a, "a").dtype({dl_float32}).numel(1);
  view.data = x.value().data_ptr<float>();
  return view;
}

void FillScales(GemmProblem* p, const TensorView& a, const TensorView& b, const Optional<TensorView>& a_scale,
                const Optional<TensorView>& b_scale) {
  if constexpr (SCALING == Scaling::kBlock) {
    if (!a_scale.has_value() || !b_scale.has_value()) {
      TVM_FFI_THROW(ArgumentError) << OP << ": a_scale and b_scale must be given with block scaling";
    }
    p->a_scale = BlockScale("a_scale", a_scale.value(), a, p->m, p->k, false);
    p->b_scale = BlockScale("b_scale", b_scale.value(), b, p->n, p->k, true);
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
      TVM_FFI_THROW(ArgumentError) << OP << ": weight_indices must be None unless grouping is 3 (packed), got a tensor";
    }
    Expect(OP, "weight_indices", weight_indices.value()).same_device(a, "a").dtype({dl_int32}).rank(1).contiguous();
    p->weight_indices = weight_indices.value().data_ptr<int32_t>();
    p->batch = weight_indices.value().size(0);
  }
  if (has_batch && a.ndim() == 3) Expect(OP, "a", a).dim(0, p->batch, "b.shape[0]");
  if (p->grouping == Grouping::kBatched) return;
  if (!groups.has_value()) TVM_FFI_THROW(ArgumentError) << OP << ": groups must be given for grouped products";
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
  return x;
}

int IndexOf(const GemmConfig& c) {
  for (int i = 0; i < TILE_COUNT; ++i) {
    const TileShape& t = TILES[i];
    if (t.swapped == c.swapped && t.block_m == c.block_m && t.block_n == c.block_n) return i;
  }
  TVM_FFI_THROW(RuntimeError) << OP << ": the rule chose a tile that this module does not have";
  return 0;
}

}  // namespace

int64_t gemm_sm90_choose(int64_t rows, int64_t n, int64_t k, int64_t batch, int64_t grouping, bool needs_swapped,
                         int64_t sms) {
  GemmProblem p;
  p.n = n, p.k = k, p.batch = batch, p.grouping = Grouping(grouping);
  p.b_scale.rows = needs_swapped ? 1 : SCALE_BLOCK;
  const GemmConfig c = ChooseSm90(ShapeOf(p, rows), TILES, TILE_COUNT, int(sms));
  return IndexOf(c) * 32 + c.cluster * 2 + (c.share_b ? 1 : 0);
}

void gemm_sm90(TensorView out, TensorView a, TensorView b, Optional<TensorView> a_scale, Optional<TensorView> b_scale,
               Optional<TensorView> bias, Optional<TensorView> groups, Optional<TensorView> weight_indices,
               int64_t grouping, int64_t expected_m, int64_t tile, int64_t cluster, bool share_b, int64_t raster,
               int64_t blocks, bool enable_pdl, bool weights_first) {
  if (grouping < 0 || grouping > 3 || tile >= TILE_COUNT) {
    TVM_FFI_THROW(ArgumentError) << OP << ": grouping must be in 0 .. 3 and tile below " << TILE_COUNT << ", got "
                                 << grouping << " and " << tile;
  }
  Expect(OP, "a", a).on_device().dtype({ElementDtype()}).rank(2, 3);
  Expect(OP, "b", b).same_device(a, "a").dtype({ElementDtype()}).rank(2, 3);
  Expect(OP, "out", out).same_device(a, "a").dtype({dl_bfloat16, dl_float16, dl_float32}).rank(a.ndim());
  GemmProblem p;
  p.grouping = Grouping(grouping);
  p.m = a.size(-2), p.k = a.size(-1), p.n = b.size(-2);
  FillGroups(&p, a, b, groups, weight_indices);
  if (p.m == 0 || p.n == 0 || p.batch == 0) return;
  if (p.k == 0) TVM_FFI_THROW(ArgumentError) << OP << ": a.shape[-1] must be at least 1, got 0";
  CheckMatrix("a", a, p.m, p.k);
  CheckMatrix("b", b, p.n, p.k);
  CheckMatrix("out", out, p.m, p.n);
  if (out.ndim() == 3) Expect(OP, "out", out).dim(0, p.batch, "b.shape[0]");
  p.a = a.data_ptr(), p.b = b.data_ptr(), p.d = out.data_ptr();
  p.a_stride = RowStride(a), p.b_stride = RowStride(b), p.d_stride = RowStride(out);
  p.a_batch_stride = BatchStride(a), p.b_batch_stride = BatchStride(b), p.d_batch_stride = BatchStride(out);
  p.out = out.dtype().bits == 32         ? flashinfer::gemm::Element::kFloat32
          : out.dtype().code == kDLFloat ? flashinfer::gemm::Element::kFloat16
                                         : flashinfer::gemm::Element::kBFloat16;
  if (bias.has_value()) {
    Expect(OP, "bias", bias.value()).same_device(a, "a").dtype({dl_bfloat16}).rank(1).numel(p.n).contiguous();
    p.bias = static_cast<const flashinfer::bfloat16_t*>(bias.value().data_ptr());
  }
  FillScales(&p, a, b, a_scale, b_scale);
  const int sms = SmCount(a.device().device_id);
  GemmConfig c;
  if (tile < 0) {
    c = ChooseSm90(ShapeOf(p, p.grouping == Grouping::kMasked ? std::max<int64_t>(expected_m, 1) : p.m), TILES,
                   TILE_COUNT, sms);
    tile = IndexOf(c);
  } else {
    c.swapped = TILES[tile].swapped, c.block_m = TILES[tile].block_m, c.block_n = TILES[tile].block_n;
    c.cluster = int(cluster), c.share_b = share_b;
    c.raster = raster > 0 ? int(raster) : ChooseRaster(c.block_m, c.block_n, sms);
  }
  c.blocks = blocks > 0 ? int(std::min<int64_t>(blocks, sms)) : sms;
  c.enable_pdl = UsePdl(enable_pdl, a.device());
  c.weights_first = weights_first;
  if (!c.swapped && SCALING == Scaling::kBlock && p.b_scale.rows == 1) {
    TVM_FFI_THROW(ArgumentError) << OP << ": tile must be a swapped one for scales of single weight rows, got " << tile;
  }
  DeviceGuard guard(a.device());
  CheckStatus(OP, ENTRIES[tile](p, c, get_stream(a.device())));
}
