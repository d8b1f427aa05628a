// SPDX-License-Identifier: Apache-2.0
// Attention on the CPU: the entries of entry.h for host threads. A thread takes a block of the work list at a time and
// works through its keys BLOCK_KEYS at a time: keys and values become floats in scratch memory that stays in the cache,
// all rows of the tile use them, and the softmax is updated as it goes.
//   o = sum_j 2^(s_j - m) v_j / sum_j 2^(s_j - m),  s_j = LogitsTransform(q.k_j) * sm_scale_log2,  m = max_j s_j
// Everything is computed in float. Results do not depend on which thread takes what.
//   test  pytest tests/attention/test_native.py      bench  python benchmarks/bench_decode.py
#pragma once
#include <algorithm>
#include <cmath>
#include <memory>

#include "cpu_load.h"
#include "entry.h"
#include "variants.h"

namespace flashinfer {
namespace attention {

constexpr int BLOCK_KEYS = 64;

/// Runs items of one launch; scratch memory is the thread's own.
template <typename Params, typename Variant, bool PAGED>
class TileRunner {
 public:
  TileRunner(const Params& params, const WorkList& work, int tile)
      : params_(params),
        work_(work),
        tile_(tile),
        q_(int64_t(tile) * LD_QK),
        k_(BLOCK_KEYS * LD_QK),
        v_(BLOCK_KEYS * LD_VO),
        s_(int64_t(tile) * BLOCK_KEYS),
        o_(int64_t(tile) * LD_VO),
        m_(tile),
        d_(tile),
        rotation_(RotationOf(params)) {}

  void Run(const WorkItem& item, int32_t kv_head, int32_t slot) {
    const int32_t group = int32_t(params_.group.divisor);
    const int32_t kv_len = item.kv_len >= 0 ? item.kv_len : int32_t(params_.get_kv_len(item.request));
    const int32_t rows = std::min(tile_, item.qo_len * group - item.row_begin);
    const MaskOf<Params> mask(params_, item.qo_len, kv_len);
    Variant variant(params_, uint32_t(item.request), nullptr);
    LoadQueries(variant, item, kv_head, rows, kv_len);
    Start(variant, item, kv_head, rows);
    const int32_t first = TokenOf(item, 0), last = TokenOf(item, rows - 1);
    const int32_t begin = std::max(item.kv_start, mask.First(first));
    const int32_t end = std::min({item.kv_end, mask.End(last), kv_len});
    const KeyAddress<Params, PAGED> keys{params_, item.kv_begin, kv_head};
    for (int32_t j = begin; j < end; j += BLOCK_KEYS) {
      const int32_t count = std::min(BLOCK_KEYS, end - j);
      LoadKeys(variant, keys, j, count);
      Score(rows, count);
      Weigh(variant, mask, item, kv_head, rows, j, count);
      Accumulate(rows, count);
    }
    Finish(variant, item, kv_head, rows, slot);
  }

 private:
  static constexpr int D_QK = Params::HEAD_DIM_QK, D_VO = Params::HEAD_DIM_VO;
  static constexpr int LD_QK = Padded(D_QK), LD_VO = Padded(D_VO);
  static constexpr bool ROTATES = Params::POS_ENCODING == PosEncodingMode::kRoPELlama;

  static Rotation<D_QK> RotationOf(const Params& params) {
    if constexpr (ROTATES) {
      return Rotation<D_QK>(params.rope_rcp_scale, params.rope_rcp_theta);
    } else {
      return Rotation<D_QK>(0, 0);
    }
  }

  int32_t TokenOf(const WorkItem& item, int32_t row) const {
    return int32_t(params_.group.Divide(uint32_t(item.row_begin + row)));
  }
  int32_t HeadOf(const WorkItem& item, int32_t kv_head, int32_t row) const {
    const int32_t group = int32_t(params_.group.divisor);
    return kv_head * group + (item.row_begin + row) - TokenOf(item, row) * group;
  }

