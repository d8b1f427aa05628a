// SPDX-License-Identifier: Apache-2.0
// A row that a group of blocks reads and writes in chunks: each block owns consecutive chunks, and each of its warps
// loads one chunk at a time into registers. Also sums over the columns of chunks.
#pragma once
#include "../sampling.cuh"

namespace flashinfer {
namespace sampling {

// The blocks that share a row: a cluster, or a single block, for which synchronisation between blocks is a
// no-op.

struct Cluster {
  static __device__ __forceinline__ int Size() { return ptx::ClusterSize(); }
  static __device__ __forceinline__ int Rank() { return ptx::ClusterRank(); }
  static __device__ __forceinline__ void Arrive() { ptx::ClusterArrive(); }
  static __device__ __forceinline__ void Wait() { ptx::ClusterWait(); }
  static __device__ __forceinline__ void Sync() { ptx::ClusterSync(); }
  /// Return the address of a shared-memory variable in the block of another rank.
  template <typename T>
  static __device__ __forceinline__ T* InBlock(T* local, int rank) {
    return ptx::InBlock(local, rank);
  }
};

struct SingleCta {
  static __device__ __forceinline__ int Size() { return 1; }
  static __device__ __forceinline__ int Rank() { return 0; }
  static __device__ __forceinline__ void Arrive() {}
  static __device__ __forceinline__ void Wait() {}
  static __device__ __forceinline__ void Sync() { __syncthreads(); }
  template <typename T>
  static __device__ __forceinline__ T* InBlock(T* local, int) {
    return local;
  }
};

constexpr int CHUNK_VECTORS = 8;                     // vectors of four columns per lane
constexpr int CHUNK_COLUMNS = 4 * CHUNK_VECTORS;     // columns per lane
constexpr int CHUNK = CHUNK_VECTORS * WARP_COLUMNS;  // columns
constexpr int CHUNK_THREADS = 256, CHUNK_WARPS = CHUNK_THREADS / 32;

/// Map a column to an integer key with the same order. SIGNED: columns are any floats; otherwise weights.
template <bool SIGNED>
__device__ __forceinline__ uint32_t ColumnKey(float x) {
  return SIGNED ? OrderedKey(x) : Bits(x);
}
template <bool SIGNED>
__device__ __forceinline__ float ColumnOfKey(uint32_t key) {
  return FromBits(!SIGNED ? key : key >> 31 ? key ^ 0x80000000u : ~key);
}

template <typename T>
__device__ __forceinline__ bool IsVector(const T* p) {
  return reinterpret_cast<uintptr_t>(p) % sizeof(Vec<T, 4>) == 0;
}

/// Load four columns.
template <typename T>
__device__ __forceinline__ void LoadVector(const T* from, float (&x)[4]) {
  const auto v = Vec<T, 4>::Load(from);
#pragma unroll
  for (int e = 0; e < 4; ++e) x[e] = ToFloat(v[e]);
}

/// Maps an input column to its output. SIGNED: logits, which become -inf below the threshold. Otherwise weights, which
/// become 0 below the threshold and are divided by the sum of the kept ones.
template <bool SIGNED>
struct KeptColumns {
  uint32_t threshold;  // key of the smallest kept column
  Scale scale;
  float normaliser;

  static constexpr float FILL = SIGNED ? -INFINITY : 0.f;

  /// `mass` is 512 times the sum of the scaled weights.
  __device__ __forceinline__ KeptColumns(uint32_t threshold, const Scale& scale, uint64_t mass)
      : threshold(threshold), scale(scale), normaliser(mass == 0 ? 0.f : 512.f / float(mass)) {}
  __device__ __forceinline__ float operator()(float x) const {
    if constexpr (SIGNED) return OrderedKey(x) >= threshold ? x : FILL;
    return Bits(x) >= threshold ? scale(x) * normaliser : FILL;
  }
};

/// Sums over columns.
struct ColumnSums {
  uint64_t count, quanta, mass;

