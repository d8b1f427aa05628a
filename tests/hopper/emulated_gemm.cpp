// SPDX-License-Identifier: Apache-2.0
// The SM90 GEMM kernels on the CPU, called by test_emulated_gemm.py.
#include <flashinfer/gemm/sm90/kernel.cuh>
#include <flashinfer/gemm/sm90/swap_ab_kernel.cuh>

using namespace flashinfer;
using namespace flashinfer::gemm;

/// Quantise (rows, columns) bf16 with one kernel. Codes are contiguous, scales (columns / 128, rows).
EMULATION_EXPORT int quantize_1x128(const void* input, int64_t stride, uint8_t* codes, float* scales, int64_t rows,
                                    int64_t columns) {
  const int blocks = int(columns / 128);
  return int(Quantize1x128<bfloat16_t>({input, stride, codes, columns, scales, rows, rows, blocks, false}, nullptr));
}

/// Compute a product; `x` has the fields of the problem and of the configuration in the order below.
EMULATION_EXPORT int gemm_sm90(int64_t kernel, const int64_t* x) {
  GemmProblem g;
  const auto next = [&] { return *x++; };
  const auto pointer = [&] { return reinterpret_cast<void*>(*x++); };
  g.a = pointer(), g.b = pointer(), g.d = pointer();
  g.m = next(), g.n = next(), g.k = next(), g.batch = next(), g.weights = next();
  g.a_stride = next(), g.b_stride = next(), g.d_stride = next();
  g.a_batch_stride = next(), g.b_batch_stride = next(), g.d_batch_stride = next();
  g.grouping = Grouping(next()), g.groups = static_cast<const int32_t*>(pointer());
  for (ScaleView* s : {&g.a_scale, &g.b_scale}) {
    s->data = static_cast<const float*>(pointer());
    s->batch_stride = next(), s->row_stride = next(), s->k_stride = next(), s->rows = int(next());
  }
  g.out = Element(next()), g.bias = static_cast<const bfloat16_t*>(pointer());
  g.weight_indices = static_cast<const int32_t*>(pointer());
  g.weight_factors = static_cast<const float*>(pointer());
  g.tile_counter = static_cast<int32_t*>(pointer());
  g.row_indices = static_cast<const int32_t*>(pointer()), g.row_divisor = int(next());
  g.is_unquantized = next() != 0;
  GatedActivation& activation = g.activation;
  activation.is_active = next() != 0;
  for (const float** values : {&activation.alpha, &activation.beta, &activation.limit, &activation.factor}) {
    *values = static_cast<const float*>(pointer());
  }
  activation.bias = pointer(), activation.quantizer = static_cast<const float*>(pointer());
  activation.is_quantizer_of_group = true;
  activation.scales = static_cast<float*>(pointer()), activation.scale_stride = next();
  GemmConfig c;
  c.cluster = int(next());
  const int64_t sharing = next();
  c.share_b = sharing == 1, c.split_k = sharing == 2, c.blocks = int(next()), c.swapped = kernel >= 10;
  c.enable_pdl = c.weights_first = c.groups_first = next() != 0;
  emulation::device.clusters = std::max(1, c.blocks / c.cluster);
  constexpr Scaling TENSOR = Scaling::kTensor, BLOCK = Scaling::kBlock;
  switch (kernel) {
    case 0:
      return int(GemmSm90<bfloat16_t, TENSOR, 128, 128>(g, c, nullptr));
    case 1:
      return int(GemmSm90<float8_e4m3_t, TENSOR, 128, 64>(g, c, nullptr));
    case 2:
      return int(GemmSm90<float8_e4m3_t, BLOCK, 128, 128>(g, c, nullptr));
    case 3:
      return int(GemmSm90<float8_e4m3_t, BLOCK, 128, 256>(g, c, nullptr));
    case 4:
      return int(GemmSm90<float8_e4m3_t, BLOCK, 128, 192>(g, c, nullptr));
    case 5:
      return int(GemmSm90<float8_e4m3_t, BLOCK, 128, 256, Form::kGather>(g, c, nullptr));
    case 6:
      return int(GemmSm90<float8_e4m3_t, BLOCK, 128, 176>(g, c, nullptr));
    case 7:
      return int(GemmSm90<float8_e4m3_t, BLOCK, 128, 128, Form::kSplit>(g, c, nullptr));
    case 8:
      return int(GemmSm90<float8_e4m3_t, BLOCK, 128, 192, Form::kSplit>(g, c, nullptr));
    case 10:
      return int(GemmSwappedSm90<bfloat16_t, TENSOR, 16>(g, c, nullptr));
    case 11:
      return int(GemmSwappedSm90<float8_e4m3_t, BLOCK, 32>(g, c, nullptr));
    case 12:
      return int(GemmSwappedSm90<float8_e4m3_t, BLOCK, 8>(g, c, nullptr));
    case 20:
      return int(GemmSwappedSm90<bfloat16_t, TENSOR, 8, 64>(g, c, nullptr));
    case 21:
      return int(GemmSwappedSm90<bfloat16_t, TENSOR, 16, 64>(g, c, nullptr));
    case 22:
      return int(GemmSwappedSm90<float8_e4m3_t, TENSOR, 64, 64>(g, c, nullptr));
    case 23:
      return int(GemmSwappedSm90<float8_e4m3_t, BLOCK, 8, 64>(g, c, nullptr));
    case 25:
      return int(GemmSwappedSm90<float8_e4m3_t, BLOCK, 8, 64, true>(g, c, nullptr));
    case 24:
      return int(GemmSwappedSm90<float8_e4m3_t, BLOCK, 32, 64>(g, c, nullptr));
  }
  return -1;
}