  void LoadQueries(Variant& variant, const WorkItem& item, int32_t kv_head, int32_t rows, int32_t kv_len) {
    constexpr int PE = Params::HEAD_DIM_PE;
    for (int32_t r = 0; r < rows; ++r) {
      const int64_t token = item.qo_begin + TokenOf(item, r), head = HeadOf(item, kv_head, r);
      float* row = &q_[int64_t(r) * LD_QK];
      LoadRow(params_.q + token * params_.q_stride_n + head * params_.q_stride_h, D_QK - PE, row);
      if constexpr (PE > 0) {
        LoadRow(params_.q_pe + token * params_.q_pe_stride_n + head * params_.q_pe_stride_h, PE, row + D_QK - PE);
      }
      if constexpr (ROTATES) rotation_.Apply(TokenOf(item, r) + kv_len - item.qo_len, row);
      for (int d = 0; d < D_QK; ++d) row[d] = variant.QueryTransform(params_, row[d]);
    }
  }

  /// The state before any key.
  void Start(Variant& variant, const WorkItem& item, int32_t kv_head, int32_t rows) {
    std::fill_n(&o_[0], int64_t(rows) * LD_VO, 0.f);
    for (int32_t r = 0; r < rows; ++r) {
      m_[r] = Variant::use_softmax ? -math::inf : 0.f;
      d_[r] = Variant::use_softmax ? 0.f : 1.f;
      float scale = 1.f;
      if (Variant::use_softmax && item.is_first) {
        variant.update_m_d(params_, 0u, uint32_t(HeadOf(item, kv_head, r)), m_[r], d_[r], scale);
      }
    }
  }

  void LoadKeys(Variant& variant, const KeyAddress<Params, PAGED>& keys, int32_t j, int32_t count) {
    for (int32_t i = 0; i < count; ++i) {
      float* row = &k_[int64_t(i) * LD_QK];
      keys.LoadKey(j + i, row);
      if constexpr (Params::SHARED_KV) {
        std::copy_n(row, D_VO, &v_[int64_t(i) * LD_VO]);
      } else {
        keys.LoadValue(j + i, &v_[int64_t(i) * LD_VO]);
      }
      if constexpr (ROTATES) rotation_.Apply(j + i, row);
      for (int d = 0; d < D_QK; ++d) row[d] = variant.KeyTransform(params_, row[d]);
    }
  }

  void Score(int32_t rows, int32_t count) {
    for (int32_t r = 0; r < rows; ++r) {
      for (int32_t i = 0; i < count; ++i) {
        Vec sum{};
        for (int d = 0; d < LD_QK; d += LANES) sum += cpu::Load(&q_[r * LD_QK + d]) * cpu::Load(&k_[i * LD_QK + d]);
        s_[r * BLOCK_KEYS + i] = cpu::ReduceSum(sum);
      }
    }
  }

  /// Scores become weights of the values, and the state of each row follows.
  void Weigh(Variant& variant, const MaskOf<Params>& mask, const WorkItem& item, int32_t kv_head, int32_t rows,
             int32_t j, int32_t count) {
    for (int32_t r = 0; r < rows; ++r) {
      const int32_t token = TokenOf(item, r), head = HeadOf(item, kv_head, r);
      const int32_t first = mask.First(token), end = mask.End(token);
      float* s = &s_[r * BLOCK_KEYS];
      float larger = m_[r];
      for (int32_t i = 0; i < count; ++i) {
        const float logit = variant.LogitsTransform(params_, s[i], uint32_t(item.request), uint32_t(token),
                                                    uint32_t(j + i), uint32_t(head), uint32_t(kv_head));
        bool visible = j + i >= first && j + i < end;
        visible = visible && variant.LogitsMask(params_, uint32_t(item.request), uint32_t(token), uint32_t(j + i),
                                                uint32_t(head), uint32_t(kv_head));
        if (mask.mask_mode == int32_t(MaskMode::kMultiItemScoring)) {
          visible = visible && VisibleInItem(params_, uint32_t(item.request), mask.qo_len, mask.kv_len, token, j + i);
        }
        if constexpr (Variant::use_softmax) {
          s[i] = visible ? logit * variant.sm_scale_log2 : -math::inf;
          larger = std::max(larger, s[i]);
        } else {
          s[i] = visible ? logit : 0.f;
        }
      }
      if constexpr (Variant::use_softmax) {
        const float base = larger == -math::inf ? 0.f : larger, scale = std::exp2(m_[r] - base);
        float sum = 0.f;
        for (int32_t i = 0; i < count; ++i) {
          s[i] = std::exp2(s[i] - base);
          sum += s[i];
        }
        m_[r] = larger;
        d_[r] = d_[r] * scale + sum;
        for (int d = 0; d < D_VO; ++d) o_[int64_t(r) * LD_VO + d] *= scale;
      }
    }
  }

