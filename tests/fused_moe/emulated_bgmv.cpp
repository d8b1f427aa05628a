// SPDX-License-Identifier: Apache-2.0
// The kernels of low-rank adapters on the CPU, called by test_emulated_bgmv.py.
#include <flashinfer/moe/lora.cuh>

using namespace flashinfer;

namespace {

/// Numbers and addresses, one after the other.
struct Fields {
  const int64_t* next;

  int64_t Number() { return *next++; }
  template <typename T>
  T* Address() {
    return reinterpret_cast<T*>(*next++);
  }
  /// Address and type.
  BgmvNumbers Numbers() {
    void* const data = Address<void>();
    return {data, BgmvFloat(Number())};
  }
  /// Address, and whether the numbers have 64 bits.
  BgmvIndices Indices() {
    const void* const data = Address<const void>();
    return {data, Number() != 0};
  }
  /// The pairs that both kernels have first among their fields.
  BgmvPairs Pairs() {
    BgmvPairs by{};
    by.w_ptr = Address<const int64_t>();
    by.bank = Address<const void>();
    by.expert_stride = Number(), by.lora_stride = Number();
    by.token_ids = Indices(), by.expert_ids = Indices(), by.lora_ids = Indices(), by.rows = Indices();
    by.pairs = Number(), by.tokens = Number(), by.experts = Number(), by.slices = Number(), by.top_k = Number();
    by.loras = Number(), by.num_rows = Number();
    return by;
  }
};

}  // namespace

EMULATION_EXPORT int shrink(const int64_t* numbers) {
  Fields x{numbers};
  BgmvShrinkParams p{};
  p.by = x.Pairs();
  p.y = x.Numbers();
  p.x = x.Address<const void>();
  p.x_per_pair = x.Number() != 0;
  p.columns = p.x_stride = x.Number();
  p.rank = x.Number();
  p.overwrites = x.Number() != 0;
  return int(BgmvMoeShrink<__nv_bfloat16>(p, nullptr));
}

EMULATION_EXPORT int expand(const int64_t* numbers) {
  Fields x{numbers};
  BgmvExpandParams p{};
  p.by = x.Pairs();
  p.y = x.Numbers();
  p.y_stride = p.y_columns = x.Number();
  p.x = x.Numbers();
  p.x_slice_stride = x.Number();
  p.weights = x.Address<const float>();
  p.slice_starts = x.Address<const int64_t>();
  p.start = x.Number();
  p.order = x.Address<const int64_t>(), p.offsets = x.Address<const int64_t>();
  p.rank = x.Number(), p.columns = x.Number(), p.zero_columns = x.Number();
  p.scale = float(x.Number());
  p.finalize = x.Number() != 0, p.overwrites = x.Number() != 0;
  return int(BgmvMoeExpand<__nv_bfloat16>(p, nullptr));
}