  template <bool SIGNED>
  __device__ __forceinline__ void Add(float x, const Scale& scale) {
    ++count;
    if constexpr (!SIGNED) quanta += QuantumOf(x, scale), mass += ColumnMass(x, scale);
  }
  __device__ __forceinline__ ColumnSums OfWarp() const { return {WarpSum(count), WarpSum(quanta), WarpSum(mass)}; }
  /// Add the sums of the warp to sums in shared memory.
  __device__ __forceinline__ void AddTo(ColumnSums& sums) const {
    const ColumnSums mine = OfWarp();
    if (threadIdx.x % 32 != 0) return;
    const auto add = [](uint64_t& to, uint64_t x) { atomicAdd(reinterpret_cast<unsigned long long*>(&to), x); };
    add(sums.count, mine.count), add(sums.quanta, mine.quanta), add(sums.mass, mine.mass);
  }
  __device__ __forceinline__ ColumnSums operator+(const ColumnSums& other) const {
    return {count + other.count, quanta + other.quanta, mass + other.mass};
  }
};

/// The chunks of a row, divided among the blocks of a GROUP (Cluster or SingleCta).
template <typename T, bool SIGNED, typename GROUP = Cluster>
struct RowChunks {
  const T* input;
  T* out;
  int vocab;
  int first, count;  // first chunk and number of chunks of this block
  int most;          // largest number of chunks of any block

  __device__ __forceinline__ RowChunks(const RowParams<T>& p, int64_t row)
      : input(p.input + row * p.input_stride), out(p.out + row * p.out_stride), vocab(int(p.vocab)) {
    const int all = (vocab + CHUNK - 1) / CHUNK, blocks = GROUP::Size(), rank = GROUP::Rank();
    first = all * rank / blocks;
    count = all * (rank + 1) / blocks - first;
    most = (all + blocks - 1) / blocks;
  }

  static __device__ __forceinline__ int Lane() { return threadIdx.x % 32; }

  /// Call f(chunk) for each chunk of this warp.
  template <typename F>
  __device__ __forceinline__ void ForEach(const F& f) const {
#pragma unroll 1
    for (int c = threadIdx.x / 32; c < count; c += CHUNK_WARPS) f(c);
  }

  /// Return this lane's first column of a chunk, and whether all columns of the chunk exist.
  __device__ __forceinline__ int Column(int c) const { return (first + c) * CHUNK + Lane() * 4; }
  __device__ __forceinline__ bool IsWhole(int c) const { return (first + c + 1) * CHUNK <= vocab; }

  /// Load this lane's columns. Returns a bit mask of the columns that exist.
  __device__ __forceinline__ uint32_t Load(int c, float (&x)[CHUNK_VECTORS][4]) const {
    const int column = Column(c);
    if (IsVector<T>(input) && IsWhole(c)) {
#pragma unroll
      for (int j = 0; j < CHUNK_VECTORS; ++j) LoadVector(input + column + j * WARP_COLUMNS, x[j]);
      return ~0u;
    }
    uint32_t valid = 0;
#pragma unroll
    for (int i = 0; i < CHUNK_COLUMNS; ++i) {
      const int at = column + i / 4 * WARP_COLUMNS + i % 4;
      x[i / 4][i % 4] = at < vocab ? ToFloat(input[at]) : 0.f;
      valid |= uint32_t(at < vocab) << i;
    }
    return valid;
  }

  __device__ __forceinline__ void Store(int c, const float (&x)[CHUNK_VECTORS][4]) const {
    const int column = Column(c);
    const bool is_whole = IsVector<T>(out) && IsWhole(c);
#pragma unroll
    for (int j = 0; j < CHUNK_VECTORS; ++j) {
      if (is_whole) {
        RoundTo<T, 4>(x[j]).Store(out + column + j * WARP_COLUMNS);
      } else {
#pragma unroll
        for (int e = 0; e < 4; ++e) {
          const int at = column + j * WARP_COLUMNS + e;
          if (at < vocab) out[at] = FromFloat<T>(x[j][e]);
        }
      }
    }
  }

  /// Read the row again and write its output.
  __device__ __forceinline__ void Copy(const KeptColumns<SIGNED>& kept) const {
    ForEach([&](int c) {
      float x[CHUNK_VECTORS][4];
      Load(c, x);
#pragma unroll
      for (int i = 0; i < CHUNK_COLUMNS; ++i) {
        float& value = x[i / 4][i % 4];
        value = kept(SIGNED ? value : Positive(value));
      }
      Store(c, x);
    });
  }