  void Accumulate(int32_t rows, int32_t count) {
    for (int32_t r = 0; r < rows; ++r) {
      float* o = &o_[int64_t(r) * LD_VO];
      for (int32_t i = 0; i < count; ++i) {
        const float weight = s_[r * BLOCK_KEYS + i];
        const float* v = &v_[int64_t(i) * LD_VO];
        for (int d = 0; d < D_VO; ++d) o[d] += weight * v[d];
      }
    }
  }

  void Finish(Variant& variant, const WorkItem& item, int32_t kv_head, int32_t rows, int32_t slot) {
    for (int32_t r = 0; r < rows; ++r) {
      const int32_t token = TokenOf(item, r), head = HeadOf(item, kv_head, r);
      float* o = &o_[int64_t(r) * LD_VO];
      float m = m_[r], d = d_[r];
      for (int i = 0; i < D_VO; ++i) {
        o[i] =
            variant.OutputTransform(params_, o[i], uint32_t(item.request), uint32_t(token), uint32_t(head), m, d, 1.f);
      }
      const float score = m == -math::inf ? -math::inf : m + std::log2(d);
      if (slot >= 0) {
        const int64_t at = int64_t(slot) * tile_ + r;
        std::copy_n(o, D_VO, work_.partial_o + at * D_VO);
        work_.partial_lse[at] = score;
      } else {
        Write(params_, item.qo_begin + token, head, o, score);
      }
    }
  }

 public:
  /// The result of one row.
  static void Write(const Params& params, int64_t token, int64_t head, const float* o, float score) {
    auto* to = params.o + token * params.o_stride_n + head * params.o_stride_h;
    cpu::ForEachVec(
        D_VO, [&](int64_t i, auto lanes) { cpu::Store(to + i, cpu::Load(o + i, lanes) * params.out_scale, lanes); });
    if (params.lse != nullptr) params.lse[token * params.num_qo_heads + head] = score * params.lse_scale;
  }

