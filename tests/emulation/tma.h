// SPDX-License-Identifier: Apache-2.0
// Copies: tensor boxes, bulk copies, cp.async. The destination of a load is NaN from its issue until it lands.
#pragma once
#include "wgmma.h"

namespace emulation {

/// Contents that the emulated driver writes into a CUtensorMap.
struct TensorMap {
  uint64_t mark;
  unsigned char* data;
  uint64_t size[5], stride[4];
  uint16_t box[5];
  uint8_t rank, element, swizzle;
};
static_assert(sizeof(TensorMap) <= sizeof(CUtensorMap), "CUtensorMap");
constexpr uint64_t TENSOR_MAP_MARK = 0x74656e736f726d61ull;

/// cuTensorMapEncodeTiled.
inline CUresult EncodeTiled(CUtensorMap* map, CUtensorMapDataType type, cuuint32_t rank, void* data,
                            const cuuint64_t* size, const cuuint64_t* stride, const cuuint32_t* box,
                            const cuuint32_t* step, CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
                            CUtensorMapL2promotion, CUtensorMapFloatOOBfill) {
  TensorMap t{};
  t.mark = TENSOR_MAP_MARK, t.data = static_cast<unsigned char*>(data), t.rank = uint8_t(rank);
  switch (type) {
    case CU_TENSOR_MAP_DATA_TYPE_UINT8:
      t.element = 1;
      break;
    case CU_TENSOR_MAP_DATA_TYPE_UINT16:
    case CU_TENSOR_MAP_DATA_TYPE_FLOAT16:
    case CU_TENSOR_MAP_DATA_TYPE_BFLOAT16:
      t.element = 2;
      break;
    case CU_TENSOR_MAP_DATA_TYPE_UINT32:
    case CU_TENSOR_MAP_DATA_TYPE_INT32:
    case CU_TENSOR_MAP_DATA_TYPE_FLOAT32:
      t.element = 4;
      break;
    default:
      return CUDA_ERROR_INVALID_VALUE;
  }
  if (rank < 1 || rank > 5 || reinterpret_cast<uintptr_t>(map) % 64 != 0 ||
      interleave != CU_TENSOR_MAP_INTERLEAVE_NONE) {
    return CUDA_ERROR_INVALID_VALUE;
  }
  if (reinterpret_cast<uintptr_t>(data) % 16 != 0) return CUDA_ERROR_INVALID_VALUE;
  for (cuuint32_t i = 0; i < rank; ++i) {
    if (size[i] < 1 || size[i] > 1ull << 32 || box[i] < 1 || box[i] > 256 || step[i] != 1)
      return CUDA_ERROR_INVALID_VALUE;
    if (i > 0 && (stride[i - 1] % 16 != 0 || stride[i - 1] >= 1ull << 40)) return CUDA_ERROR_INVALID_VALUE;
    t.size[i] = size[i], t.box[i] = uint16_t(box[i]);
    if (i > 0) t.stride[i - 1] = stride[i - 1];
  }
  const uint32_t inner = box[0] * t.element;
  uint32_t width = 0;  // bytes of a row of a swizzled box
  switch (swizzle) {
    case CU_TENSOR_MAP_SWIZZLE_NONE:
      t.swizzle = 0;
      break;
    case CU_TENSOR_MAP_SWIZZLE_32B:
      t.swizzle = 1, width = 32;
      break;
    case CU_TENSOR_MAP_SWIZZLE_64B:
      t.swizzle = 3, width = 64;
      break;
    case CU_TENSOR_MAP_SWIZZLE_128B:
      t.swizzle = 7, width = 128;
      break;
    default:
      return CUDA_ERROR_INVALID_VALUE;
  }
  if (inner % 16 != 0 || (width != 0 && inner > width)) return CUDA_ERROR_INVALID_VALUE;
  std::memset(map, 0, sizeof *map);
  std::memcpy(map, &t, sizeof t);
  return CUDA_SUCCESS;
}

using Coordinates = std::vector<int>;

inline TensorMap MapAt(const void* map, size_t coordinates) {
  TensorMap t;
  if (reinterpret_cast<uintptr_t>(map) % 64 != 0) Fail("a tensor map is not aligned to 64 bytes");
  std::memcpy(&t, map, sizeof t);
  if (t.mark != TENSOR_MAP_MARK) Fail("not a tensor map");
  if (t.rank != coordinates) Fail(Format("%d coordinates for a tensor map of rank %d", int(coordinates), t.rank));
  return t;
}

inline uint32_t BoxBytes(const TensorMap& t) {
  uint32_t bytes = t.element;
  for (int i = 0; i < t.rank; ++i) bytes *= t.box[i];
  return bytes;
}

/// Call f(offset in shared memory from the start of the box, global address or null, valid bytes before and of this
/// piece) for each 16 bytes of a box.
template <typename F>
void ForEachChunk(const TensorMap& t, const Coordinates& at, const F& f) {
  const int64_t inner = int64_t(t.box[0]) * t.element;
  // A row narrower than its swizzle is padded or not, depending on the reading of the documents: not emulated.
  const int64_t width = t.swizzle == 7 ? 128 : t.swizzle == 3 ? 64 : t.swizzle == 1 ? 32 : inner;
  if (width != inner) Fail("the rows of a box are narrower than its swizzle");
  uint32_t rows = 1;
  for (int i = 1; i < t.rank; ++i) rows *= t.box[i];
  for (uint32_t row = 0; row < rows; ++row) {
    bool inside = true;
    unsigned char* p = t.data;
    uint32_t rest = row;
    for (int i = 1; i < t.rank; ++i) {
      const int64_t x = int64_t(at[i]) + rest % t.box[i];
      rest /= t.box[i];
      inside = inside && x >= 0 && uint64_t(x) < t.size[i];
      p += x * int64_t(t.stride[i - 1]);
    }
    for (int64_t byte = 0; byte < inner; byte += 16) {
      const int64_t first = int64_t(at[0]) * t.element + byte, end = int64_t(t.size[0]) * t.element;
      const int64_t skip = std::min<int64_t>(16, std::max<int64_t>(0, -first));
      const int64_t valid = inside ? std::max<int64_t>(0, std::min<int64_t>(16, end - first) - skip) : 0;
      f(uint32_t(row * inner + byte), p + first + skip, uint32_t(skip), uint32_t(valid));
    }
  }
}
inline uint32_t Swizzled(const TensorMap& t, uint32_t address) { return address ^ ((address >> 7 & t.swizzle) << 4); }

/// Load a box to `to` in the blocks of `ranks` (bits of the cluster) and signal its bytes to `barrier` there. A local
/// load has the bit of its own block.
inline void LoadBoxLater(uint32_t to, const void* map, uint32_t barrier, const Coordinates& at, uint32_t ranks) {
  const TensorMap t = MapAt(map, at.size());
  Block& issuer = ThisBlock();
  if (OffsetOf(to) % 128 != 0) Fail(Format("TMA to shared address 0x%x, which is not aligned to 128", OffsetOf(to)));
  if (ranks == 0 || ranks >> state.blocks.size() != 0) Fail(Format("TMA to blocks 0x%x of the cluster", ranks));
  for (size_t rank = 0; rank < state.blocks.size(); ++rank) {
    if ((ranks >> rank & 1) == 0) continue;
    Block* const block = state.blocks[rank].get();
    if (block->alive == 0) Fail("TMA to a block that has left");
    Land(*block, OffsetOf(to), nullptr, BoxBytes(t));
    const uint32_t offset = OffsetOf(to), signal = OffsetOf(barrier);
    MbarrierAt(issuer, InCluster(signal, uint32_t(rank)));
    Later("TMA load", [=] {
      ForEachChunk(t, at, [&](uint32_t from_start, const unsigned char* from, uint32_t skip, uint32_t valid) {
        const uint32_t address = Swizzled(t, offset + from_start);
        unsigned char chunk[16] = {};
        if (valid > 0) std::memcpy(chunk + skip, from, valid);
        Land(*block, address, chunk, 16);
      });
      CompleteBytes(*block, signal, BoxBytes(t));
    });
  }
  MaybeYield();
}

/// Store a box, as part of the group of stores that this thread has open.
inline void StoreBoxLater(const void* map, uint32_t from, const Coordinates& at) {
  const TensorMap t = MapAt(map, at.size());
  Fibre& f = *state.current;
  Block* const block = f.block;
  if (OffsetOf(from) % 128 != 0) Fail(Format("TMA from shared address 0x%x, not aligned to 128", OffsetOf(from)));
  auto store = std::make_shared<BulkStore>();
  auto taken = std::make_shared<std::vector<unsigned char>>();
  store->read = [=] {
    ForEachChunk(t, at, [&](uint32_t from_start, unsigned char*, uint32_t, uint32_t) {
      const uint32_t address = Swizzled(t, OffsetOf(from) + from_start);
      CheckFenced(*block, address, 16);
      const unsigned char* chunk = Memory(*block, address, 16);
      taken->insert(taken->end(), chunk, chunk + 16);
    });
  };
  store->write = [=] {
    size_t chunk = 0;
    ForEachChunk(t, at, [&](uint32_t, unsigned char* to, uint32_t skip, uint32_t valid) {
      if (valid > 0) std::memcpy(to, taken->data() + 16 * chunk + skip, valid);
      ++chunk;
    });
  };
  f.open_stores.push_back(store);
}

/// Copy `bytes` from global memory and signal them to `barrier` (cp.async.bulk).
inline void LoadBulkLater(uint32_t to, const void* from, uint32_t bytes, uint32_t barrier) {
  Block* const block = &ThisBlock();
  if (reinterpret_cast<uintptr_t>(from) % 16 != 0 || bytes % 16 != 0) Fail("bulk copies are in units of 16 bytes");
  Memory(to, bytes, 16);
  Land(*block, to, nullptr, bytes);
  MbarrierAt(*block, barrier);
  Later("bulk load", [=] {
    Land(*block, to, from, bytes);
    CompleteBytes(*block, barrier, bytes);
  });
  MaybeYield();
}

/// Copy `bytes` to global memory, as part of the open group of stores.
inline void StoreBulkLater(void* to, uint32_t from, uint32_t bytes) {
  Block* const block = &ThisBlock();
  if (reinterpret_cast<uintptr_t>(to) % 16 != 0 || bytes % 16 != 0) Fail("bulk copies are in units of 16 bytes");
  auto store = std::make_shared<BulkStore>();
  auto taken = std::make_shared<std::vector<unsigned char>>();
  store->read = [=] {
    const unsigned char* p = Memory(*block, from, bytes, 16);
    for (uint32_t i = 0; i < bytes; i += 16) CheckFenced(*block, OffsetOf(from) + i, 16);
    taken->assign(p, p + bytes);
  };
  store->write = [=] { std::memcpy(to, taken->data(), bytes); };
  state.current->open_stores.push_back(store);
}

inline void CommitBulkStores() {
  Fibre& f = *state.current;
  for (auto& store : f.open_stores) {
    Later("TMA store", [store] {
      store->Read();
      Later("write of a TMA store", [store] { store->Write(); });
    });
  }
  f.store_groups.push_back(std::move(f.open_stores));
  f.open_stores.clear();
  MaybeYield();
}
/// Wait until all but the latest `pending` groups are read from shared memory or, with `written`, are in global memory.
inline void WaitBulkStores(size_t pending, bool written) {
  Fibre& f = *state.current;
  if (f.store_groups.size() <= pending) return;
  Yield();  // other threads may touch what is not read yet
  for (size_t i = 0; i + pending < f.store_groups.size(); ++i) {
    for (auto& store : f.store_groups[i]) written ? store->Write() : store->Read();
  }
  if (written) f.store_groups.erase(f.store_groups.begin(), f.store_groups.end() - pending);
}

/// cp.async: copies land at an event, or at the latest when they are waited for.
inline void CopyLater(uint32_t to, const void* from, uint32_t bytes, bool valid) {
  if (valid && reinterpret_cast<uintptr_t>(from) % bytes != 0) Fail(Format("cp.async of %u bytes: not aligned", bytes));
  Memory(to, bytes, bytes);
  Land(ThisBlock(), to, nullptr, bytes);
  state.current->copies.push_back({to, from, bytes, valid});
}
inline void FinishCopies(Fibre& f, size_t until) {
  for (; f.copies_done < until; ++f.copies_done) {
    const Copy& c = f.copies[f.copies_done];
    const unsigned char zeros[16] = {};
    Land(*f.block, c.to, c.valid ? c.from : zeros, c.bytes);  // kernels need no fence after cp.async
  }
}
inline void CommitCopies() {
  Fibre& f = *state.current;
  f.copy_groups.push_back(f.copies.size());
}
inline void WaitCopies(size_t pending) {
  Fibre& f = *state.current;
  if (f.copy_groups.size() <= pending) return;
  Yield();
  FinishCopies(f, f.copy_groups[f.copy_groups.size() - 1 - pending]);
  f.copy_groups.erase(f.copy_groups.begin(), f.copy_groups.end() - pending);
}
/// Arrive when the copies issued so far have landed.
inline void ArriveAfterCopies(uint32_t barrier) {
  Fibre* const f = state.current;
  const size_t until = f->copies.size();
  MbarrierAt(*f->block, barrier);
  Later("cp.async", [=] {
    FinishCopies(*f, until);
    UpdateMbarrier(*f->block, barrier, 1, 0);
  });
  MaybeYield();
}

/// st.async: store to another block and signal the bytes there.
inline void SendLater(uint32_t to, const void* words, uint32_t bytes, uint32_t barrier) {
  Block* const block = &ThisBlock();
  std::array<unsigned char, 16> copy;
  std::memcpy(copy.data(), words, bytes);
  Memory(*block, to, bytes, bytes);
  MbarrierAt(*block, barrier);
  Later("st.async", [=] {
    Land(*block, to, copy.data(), bytes);
    CompleteBytes(*block, barrier, bytes);
  });
}

}  // namespace emulation
