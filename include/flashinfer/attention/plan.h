// SPDX-License-Identifier: Apache-2.0
// The work planner: a batch of (queries, keys) becomes lists of work items (params.h). Host C++ without CUDA, shared by
// both backends. It reads host arrays, writes into one buffer that is copied to the device in one go, and takes
// O(requests + blocks) integer steps: an item stands for one of each KV head.
//
// Requests of few rows (decode) go to the narrow list: all keys of the batch are cut into ranges of equal length, across
// the borders of requests, as many as there are resident blocks for all KV heads of each. Any skew of lengths is
// balanced, a range has at most two partial tiles, and the number of slots is bounded. A few requests are cut by
// themselves if that makes shorter pieces, and blocks compute their items where all are cut alike. Requests of many rows
// go to the wide list: one block per tile and head, longest first; keys are split only where tiles are too few to fill
// the device.
//   test  pytest tests/attention/test_plan.py
#pragma once
#include <algorithm>
#include <cstdint>
#include <cstring>

#include "plan_lists.h"

namespace flashinfer {
namespace attention {

/// Fills a PlanOutput, which is best kept for the next plan: growing its lists costs more than planning.
class Planner {
 public:
  Planner(const PlanInput& in, PlanOutput& out)
      : in_(in), group_(in.num_qo_heads / std::max(in.num_kv_heads, 1)), out_(out) {}

  void Run() {
    out_.Clear();
    narrow_blocks_ = in_.narrow_blocks;
    ChooseWideTile();
    if (in_.fixed_split > 0 || in_.disable_split) {
      PlanFixed();
    } else {
      PlanNarrow();
      PlanWide();
    }
    Layout();
    NoteRegular();
  }

  /// Whether so many blocks of both lists are one launch, where an SM holds one of each and there are `paired` SMs. As
  /// long as narrow blocks are there, wide ones have half an SM: what that costs must be less than all of their time.
  static bool RunTogether(int64_t wide_tile, int64_t narrow_blocks, int64_t wide_blocks, int64_t paired) {
    return wide_tile == 128 && narrow_blocks > 0 && narrow_blocks <= paired && wide_blocks >= 3 * paired;
  }

  /// Where a plan has room for kv_indptr (0) and qo_indptr (1), if asked to, and where that ends.
  static int64_t IndptrOffset(int which, int32_t batch_size) {
    return AlignUp(sizeof(PlanHeader)) + which * AlignUp((int64_t(batch_size) + 1) * sizeof(int32_t));
  }

  /// Make the list of narrow items, the long one of most plans, where Write wants it: in `buffer`, if `bytes` are enough.
  /// Null takes that back.
  static void Use(PlanOutput& out, const PlanInput& in, char* buffer, int64_t bytes) {
    constexpr int64_t ITEM = sizeof(WorkItem);
    const int64_t offset = ItemsOffset(in);
    const bool fits = buffer != nullptr && bytes >= offset + ITEM && reinterpret_cast<uintptr_t>(buffer) % 16 == 0;
    out.narrow.Use(fits ? reinterpret_cast<WorkItem*>(buffer + offset) : nullptr, fits ? (bytes - offset) / ITEM : 0);
  }

  /// Copy the lists to `buffer`, which holds info.int_bytes.
  static void Write(const PlanOutput& out, char* buffer) {
    const int32_t narrow = out.info.has_shares != 0 ? out.shares : int32_t(out.narrow.Size());
    const PlanHeader header{narrow, int32_t(out.narrow_merges.Size()), int32_t(out.wide.Size()),
                            int32_t(out.wide_merges.Size())};
    Put(buffer + out.info.narrow_items, out.narrow);  // first: they may lie anywhere in the buffer
    std::memcpy(buffer, &header, sizeof(header));
    std::memset(buffer + out.info.narrow_tickets, 0, out.info.narrow_merges - out.info.narrow_tickets);
    Put(buffer + out.info.narrow_merges, out.narrow_merges);
    Put(buffer + out.info.wide_items, out.wide);
    Put(buffer + out.info.wide_merges, out.wide_merges);
  }

 private:
  template <typename T>
  static void Put(char* to, const List<T>& list) {
    const char* const from = reinterpret_cast<const char*>(list.begin());
    if (list.Size() > 0 && from != to) std::memmove(to, from, list.Size() * sizeof(T));
  }

