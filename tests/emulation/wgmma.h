// SPDX-License-Identifier: Apache-2.0
// Products of a warpgroup. The threads of a warpgroup issue the same sequence of products; the last thread to issue one
// lets it happen at a random time, in the order of the sequence: shared memory is read then. The accumulators of a
// product that is not waited for are NaN.
#pragma once
#include <cmath>
#include <deque>

#include "barriers.h"

namespace emulation {

enum class Kind { kBf16, kF16, kE4m3, kE5m2 };
inline int BytesOf(Kind kind) { return kind == Kind::kBf16 || kind == Kind::kF16 ? 2 : 1; }

/// Values of all codes of a type.
inline const float* TableOf(Kind kind) {
  static std::vector<float> tables[4];
  std::vector<float>& table = tables[int(kind)];
  if (table.empty()) {
    const int codes = BytesOf(kind) == 2 ? 1 << 16 : 1 << 8;
    table.resize(codes);
    for (int i = 0; i < codes; ++i) {
      const uint16_t bits = uint16_t(i);
      if (kind == Kind::kBf16) {
        const uint32_t word = uint32_t(bits) << 16;
        std::memcpy(&table[i], &word, 4);
      } else if (kind == Kind::kF16) {
        __half x;
        std::memcpy(static_cast<void*>(&x), &bits, 2);
        table[i] = __half2float(x);
      } else {
        const __nv_fp8_interpretation_t type = kind == Kind::kE4m3 ? __NV_E4M3 : __NV_E5M2;
        table[i] = __half2float(__half(__nv_cvt_fp8_to_halfraw(__nv_fp8_storage_t(i), type)));
      }
    }
  }
  return table.data();
}
inline float ValueOf(Kind kind, const unsigned char* p) {
  if (BytesOf(kind) == 1) return TableOf(kind)[*p];
  uint16_t bits;
  std::memcpy(&bits, p, 2);
  return TableOf(kind)[bits];
}

/// A matrix in shared memory, from the 64-bit descriptor of wgmma.
struct MatrixView {
  uint32_t start, leading, stride;
  int mode;  // 0: no swizzle, 1: 128 bytes, 2: 64, 3: 32
  bool is_mn_major;
  int element;

  MatrixView(uint64_t descriptor, bool mn_major, int bytes)
      : start(uint32_t(descriptor & 0x3fff) << 4),
        leading(uint32_t(descriptor >> 16 & 0x3fff) << 4),
        stride(uint32_t(descriptor >> 32 & 0x3fff) << 4),
        mode(int(descriptor >> 62)),
        is_mn_major(mn_major),
        element(bytes) {
    if ((descriptor >> 49 & 7) != 0)
      Fail("a descriptor with a base offset: tiles start on the period of their swizzle");
    if (mn_major && bytes != 2) Fail("operands of 8 bits are K-major");
  }

  /// Return the address of element (index of M or N, step of K).
  uint32_t At(int mn, int k) const {
    uint32_t at;
    if (mode == 0) {
      const int chunk = 16 / element;
      at = is_mn_major ? start + mn / chunk * stride + k / 8 * leading + k % 8 * 16 + mn % chunk * element
                       : start + mn / 8 * stride + k / chunk * leading + mn % 8 * 16 + k % chunk * element;
      return at;
    }
    const int width = 256 >> mode, across = width / element;
    at = is_mn_major ? start + mn / across * leading + k / 8 * stride + k % 8 * width + mn % across * element
                     : start + mn / 8 * stride + mn % 8 * width + k * element;
    return at ^ ((at >> 7 & ((16 >> mode) - 1)) << 4);
  }
};

struct Accumulator {
  std::vector<float> sum;  // 64 x n
};

struct Product {
  Kind kind = Kind::kBf16;
  int n = 0, arrived = 0;
  bool transpose_a = false, transpose_b = false, from_registers = false, accumulate = false;
  uint64_t a = 0, b = 0;
  std::vector<float> fragment;  // A from registers, 64 x K
  std::shared_ptr<Accumulator> sum;
};

inline void CheckFenced(Block& block, uint32_t address, uint32_t bytes);

/// Read `rows` x `depth` numbers. The transposed result has K outside.
inline void Gather(Block& block, Kind kind, const MatrixView& view, int rows, int depth, bool transposed, float* out) {
  const int element = BytesOf(kind);
  for (int i = 0; i < rows; ++i) {
    for (int k = 0; k < depth; ++k) {
      const uint32_t at = view.At(i, k);
      const unsigned char* p = Memory(block, at, element);
      CheckFenced(block, at, element);
      out[transposed ? k * rows + i : i * depth + k] = ValueOf(kind, p);
    }
  }
}

/// Compute d (64, n) += a (64, depth) b (depth, n).
__attribute__((optimize("O3"))) inline void Multiply(float* __restrict__ d, const float* __restrict__ a,
                                                     const float* __restrict__ b, int n, int depth) {
  for (int i = 0; i < 64; ++i) {
    for (int k = 0; k < depth; ++k) {
      const float x = a[i * depth + k];
      for (int j = 0; j < n; ++j) d[i * n + j] += x * b[k * n + j];
    }
  }
}

struct Warpgroup {
  std::deque<Product> queue;  // products that have not happened, oldest first
  uint64_t executed = 0;      // products that have
  WaitList waiting;

