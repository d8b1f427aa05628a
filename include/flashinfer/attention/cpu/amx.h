// SPDX-License-Identifier: Apache-2.0
// q.k and p.v of a bfloat16 tile with the matrix registers of AMX (Intel SDM, "TDPBF16PS"): a register is 16 rows of 64
// bytes, and one instruction multiplies 16 x 32 by 32 x 16. The right operand holds pairs of rows in 32-bit words, so
// keys are transposed as words and values interleaved in pairs; only the sums are floats.
#pragma once
#include "products.h"

#if defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__AVX512BF16__) && defined(__linux__)
#define FLASHINFER_AMX 1
#include <immintrin.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace flashinfer {
namespace attention {

#ifdef FLASHINFER_AMX

namespace amx {

constexpr int ROWS = 16, WORDS = 16;  // rows and 32-bit words of a register

/// Return true if this process may use the registers: Linux requires one permission request.
inline bool Enabled() {
  constexpr long REQUEST_PERMISSION = 0x1023, TILE_DATA = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  static const bool enabled = syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
  return enabled;
}

struct alignas(64) Config {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {ROWS, ROWS, ROWS, ROWS, ROWS, ROWS, ROWS, ROWS};
};

/// Configure all registers at full size for this thread and restore the previous configuration afterwards (torch's
/// kernels have their own).
class Session {
 public:
  Session() {
    _tile_storeconfig(&before_);
    const Config full;
    _tile_loadconfig(&full);
  }
  ~Session() {
    if (before_.palette == 0) {
      _tile_release();
    } else {
      _tile_loadconfig(&before_);
    }
  }

 private:
  Config before_;
};

/// Compute c [16][64] = a [16][32 * steps] b [steps][16 words][64]; lda in bytes, b has rows of `ldb` words.
inline void Multiply64(const void* a, int64_t lda, const uint32_t* b, int64_t ldb, int steps, bool adds, float* c,
                       int64_t ldc) {
  if (adds) {
    _tile_loadd(0, c, ldc * 4);
    _tile_loadd(1, c + 16, ldc * 4);
    _tile_loadd(2, c + 32, ldc * 4);
    _tile_loadd(3, c + 48, ldc * 4);
  } else {
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
  }
  for (int step = 0; step < steps; ++step, b += WORDS * ldb) {
    _tile_loadd(4, static_cast<const char*>(a) + step * 64, lda);
    _tile_loadd(5, b, ldb * 4);
    _tile_loadd(6, b + 16, ldb * 4);
    _tile_dpbf16ps(0, 4, 5);
    _tile_loadd(5, b + 32, ldb * 4);
    _tile_dpbf16ps(1, 4, 6);
    _tile_loadd(6, b + 48, ldb * 4);
    _tile_dpbf16ps(2, 4, 5);
    _tile_dpbf16ps(3, 4, 6);
  }
  _tile_stored(0, c, ldc * 4);
  _tile_stored(1, c + 16, ldc * 4);
  _tile_stored(2, c + 32, ldc * 4);
  _tile_stored(3, c + 48, ldc * 4);
}

/// Compute the same for 16 columns, added to c.
inline void Multiply16(const void* a, int64_t lda, const uint32_t* b, int64_t ldb, int steps, float* c, int64_t ldc) {
  _tile_loadd(0, c, ldc * 4);
  for (int step = 0; step < steps; ++step, b += WORDS * ldb) {
    _tile_loadd(4, static_cast<const char*>(a) + step * 64, lda);
    _tile_loadd(5, b, ldb * 4);
    _tile_dpbf16ps(0, 4, 5);
  }
  _tile_stored(0, c, ldc * 4);
}

}  // namespace amx

template <typename Params, typename Operands>
class MatrixProducts {
 public:
  static constexpr bool SUPPORTED =
      std::is_same_v<typename Params::DTypeQ, bfloat16_t> && std::is_same_v<typename Params::DTypeKV, bfloat16_t> &&
      Params::POS_ENCODING != PosEncodingMode::kRoPELlama && Params::HEAD_DIM_QK % 32 == 0 &&
      Params::HEAD_DIM_PE % 32 == 0 && Params::HEAD_DIM_VO % 32 == 0 && KeepsQueries<Params, Operands>() &&
      KeepsKeys<Params, Operands>();
  static constexpr int MOST_DIRECT = 2;  ///< number of rows up to which DirectProducts is faster (heads of 128)

  static int64_t ScratchSize(int tile) {
    return int64_t(tile) * (D_QK + BLOCK_KEYS) / 2 + BLOCK_KEYS / 2 * (D_QK + D_VO) + D_VO / 2;
  }

  MatrixProducts(const Params& params, int tile, ScratchCursor& scratch)
      : params_(params),
        q_(reinterpret_cast<bfloat16_t*>(scratch.Take(int64_t(tile) * D_QK / 2))),
        p_(reinterpret_cast<bfloat16_t*>(scratch.Take(int64_t(tile) * BLOCK_KEYS / 2))),
        k_(reinterpret_cast<uint32_t*>(scratch.Take(BLOCK_KEYS * D_QK / 2))),
        v_(reinterpret_cast<uint32_t*>(scratch.Take(BLOCK_KEYS * D_VO / 2))),
        zeros_(reinterpret_cast<bfloat16_t*>(scratch.Take(D_VO / 2))) {
    std::memset(q_, 0, int64_t(tile) * D_QK * sizeof(bfloat16_t));  // zero the padding rows of tiles
    std::memset(p_, 0, int64_t(tile) * BLOCK_KEYS * sizeof(bfloat16_t));
    std::memset(zeros_, 0, D_VO * sizeof(bfloat16_t));
  }