  int32_t QoBegin(int32_t b) const { return in_.qo_indptr != nullptr ? in_.qo_indptr[b] : b * in_.uniform_qo_len; }
  int32_t QoLen(int32_t b) const {
    return in_.qo_indptr != nullptr ? in_.qo_indptr[b + 1] - in_.qo_indptr[b] : in_.uniform_qo_len;
  }
  int32_t KvLen(int32_t b) const {
    const int64_t room = (int64_t(in_.kv_indptr[b + 1]) - in_.kv_indptr[b]) * in_.page_size;  // no pages, no keys
    if (in_.kv_lens != nullptr) return int32_t(std::min<int64_t>(in_.kv_lens[b], room));
    return int32_t(in_.max_kv_len > 0 ? std::min<int64_t>(in_.max_kv_len, room) : room);
  }
  bool IsNarrow(int64_t rows) const {
    return in_.narrow_tile > 0 && (in_.wide_tiles[0] == 0 || rows <= in_.narrow_tile);
  }

  /// A tile of a request: what its items have in common. Written where it stays: a copy of what was just written in
  /// parts waits for those writes.
  void SetTile(WorkItem& item, int32_t b, int32_t row_begin, int32_t tile) const {
    item.request = b;
    item.kv_head = -1;
    item.qo_begin = QoBegin(b);
    item.qo_len = QoLen(b);
    item.kv_begin = in_.kv_indptr != nullptr ? in_.kv_indptr[b] : 0;
    item.kv_len = in_.kv_lens != nullptr ? KvLen(b) : -1;
    item.row_begin = row_begin;
    item.is_first = 1;
    item.slot = item.merge = item.next = -1;
    SetRange(item, tile);
  }

  /// Set the keys that any row of the tile can see.
  void SetRange(WorkItem& item, int32_t tile) const {
    const int64_t kv_len = KvLen(item.request), qo_len = item.qo_len, shift = kv_len - qo_len;
    int64_t start = 0, end = kv_len;
    if (in_.causal) {
      const int64_t last = std::min<int64_t>(qo_len, DivideUp(item.row_begin + tile, group_)) - 1;
      end = std::clamp<int64_t>(last + shift + 1, 0, kv_len);
    }
    if (in_.window_left >= 0) {
      // Without the exact length (a page may be partly filled) the window could start up to a page earlier.
      const int64_t first = item.row_begin / group_, slack = in_.kv_lens != nullptr ? 0 : in_.page_size;
      start = std::clamp<int64_t>(first + shift - in_.window_left - slack, 0, end);
    }
    item.kv_start = int32_t(start / GRANULE * GRANULE);
    item.kv_end = int32_t(std::max<int64_t>(end, item.kv_start));
  }

  void ChooseWideTile() {
    wide_tile_ = in_.wide_tiles[0];
    wide_blocks_ = in_.wide_blocks[0];
    if (in_.wide_tiles[1] == 0) return;
    if (in_.fixed_split > 0 || in_.disable_split) return;  // the choice below would depend on the batch
    int64_t rows = 0, tiles = 0;  // take large tiles once half of the rows they pad would be used
    if (in_.cuda_graph) {
      rows = int64_t(in_.max_rows) * group_;
      tiles = in_.batch_size;
    } else {
      for (int32_t b = 0; b < in_.batch_size; ++b) {
        const int64_t n = int64_t(QoLen(b)) * group_;
        if (!IsNarrow(n)) rows += n, ++tiles;
      }
    }
    if (rows > tiles * in_.wide_tiles[0]) {
      wide_tile_ = in_.wide_tiles[1];
      wide_blocks_ = in_.wide_blocks[1];
      const int64_t items = rows / wide_tile_ * in_.num_kv_heads;
      if (!in_.cuda_graph && RunTogether(wide_tile_, in_.paired_blocks, items, in_.paired_blocks)) {
        narrow_blocks_ = in_.paired_blocks;
      }
    }
  }

  /// out_.tiles: the tiles of all requests of one kind. Notes whether there are requests of the other.
  void ListTiles(bool narrow) {
    List<WorkItem>& tiles = out_.tiles;
    tiles.Clear();
    const int32_t tile = narrow ? in_.narrow_tile : wide_tile_;
    for (int32_t b = 0; b < in_.batch_size; ++b) {
      const int32_t rows = QoLen(b) * group_;
      if (rows <= 0) continue;
      if (IsNarrow(rows) != narrow) {
        has_others_ = true;
        continue;
      }
      for (int32_t row = 0; row < rows; row += tile) SetTile(*tiles.Extend(1), b, row, tile);
    }
  }