  /// Load or store four columns; columns past the end are 0, or not stored.
  __device__ __forceinline__ void LoadFour(int column, float (&x)[4]) const {
    if (IsVector<T>(input) && column + 4 <= vocab) {
      LoadVector(input + column, x);
    } else {
#pragma unroll
      for (int e = 0; e < 4; ++e) x[e] = column + e < vocab ? ToFloat(input[column + e]) : 0.f;
    }
  }
  __device__ __forceinline__ void StoreFour(int column, const float (&x)[4]) const {
    if (IsVector<T>(out) && column + 4 <= vocab) {
      RoundTo<T, 4>(x).Store(out + column);
    } else {
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        if (column + e < vocab) out[column + e] = FromFloat<T>(x[e]);
      }
    }
  }
};

// Sums of the weights above a bound in a row whose largest weight is not known yet, only that of a sample. Quanta are
// relative to the largest weight of the row, so they are summed for each exponent that it may turn out to have.

constexpr int CERTAIN_MARGIN = 3;  // octaves by which the largest weight may exceed the sample's
constexpr int CERTAIN_BITS = 13;   // low bits of quanta that are summed separately
// Minimum quanta of the bound: masses are then integers for each of these exponents.
constexpr float CERTAIN_LEAST = 0x1p17f;

struct CertainShared {
  int32_t emax;  // exponent of the sample's largest weight
  bool is_exact;
  uint64_t count, mass, quanta[CERTAIN_MARGIN + 1];

  static __device__ __forceinline__ CertainShared For(uint32_t high, int emax) {
    const Scale scale(emax);
    return {emax, scale.first == 1.f && scale(FromBits(min(high, Bits(INFINITY)))) >= CERTAIN_LEAST, 0, 0, {}};
  }
  /// True if the sums are known for the exponent of the row's largest weight.
  __device__ __forceinline__ bool Has(int of_row) const { return is_exact && of_row - emax <= CERTAIN_MARGIN; }
  __device__ __forceinline__ ColumnSums Of(int of_row) const {
    return {count, quanta[of_row - emax], mass >> (of_row - emax)};
  }
};

/// Sums of one thread.
struct CertainSums {
  const float high, factor;
  uint32_t count = 0, rounded[CERTAIN_MARGIN + 1] = {};
  uint64_t whole = 0;
  int64_t part = 0;

  __device__ __forceinline__ CertainSums(uint32_t high, int emax)
      : high(FromBits(min(high, Bits(INFINITY)))), factor(Scale(emax).second * (1.f / float(1 << CERTAIN_BITS))) {}

  /// Add the weights of a chunk. Adding 2^23 rounds to an integer in the lowest bits of the float, which is faster than
  /// conversions and 64-bit sums. The remainder is exact and signed, so it is added to the middle of an octave.
  __device__ __forceinline__ void Add(const float (&x)[CHUNK_VECTORS][4]) {
    constexpr float INTEGER = 0x1p23f, SIGNED_INTEGER = 0x1.8p23f;
    uint32_t wholes = 0, parts = 0;
#pragma unroll
    for (int i = 0; i < CHUNK_COLUMNS; ++i) {
      const float value = x[i / 4][i % 4] > high ? x[i / 4][i % 4] : 0.f;
      const float sum = fmaf(value, factor, INTEGER), rest = fmaf(value, factor, INTEGER - sum);
      wholes += Bits(sum), parts += Bits(fmaf(rest, float(512 << CERTAIN_BITS), SIGNED_INTEGER));
#pragma unroll
      for (int octave = 0; octave <= CERTAIN_MARGIN; ++octave) {
        rounded[octave] += Bits(fmaf(rest, float(1 << (CERTAIN_BITS - octave)), SIGNED_INTEGER));
      }
    }
    whole += wholes - CHUNK_COLUMNS * Bits(INTEGER);
    part += int32_t(parts - CHUNK_COLUMNS * Bits(SIGNED_INTEGER));
#pragma unroll
    for (int octave = 0; octave <= CERTAIN_MARGIN; ++octave) rounded[octave] -= CHUNK_COLUMNS * Bits(SIGNED_INTEGER);
  }

  /// Add the sums of the warp to those in shared memory.
  __device__ __forceinline__ void AddTo(CertainShared& shared) const {
    const auto add = [](uint64_t& to, uint64_t x) {
      x = WarpSum(x);
      if (threadIdx.x % 32 == 0) atomicAdd(reinterpret_cast<unsigned long long*>(&to), x);
    };
    add(shared.count, count), add(shared.mass, (whole << (CERTAIN_BITS + 9)) + part);
#pragma unroll
    for (int octave = 0; octave <= CERTAIN_MARGIN; ++octave) {
      add(shared.quanta[octave], (whole << (CERTAIN_BITS - octave)) + int64_t(int32_t(rounded[octave])));
    }
  }
};

}  // namespace sampling
}  // namespace flashinfer