 private:
  const Params& params_;
  const WorkList& work_;
  const int32_t tile_;
  cpu::Scratch q_, k_, v_, s_, o_, m_, d_;
  const Rotation<D_QK> rotation_;
};

/// body(block) for each block, in the order of the list, by whichever thread is free; make() is called once per thread.
template <typename Make, typename Body>
inline void ForEachBlock(int32_t blocks, const Make& make, const Body& body) {
#pragma omp parallel if (blocks > 1)
  {
    auto runner = make();
#pragma omp for schedule(dynamic, 1)
    for (int32_t block = 0; block < blocks; ++block) body(*runner, block);
  }
}

template <typename Params>
WorkItem UniformItem(const Params& params, const WorkList& work, int32_t tile_rows, int32_t tile, int32_t chunk) {
  WorkItem item{};
  item.qo_len = params.qo_len;
  item.kv_len = params.kv_len;
  item.row_begin = tile * tile_rows;
  item.kv_start = chunk * work.uniform.chunk_size;
  item.kv_end = std::min(item.kv_start + work.uniform.chunk_size, params.kv_len);
  item.is_first = chunk == 0;
  return item;
}

template <typename Params, typename Variant, bool PAGED>
void RunWork(const Params& params, const WorkList& work, int32_t tile) {
  using Runner = TileRunner<Params, Variant, PAGED>;
  const int32_t heads = params.num_kv_heads;
  int32_t blocks = work.blocks;
  if (work.items != nullptr && work.block_indptr == nullptr) blocks = std::min(blocks, *work.num_items * heads);
  auto make = [&] { return std::make_unique<Runner>(params, work, tile); };
  ForEachBlock(blocks, make, [&](Runner& runner, int32_t block) {
    if (work.items == nullptr) {
      const int32_t head = block % heads, chunk = block / heads % work.uniform.chunks;
      const int32_t row_tile = work.uniform.tiles - 1 - block / heads / work.uniform.chunks;
      runner.Run(UniformItem(params, work, tile, row_tile, chunk), head, work.uniform.chunks > 1 ? block : -1);
    } else if (work.block_indptr == nullptr) {
      const WorkItem& item = work.items[block / heads];
      runner.Run(item, block % heads, item.slot < 0 ? -1 : item.slot + block % heads);
    } else {
      for (int32_t i = work.block_indptr[block]; i < work.block_indptr[block + 1]; ++i) {
        runner.Run(work.items[i], work.items[i].kv_head, work.items[i].slot);
      }
    }
  });
}

/// Slots of one tile and head become its result.
template <typename Params, typename Variant>
void MergeTile(const Params& params, const WorkList& work, int32_t tile, const MergeItem& item, int32_t kv_head,
               int32_t first_slot) {
  constexpr int D = Params::HEAD_DIM_VO;
  const int32_t group = int32_t(params.group.divisor);
  const int32_t rows = std::min(tile, item.qo_len * group - item.row_begin);
  float sum[D];
  for (int32_t r = 0; r < rows; ++r) {
    float largest = -math::inf, weights = 0.f;
    for (int32_t i = 0; i < item.count; ++i) {
      largest = std::max(largest, work.partial_lse[int64_t(first_slot + i * item.step) * tile + r]);
    }
    std::fill_n(sum, D, 0.f);
    for (int32_t i = 0; i < item.count && largest != -math::inf; ++i) {
      const int64_t at = int64_t(first_slot + i * item.step) * tile + r;
      const float weight = Variant::use_softmax ? std::exp2(work.partial_lse[at] - largest) : 1.f;
      weights += weight;
      for (int d = 0; d < D; ++d) sum[d] += weight * work.partial_o[at * D + d];
    }
    if (Variant::use_softmax && weights > 0.f) {
      for (int d = 0; d < D; ++d) sum[d] /= weights;
    }
    const int32_t row = item.row_begin + r, token = row / group;
    const float score = Variant::use_softmax ? largest + std::log2(weights) : 0.f;
    TileRunner<Params, Variant, false>::Write(params, item.qo_begin + token, kv_head * group + row - token * group, sum,
                                              largest == -math::inf ? -math::inf : score);
  }
}

template <typename Params, typename Variant>
void RunMerges(const Params& params, const WorkList& work, int32_t tile) {
  const int32_t heads = params.num_kv_heads;
  if (work.items == nullptr) {
    for (int32_t block = 0; block < work.merge_blocks; ++block) {
      const int32_t order = block / heads, head = block % heads, chunks = work.uniform.chunks;
      MergeItem item{};
      item.qo_len = params.qo_len;
      item.row_begin = (work.uniform.tiles - 1 - order) * tile;
      item.count = chunks;
      item.step = heads;
      MergeTile<Params, Variant>(params, work, tile, item, head, order * chunks * heads + head);
    }
    return;
  }
  for (int32_t i = 0; i < *work.num_merges; ++i) {
    const MergeItem& item = work.merges[i];
    if (item.kv_head >= 0) {
      MergeTile<Params, Variant>(params, work, tile, item, item.kv_head, item.first_slot);
    } else {
      for (int32_t head = 0; head < heads; ++head) {
        MergeTile<Params, Variant>(params, work, tile, item, head, item.first_slot + head);
      }
    }
  }
}

template <typename Params, int TILE>
int ResidentBlocks() {
#if defined(_OPENMP)
  return omp_get_max_threads();
#else
  return 1;
#endif
}

template <typename Params, int TILE, bool PAGED, bool ALL_MASKED>
Status LaunchAttention(const Params& params, const WorkList& work, bool, Stream) {
  RunWork<Params, Variant<ALL_MASKED>, PAGED>(params, work, TILE);
  return 0;
}

template <typename Params, int TILE>
Status LaunchMerge(const Params& params, const WorkList& work, bool, Stream) {
  RunMerges<Params, Variant<false>>(params, work, TILE);
  return 0;
}

}  // namespace attention
}  // namespace flashinfer