  static MergeItem MergeOf(const WorkItem& item, int32_t first_slot, int32_t count, int32_t step) {
    return MergeItem{-1, item.qo_begin, item.qo_len, item.row_begin, first_slot, count, step, 0};
  }

  /// How the keys of a head are cut: `first` ranges, which blocks begin with, and up to `all` in total. The further ones
  /// are short and taken by blocks that are done. SMs read at speeds that differ by 10 % (H200): where a block has much to
  /// do, it begins with a little less than its part. Otherwise cuts cost more than they gain, and there are further ones
  /// only where heads do not divide blocks.
  struct Ranges {
    static constexpr int64_t KEPT = 15, PARTS = 16;  // what a block begins with, of an equal part of everything
    static constexpr int64_t SHORT = 32;             // how many further ranges are as long as that part
    static constexpr int64_t MUCH = 192;             // granules

    Ranges(int64_t blocks, int64_t heads, bool is_much) : first(int32_t(blocks / heads)) {
      const int64_t kept = first * heads * (is_much ? KEPT : PARTS);
      all = first + int32_t(DivideUp((blocks * PARTS - kept) * SHORT, heads * PARTS));
    }
    int32_t first, all;
  };

  /// Ranges over the resident blocks.
  void PlanNarrow() {
    constexpr int64_t PIECE_COST = 1;  // granules that starting a piece costs
    constexpr int64_t MIN_PIECE = 2;   // granules; a smaller rest is not worth a piece
    const int32_t heads = in_.num_kv_heads, blocks = std::max(narrow_blocks_, 1);
    ListTiles(true);
    const List<WorkItem>& tiles = out_.tiles;
    if (tiles.Size() == 0 && (!in_.cuda_graph || in_.narrow_tile == 0)) return;  // a graph's blocks ask what to do
    int64_t total = 0;                                                           // of one head
    for (const WorkItem& tile : tiles) total += Granules(tile) + PIECE_COST;
    const int64_t each = Quotient(total * heads + blocks - 1, blocks) + PIECE_COST;  // what a block has to do
    const bool is_much = in_.takes_shares && each >= Ranges::MUCH;
    const Ranges ranges(blocks, heads, is_much);
    Shares shares(out_.narrow, ranges.all, tiles.Size());
    const int64_t piece = ranges.first == ranges.all ? SmallestPiece(ranges.all, MIN_PIECE, each) : 0;
    int64_t size = 0, used = 0;
    auto next_range = [&] {
      used = 0;
      const int64_t number = shares.Begin(), left = ranges.all - number;
      if (piece > 0) {
        size = piece + PIECE_COST;
      } else if (number < ranges.first && ranges.first < ranges.all) {
        size = is_much ? each * Ranges::KEPT / Ranges::PARTS : each;
      } else {  // an equal part of what is left, with the cuts to come
        const int64_t part = Quotient(total + (left - 1) * (PIECE_COST + 1), left);
        size = number == ranges.first ? part : std::max(size, part);
      }
      size = std::max<int64_t>(size, PIECE_COST + MIN_PIECE);
    };
    next_range();
    for (const WorkItem& tile : tiles) {
      const int64_t granules = Granules(tile);
      int64_t done = 0;
      int32_t pieces = 0;
      do {  // at least one item, so that a tile without keys gets its zeros
        const int64_t left = granules - done;
        // A cut costs two results, their merge and 3 us at the end: a range may end with a tile that is near.
        const int64_t slack = std::max<int64_t>(MIN_PIECE, size / 32);
        const bool is_full = used > 0 && size - used < PIECE_COST + std::min(slack, left);
        if (is_full && shares.Count() < ranges.all) next_range();
        const bool can_cut = shares.Count() < ranges.all;
        const int64_t room = std::max<int64_t>(size - used - PIECE_COST, MIN_PIECE);
        const int64_t take = can_cut && left >= room + slack ? room : left;
        WorkItem& piece = shares.Push(tile);
        piece.kv_start = int32_t(tile.kv_start + done * GRANULE);
        done += take;
        if (done < granules) {
          piece.kv_end = int32_t(tile.kv_start + done * GRANULE);
          total += PIECE_COST;
        }
        if (pieces > 0 || done < granules || in_.all_partial) {
          piece.slot = out_.narrow_slots + pieces * heads;
          piece.merge = int32_t(out_.narrow_merges.Size());
          piece.is_first = pieces == 0;
        }
        ++pieces;
        used += take + PIECE_COST;
        total -= take + PIECE_COST;
      } while (done < granules);
      if (pieces == 1 && !in_.all_partial) continue;
      out_.narrow_merges.Push(MergeOf(tile, out_.narrow_slots, pieces, heads));
      out_.narrow_slots += pieces * heads;
    }
    out_.shares = shares.End() * heads;
  }