  void ExecuteNext(Block& block) {
    Product& p = queue.front();
    const int depth = 32 / BytesOf(p.kind);
    std::vector<float> a(64 * depth), b(size_t(p.n) * depth);
    if (p.from_registers) {
      a = p.fragment;
    } else {
      Gather(block, p.kind, MatrixView(p.a, p.transpose_a, BytesOf(p.kind)), 64, depth, false, a.data());
    }
    Gather(block, p.kind, MatrixView(p.b, p.transpose_b, BytesOf(p.kind)), p.n, depth, true, b.data());
    if (!p.accumulate) std::fill(p.sum->sum.begin(), p.sum->sum.end(), 0.f);
    Multiply(p.sum->sum.data(), a.data(), b.data(), p.n, depth);
    queue.pop_front();
    ++executed;
    waiting.Wake();
  }
};

inline Warpgroup& ThisWarpgroup() {
  Fibre& f = *state.current;
  const size_t i = size_t(f.thread) / 128;
  if (i >= f.block->warpgroups.size()) Fail("wgmma in a warpgroup of fewer than 128 threads");
  return *f.block->warpgroups[i];
}

/// Call f(register, element of the 64 x n matrix) for the registers of a thread.
template <typename F>
void ForEachRegister(int thread, int n, const F& f) {
  const int lane = thread % 32, row = thread % 128 / 32 * 16 + lane / 4;
  for (int i = 0; i < n / 2; ++i) f(i, (row + i % 4 / 2 * 8) * n + i / 4 * 8 + lane % 4 * 2 + i % 2);
}

/// Issue a product. `fragment`: four registers of A, or null.
inline void IssueProduct(Product want, float* d, const uint32_t* fragment) {
  Fibre& f = *state.current;
  Warpgroup& group = ThisWarpgroup();
  const uint64_t number = f.products++;
  if (number < group.executed) Fail("threads of a warpgroup issue different products");
  const size_t at = size_t(number - group.executed);
  if (at > group.queue.size()) Fail("threads of a warpgroup issue different products");
  if (at == group.queue.size()) group.queue.push_back(want);
  Product& p = group.queue[at];
  if (p.kind != want.kind || p.n != want.n || p.transpose_a != want.transpose_a || p.transpose_b != want.transpose_b ||
      p.from_registers != want.from_registers || p.accumulate != want.accumulate || p.a != want.a || p.b != want.b) {
    Fail("threads of a warpgroup issue different products (shape, descriptors or accumulate)");
  }
  InFlight* mine = nullptr;
  for (InFlight& x : f.in_flight) {
    if (x.d == d) mine = &x;
  }
  if (mine == nullptr) {
    if (!f.is_fenced) Fail("a product on registers that were touched since the last WgmmaFence");
    if (p.sum == nullptr) {
      p.sum = std::make_shared<Accumulator>();
      p.sum->sum.assign(size_t(64) * p.n, NAN);
    }
    f.in_flight.push_back({d, p.n / 2, number, p.sum});
    ForEachRegister(f.thread, p.n, [&](int i, int element) {
      if (p.accumulate) p.sum->sum[element] = d[i];
      d[i] = NAN;
    });
  } else {
    if (p.sum == nullptr) p.sum = mine->sum;
    if (p.sum != mine->sum || mine->count != p.n / 2) Fail("threads of a warpgroup accumulate in different registers");
    mine->last = number;
  }
  if (fragment != nullptr) {
    if (!f.is_fenced) Fail("a product reads registers that were touched since the last WgmmaFence");
    const int element = BytesOf(p.kind), per_word = 4 / element, depth = 32 / element;
    p.fragment.resize(size_t(64) * depth);
    const int lane = f.thread % 32, row = f.thread % 128 / 32 * 16 + lane / 4;
    for (int i = 0; i < 4; ++i) {
      for (int j = 0; j < per_word; ++j) {
        unsigned char bytes[4];
        std::memcpy(bytes, &fragment[i], 4);
        const int k = i / 2 * (depth / 2) + lane % 4 * per_word + j;
        p.fragment[size_t(row + i % 2 * 8) * depth + k] = ValueOf(p.kind, bytes + j * element);
      }
    }
  }
  if (++p.arrived == 128) {
    Block* const block = f.block;
    Later("wgmma", [block, &group] { group.ExecuteNext(*block); });
  }
}

inline void CommitProducts() { state.current->product_groups.push_back(state.current->products); }

/// Wait until all but the latest `pending` groups are finished, and write their accumulators.
inline void WaitProducts(size_t pending) {
  Fibre& f = *state.current;
  f.is_fenced = false;
  if (f.product_groups.size() <= pending) return;
  const uint64_t until = f.product_groups[f.product_groups.size() - 1 - pending];
  f.product_groups.erase(f.product_groups.begin(), f.product_groups.end() - pending);
  Warpgroup& group = ThisWarpgroup();
  while (group.executed < until)
    Wait(group.waiting, "wgmma products, of which were issued", uint32_t(until), uint32_t(f.products));
  for (size_t i = 0; i < f.in_flight.size();) {
    InFlight& x = f.in_flight[i];
    if (x.last >= until) {
      ++i;
      continue;
    }
    ForEachRegister(f.thread, x.count * 2, [&](int r, int element) { x.d[r] = x.sum->sum[element]; });
    f.in_flight.erase(f.in_flight.begin() + i);
  }
}

// wgmma and TMA see ordinary stores after a FenceAsyncProxy of the thread that stored. Which thread stored is known for
// the ptx wrappers, in units of 16 bytes. Stores through pointers are found by comparing with the memory at the last fence
// of any thread.
inline void MarkStore(uint32_t address, uint32_t bytes) {
  Fibre& f = *state.current;
  Block& block = BlockOf(*f.block, address);
  const uint64_t mark = uint64_t(f.thread + 1) << 32 | f.proxy_epoch;
  for (uint32_t i = OffsetOf(address) / 16; i <= (OffsetOf(address) + bytes - 1) / 16; ++i) block.unfenced[i] = mark;
}
inline void Publish() {
  Block& block = ThisBlock();
  ++state.current->proxy_epoch;
  std::memcpy(block.published.data() + DYNAMIC_BASE, block.memory + DYNAMIC_BASE, state.dynamic_bytes);
  std::memcpy(block.published.data() + STATIC_BASE, block.memory + STATIC_BASE, state.static_bytes);
}
/// Write to shared memory what wgmma and TMA see without a fence: what copies write, or NaN where `data` is null.
inline void Land(Block& from, uint32_t address, const void* data, uint32_t bytes) {
  Block& block = BlockOf(from, address);
  for (unsigned char* to : {Memory(from, address, bytes), block.published.data() + OffsetOf(address)}) {
    if (data == nullptr) {
      std::memset(to, 0xff, bytes);
    } else {
      std::memcpy(to, data, bytes);
    }
  }
  for (uint32_t i = OffsetOf(address) / 16; i <= (OffsetOf(address) + bytes - 1) / 16; ++i) block.unfenced[i] = 0;
}
inline void CheckFenced(Block& block, uint32_t address, uint32_t bytes) {
  const uint32_t at = OffsetOf(address);
  if (std::memcmp(block.memory + at, block.published.data() + at, bytes) != 0) {
    Fail(Format("wgmma or TMA reads shared address 0x%x, stored without FenceAsyncProxy", at));
  }
  uint64_t& mark = block.unfenced[at / 16];
  if (mark == 0) return;
  const uint32_t thread = uint32_t(mark >> 32) - 1;
  if (block.fibres[thread].proxy_epoch == uint32_t(mark)) {
    Fail(Format("wgmma or TMA reads shared address 0x%x, which thread %u stored without FenceAsyncProxy", at, thread));
  }
  mark = 0;
}

}  // namespace emulation
