// SPDX-License-Identifier: Apache-2.0
// Decode example without Python: one token attends to 3000 keys, and the host checks the result.
#include <cmath>
#include <cstdio>
#include <vector>

#include "flashinfer/attention/decode.cuh"

using flashinfer::float16_t;

constexpr int HEAD_DIM = 128, QO_HEADS = 8, KV_HEADS = 2, KEYS = 3000;

/// Return deterministic numbers in (-1, 1).
std::vector<float> Numbers(int count, uint32_t state) {
  std::vector<float> x(count);
  for (float& value : x) {
    state = state * 1664525u + 1013904223u;
    value = float(state >> 8) / float(1 << 23) - 1.f;
  }
  return x;
}

/// Round `x` to float16 in place, and return a copy on the device.
float16_t* Upload(std::vector<float>& x) {
  std::vector<float16_t> rounded;
  for (float& value : x) {
    rounded.push_back(__float2half(value));
    value = __half2float(rounded.back());
  }
  float16_t* on_device = nullptr;
  cudaMalloc(&on_device, rounded.size() * sizeof(float16_t));
  cudaMemcpy(on_device, rounded.data(), rounded.size() * sizeof(float16_t), cudaMemcpyHostToDevice);
  return on_device;
}

int main() {
  std::vector<float> q = Numbers(QO_HEADS * HEAD_DIM, 1), k = Numbers(KEYS * KV_HEADS * HEAD_DIM, 2);
  std::vector<float> v = Numbers(KEYS * KV_HEADS * HEAD_DIM, 3), o(QO_HEADS * HEAD_DIM, 0.f);
  const float16_t *q_device = Upload(q), *k_device = Upload(k), *v_device = Upload(v);
  float16_t* const o_device = Upload(o);
  void* tmp = nullptr;
  cudaMalloc(&tmp, flashinfer::SingleDecodeTmpBytes<HEAD_DIM, float16_t>());
  const cudaError_t status = flashinfer::SingleDecodeWithKVCache<HEAD_DIM, float16_t>(
      q_device, k_device, v_device, o_device, tmp, QO_HEADS, KV_HEADS, KEYS);
  if (status != cudaSuccess) {
    std::printf("decode: %s\n", cudaGetErrorString(status));
    return 1;
  }
  std::vector<float16_t> result(o.size());
  cudaMemcpy(result.data(), o_device, result.size() * sizeof(float16_t), cudaMemcpyDeviceToHost);

  double worst = 0.;
  for (int head = 0; head < QO_HEADS; ++head) {
    const int first = head / (QO_HEADS / KV_HEADS) * HEAD_DIM;  // column of the KV head
    double sum = 0.;
    std::vector<double> expected(HEAD_DIM, 0.);
    for (int key = 0; key < KEYS; ++key) {
      const int row = key * KV_HEADS * HEAD_DIM + first;
      double score = 0.;
      for (int i = 0; i < HEAD_DIM; ++i) score += double(q[head * HEAD_DIM + i]) * k[row + i];
      const double weight = std::exp(score / std::sqrt(double(HEAD_DIM)));
      sum += weight;
      for (int i = 0; i < HEAD_DIM; ++i) expected[i] += weight * v[row + i];
    }
    for (int i = 0; i < HEAD_DIM; ++i) {
      worst = std::fmax(worst, std::fabs(__half2float(result[head * HEAD_DIM + i]) - expected[i] / sum));
    }
  }
  std::printf("largest error %.1e\n", worst);
  return worst < 1e-3 ? 0 : 1;
}