  /// Granules of the smallest pieces of tiles of which there are at most `count`, if less than `limit`; 0 otherwise. Where
  /// tiles are few, an equal part of everything and of what cuts cost is more than that (H200, 4 requests of 1024 keys and
  /// 8 heads: 256 blocks instead of 160, 15.3 -> 13.9 us).
  int64_t SmallestPiece(int64_t count, int64_t least, int64_t limit) const {
    const List<WorkItem>& tiles = out_.tiles;
    if (int64_t(tiles.Size()) > count) return 0;
    int64_t total = 0;
    for (const WorkItem& tile : tiles) total += Granules(tile);
    for (int64_t size = std::max(least, DivideUp(total, count)); size < limit; ++size) {
      int64_t pieces = 0;
      for (const WorkItem& tile : tiles) pieces += std::max<int64_t>(1, DivideUp(Granules(tile), size));
      if (pieces <= count) return size;
    }
    return 0;
  }

  /// a / b of numbers that are mostly small: 64-bit division takes several times as long.
  static int64_t Quotient(int64_t a, int64_t b) {
    return a >= 0 && a <= INT32_MAX && b <= INT32_MAX ? uint32_t(a) / uint32_t(b) : a / b;
  }

  static int64_t Granules(const WorkItem& item) { return DivideUp(item.kv_end - item.kv_start, GRANULE); }

  /// Give slots to the items from `first` on if they are several: the pieces of one tile.
  void SetSlots(List<WorkItem>& items, size_t first, List<MergeItem>& merges, int32_t& slots, int32_t step) const {
    const int32_t count = int32_t(items.Size() - first);
    if (count < 2 && !in_.all_partial) return;
    const int32_t merge = int32_t(merges.Size());
    merges.Push(MergeOf(items[first], slots, count, step));
    for (size_t i = first; i < items.Size(); ++i, slots += step) {
      items[i].slot = slots;
      items[i].merge = merge;
      items[i].is_first = i == first;
    }
  }

  void PlanWide() {
    if (!has_others_) return;
    ListTiles(false);
    const List<WorkItem>& tiles = out_.tiles;
    if (tiles.Size() == 0) return;
    const int64_t blocks = std::max(wide_blocks_, 1), heads = in_.num_kv_heads;
    int64_t longest = 1;
    for (const WorkItem& t : tiles) longest = std::max(longest, Granules(t));
    int64_t chunk = longest;
    if (int64_t(tiles.Size()) * heads < blocks) {  // the smallest chunk that still fits in one wave
      int64_t low = std::min<int64_t>(4, longest);
      while (low < chunk) {
        const int64_t middle = (low + chunk) / 2;
        int64_t count = 0;
        for (const WorkItem& t : tiles) count += std::max<int64_t>(1, DivideUp(Granules(t), middle));
        if (count * heads > blocks) {
          low = middle + 1;
        } else {
          chunk = middle;
        }
      }
    }
    CutTiles(chunk * GRANULE, false, out_.wide, out_.wide_merges, out_.wide_slots);
  }

  /// Splits that depend on nothing but the request itself: at multiples of a size.
  void PlanFixed() {
    const int64_t size = in_.disable_split ? INT32_MAX : DivideUp(in_.fixed_split, GRANULE) * GRANULE;
    for (const bool narrow : {true, false}) {
      out_.tiles.Clear();
      if (narrow ? in_.narrow_tile > 0 : wide_tile_ > 0) ListTiles(narrow);
      CutTiles(size, true, narrow ? out_.narrow : out_.wide, narrow ? out_.narrow_merges : out_.wide_merges,
               narrow ? out_.narrow_slots : out_.wide_slots);
    }
  }