  FLASHINFER_OUTLINED void LoadQueries(Operands&, const WorkItem& item, const TileRows& rows, int32_t) {
    for (int32_t r = 0; r < rows.count; ++r) {
      const int64_t token = item.qo_begin + rows.token[r], head = rows.head[r];
      bfloat16_t* row = q_ + int64_t(r) * D_QK;
      std::copy_n(params_.q + token * params_.q_stride_n + head * params_.q_stride_h, D_QK - PE, row);
      if constexpr (PE > 0) {
        std::copy_n(params_.q_pe + token * params_.q_pe_stride_n + head * params_.q_pe_stride_h, PE, row + D_QK - PE);
      }
    }
  }

  template <bool PAGED>
  FLASHINFER_OUTLINED void LoadKeys(Operands&, const KeyAddress<Params, PAGED>& keys, int32_t j, int32_t count,
                                    int32_t end) {
    for (int32_t i = 0; i < count && j + i + BLOCK_KEYS < end; ++i) keys.PrefetchRow(j + i + BLOCK_KEYS);
    for (int32_t base = 0; base < count; base += LANES) {
      const float *key[LANES], *rotary[LANES];  // words of two numbers; the last key is repeated beyond the end
      for (int32_t i = 0; i < LANES; ++i) {
        const int32_t at = j + std::min(base + i, count - 1);
        key[i] = reinterpret_cast<const float*>(keys.Key(at));
        if constexpr (PE > 0) rotary[i] = reinterpret_cast<const float*>(keys.RotaryKey(at));
      }
      TransposeRows(key, (D_QK - PE) / 2, reinterpret_cast<float*>(k_) + base);
      if constexpr (PE > 0) {
        TransposeRows(rotary, PE / 2, reinterpret_cast<float*>(k_) + (D_QK - PE) / 2 * BLOCK_KEYS + base);
      }
    }
    for (int32_t i = 0; i < (count + 31) / 32 * 32; i += 2) {
      InterleaveRows(i < count ? keys.Value(j + i) : zeros_, i + 1 < count ? keys.Value(j + i + 1) : zeros_,
                     v_ + i / 2 * D_VO);
    }
  }

  void Score(int32_t rows, float* s) const {
    for (int32_t row = 0; row < rows; row += amx::ROWS) {
      amx::Multiply64(q_ + int64_t(row) * D_QK, D_QK * 2, k_, BLOCK_KEYS, D_QK / 32, false, s + row * BLOCK_KEYS,
                      BLOCK_KEYS);
    }
  }

  void Accumulate(int32_t rows, int32_t count, const float* s, const float* scale, float* o) const {
    for (int32_t r = 0; r < rows; ++r) {
      for (int i = 0; i < BLOCK_KEYS; i += LANES) {
        const __m512 p = reinterpret_cast<__m512>(cpu::Load(s + r * BLOCK_KEYS + i));
        const __m256bh rounded = _mm512_cvtneps_pbh(p);
        std::memcpy(p_ + r * BLOCK_KEYS + i, &rounded, sizeof(rounded));
      }
      if (scale[r] != 1.f) {
        float* row = o + int64_t(r) * D_VO;
        for (int d = 0; d < D_VO; d += LANES) cpu::Store(row + d, cpu::Load(row + d) * scale[r]);
      }
    }
    const int steps = (count + 31) / 32;
    for (int32_t row = 0; row < rows; row += amx::ROWS) {
      const bfloat16_t* p = p_ + row * BLOCK_KEYS;
      float* to = o + int64_t(row) * D_VO;
      int d = 0;
      for (; d + 64 <= D_VO; d += 64) amx::Multiply64(p, BLOCK_KEYS * 2, v_ + d, D_VO, steps, true, to + d, D_VO);
      for (; d < D_VO; d += 16) amx::Multiply16(p, BLOCK_KEYS * 2, v_ + d, D_VO, steps, to + d, D_VO);
    }
  }

 private:
  static constexpr int D_QK = Params::HEAD_DIM_QK, D_VO = Params::HEAD_DIM_VO, PE = Params::HEAD_DIM_PE;

  static void InterleaveRows(const bfloat16_t* even, const bfloat16_t* odd, uint32_t* to) {
    for (int d = 0; d < D_VO; d += LANES) {
      const cpu::UintVec words = cpu::Widen(&even[d].bits) | (cpu::Widen(&odd[d].bits) << 16);
      std::memcpy(to + d, &words, sizeof(words));
    }
  }

  const Params& params_;
  const amx::Session session_;
  bfloat16_t *q_, *p_;
  uint32_t *k_, *v_;  // [D_QK / 2][BLOCK_KEYS] and [BLOCK_KEYS / 2][D_VO], words of two numbers
  bfloat16_t* zeros_;
};

#endif

/// Call f(Products) with the fastest class for this launch.
template <typename Params, typename Operands, typename F>
inline void ChooseProducts(const F& f) {
#ifdef FLASHINFER_AMX
  if constexpr (MatrixProducts<Params, Operands>::SUPPORTED) {
    if (amx::Enabled()) return f(static_cast<MatrixProducts<Params, Operands>*>(nullptr));
  }
#endif
  f(static_cast<FloatProducts<Params, Operands>*>(nullptr));
}

}  // namespace attention
}  // namespace flashinfer