  /// Cut the tiles after each `size` keys, or `at_multiples` of it; each piece is an item for every head.
  void CutTiles(int64_t size, bool at_multiples, List<WorkItem>& items, List<MergeItem>& merges, int32_t& slots) {
    List<WorkItem>& pieces = out_.sorted;
    pieces.Clear();
    for (const WorkItem& tile : out_.tiles) {
      const size_t first = pieces.Size();
      int64_t start = tile.kv_start;
      do {
        WorkItem item = tile;
        item.kv_start = int32_t(start);
        start = std::min<int64_t>(at_multiples ? (start / size + 1) * size : start + size, tile.kv_end);
        item.kv_end = int32_t(start);
        pieces.Push(item);
      } while (start < tile.kv_end);
      SetSlots(pieces, first, merges, slots, in_.num_kv_heads);
    }
    Sort(pieces, items);
  }

  /// Longest first, to a granule or (long ones) a 1/1023 of the longest; equal ones in their order.
  static void Sort(const List<WorkItem>& from, List<WorkItem>& to) {
    constexpr int BUCKETS = 1024;
    int32_t longest = 0, begin[BUCKETS + 1] = {};
    for (const WorkItem& item : from) longest = std::max(longest, item.kv_end - item.kv_start);
    const int32_t width = std::max(GRANULE, longest / (BUCKETS - 1) + 1);
    auto bucket = [&](const WorkItem& item) { return (longest - (item.kv_end - item.kv_start)) / width; };
    for (const WorkItem& item : from) ++begin[bucket(item) + 1];
    for (int i = 0; i < BUCKETS; ++i) begin[i + 1] += begin[i];
    to.Resize(from.Size());
    for (const WorkItem& item : from) to[begin[bucket(item)]++] = item;
  }

  static int64_t ItemsOffset(const PlanInput& in) {
    return IndptrOffset(in.keeps_indptr ? (in.qo_indptr != nullptr ? 2 : 1) : 0, in.batch_size);
  }

  int64_t SlotBytes(int64_t tile) const { return tile * (in_.head_dim_vo + 1) * int64_t(sizeof(float)); }

  /// Pieces of a fixed size become more as keys do. A graph has room for as many as the float workspace holds: a quarter
  /// of it is for the narrow list, the rest for the wide one.
  void ShareRoom(int64_t& narrow_slots, int64_t& wide_slots, bool narrow_only) const {
    const int64_t narrow = SlotBytes(in_.narrow_tile), wide = SlotBytes(wide_tile_);
    int64_t room =
        narrow_only ? narrow_slots * narrow : std::max(4 * narrow_slots * narrow, DivideUp(4 * wide_slots * wide, 3));
    room = std::max(room, in_.float_bytes);
    const int64_t part = narrow_only ? room : room / 4;
    narrow_slots = narrow > 0 ? part / narrow : 0;
    wide_slots = narrow_only ? 0 : (room - part) / wide;
  }

  /// Sizes and offsets. In a CUDA graph they depend on the frozen sizes only, so that a later plan fits the launch.
  void Layout() {
    PlanInfo& info = out_.info;
    const int64_t heads = in_.num_kv_heads;
    int64_t narrow_items = out_.narrow.Size(), wide_items = out_.wide.Size();
    int64_t narrow_merges = out_.narrow_merges.Size(), wide_merges = out_.wide_merges.Size();
    int64_t narrow_slots = out_.narrow_slots, wide_slots = out_.wide_slots;
    const bool shares = !(in_.fixed_split > 0 || in_.disable_split);
    int64_t narrow_blocks = shares ? std::min(out_.shares, narrow_blocks_) : narrow_items * heads;
    if (in_.cuda_graph) {
      const bool narrow_only = in_.wide_tiles[0] == 0;
      const int64_t rows = int64_t(in_.max_rows) * group_;
      const int64_t narrow_tiles =
          in_.narrow_tile == 0 ? 0 : in_.batch_size + (narrow_only ? rows / in_.narrow_tile : 0);
      const int64_t wide_tiles = narrow_only ? 0 : in_.batch_size + rows / wide_tile_;
      if (shares) {
        narrow_blocks = in_.narrow_tile == 0 ? 0 : in_.narrow_blocks;
        const int64_t ranges =
            in_.narrow_tile == 0 ? 0 : Ranges(std::max(in_.narrow_blocks, 1), heads, in_.takes_shares).all;
        const int64_t cuts = std::max<int64_t>(ranges - 1, 0), cut_tiles = std::min(cuts, narrow_tiles);
        narrow_items = narrow_tiles + ranges;
        narrow_slots = (cuts + cut_tiles) * heads;
        narrow_merges = cut_tiles;
        wide_items = std::max<int64_t>(wide_tiles, wide_blocks_ / heads);
        wide_slots = wide_blocks_;  // tiles are split only as long as all pieces fit in one wave
        wide_merges = std::min<int64_t>(wide_tiles, wide_blocks_);
        if (in_.all_partial) {
          narrow_slots = narrow_items * heads;
          narrow_merges = narrow_tiles;
          wide_slots = std::max<int64_t>(wide_tiles * heads, wide_blocks_);
          wide_merges = wide_tiles;
        }
      } else {
        if (in_.fixed_split > 0) ShareRoom(narrow_slots, wide_slots, narrow_only);
        narrow_items = narrow_tiles + narrow_slots / heads;
        narrow_blocks = narrow_items * heads;
        narrow_merges = std::min(narrow_tiles, narrow_slots / heads);
        wide_items = wide_tiles + wide_slots / heads;
        wide_merges = std::min(wide_tiles, wide_slots / heads);
      }
    }
    int64_t at = ItemsOffset(in_);
    auto place = [&at](int64_t bytes) {
      const int64_t offset = at;
      at = AlignUp(at + bytes);
      return offset;
    };
    info.tile = wide_items > 0 ? wide_tile_ : in_.narrow_tile;
    info.narrow_items = place(narrow_items * sizeof(WorkItem));
    info.keys = 0;
    for (int32_t b = 0; b < in_.batch_size && !in_.cuda_graph; ++b) info.keys += KvLen(b);
    info.has_shares = shares;
    info.narrow_tickets = place((TICKETS + narrow_merges * heads) * sizeof(int32_t));
    info.narrow_merges = place(narrow_merges * sizeof(MergeItem));
    info.wide_items = place(wide_items * sizeof(WorkItem));
    info.wide_merges = place(wide_merges * sizeof(MergeItem));
    info.narrow_blocks = narrow_blocks;
    info.wide_blocks = wide_items * heads;
    info.narrow_merge_blocks = narrow_merges * heads;
    info.wide_merge_blocks = wide_merges * heads;
    info.int_bytes = at;
    at = 0;
    place(narrow_slots * SlotBytes(in_.narrow_tile));
    info.wide_partial = place(wide_slots * SlotBytes(wide_tile_));
    info.float_bytes = at;
  }

  /// Whether blocks can compute their items (WorkList::regular): each request is cut as the first one is, and their pages
  /// follow each other.
  void NoteRegular() const {
    PlanInfo& info = out_.info;
    info.qo_len = 0;
    info.chunk_size = 0;
    const int32_t heads = in_.num_kv_heads, items = out_.shares / std::max(heads, 1), batch = in_.batch_size;
    if (items == 0 || items % batch != 0 || info.narrow_blocks != out_.shares || in_.cuda_graph) return;
    const int32_t chunks = items / batch;
    const WorkItem& first = out_.narrow[0];
    const int64_t pages = DivideUp(first.kv_len, in_.page_size);
    WorkItem expected = first;
    for (int32_t i = 0; i < items; ++i) {
      const int32_t request = i / chunks, chunk = i % chunks;
      expected.request = request;
      expected.is_first = chunk == 0;
      expected.qo_begin = request * first.qo_len;
      expected.kv_begin = int32_t(request * pages);
      expected.row_begin = 0;
      expected.kv_start = chunk * first.kv_end;
      expected.kv_end = std::min(expected.kv_start + first.kv_end, first.kv_len);
      expected.slot = chunks > 1 ? i * heads : -1;
      expected.merge = chunks > 1 ? request : -1;
      expected.next = -1;
      if (std::memcmp(&out_.narrow[i], &expected, sizeof(WorkItem)) != 0) return;
    }
    if (first.kv_end == 0 || first.qo_len > INT16_MAX) return;
    info.qo_len = int16_t(first.qo_len);
    info.chunk_size = first.kv_end;
  }

  const PlanInput& in_;
  const int32_t group_;
  int32_t wide_tile_ = 0, wide_blocks_ = 0, narrow_blocks_ = 0;
  bool has_others_ = false;
  PlanOutput& out_;
};

}  // namespace attention
}  // namespace flashinfer
