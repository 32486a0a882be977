// SPDX-License-Identifier: Apache-2.0
// The fetcher warp of a half: copies each work unit's Q and the slots of its tokens into shared
// memory, some tiles ahead of the loaders, so that a loader need not wait for a slot before it can
// ask for the K/V row.
#pragma once

#include <climits>

#include "cuda/forward/pipeline.cuh"

namespace pat {

// Copies this half's FirstUnit to where its scheduler would put the unit and the fetcher its slots,
// and to Control::first_rows. Every lane of the fetcher's warp waits for its own copies; the other
// warps meet it afterwards.
template <int kHeadDim>
__device__ __forceinline__ void copy_first_unit(const ForwardParams& p, const Shared<kHeadDim>& s,
                                                int lane) {
  constexpr int kSlotCopies = sizeof(FirstUnit::slots) / 16;
  constexpr int kUnitCopies = sizeof(WorkUnit) / 16, kRowCopies = sizeof(FirstUnit::rows) / 16;
  static_assert(kSlotCopies > 32 && kSlotCopies + kUnitCopies <= 64 && kRowCopies == 32);
  const Control& control = s.control();
  const auto* from =
      reinterpret_cast<const char*>(p.first_units + 2 * blockIdx.x + s.sm_half) + 16 * lane;
  const uint32_t slots = shared_address(control.slots) + 16 * lane;
  const uint32_t unit = shared_address(control.units) + 16 * (lane - kSlotCopies);
  copy16(slots, from);
  if (lane + 32 < kSlotCopies + kUnitCopies) {
    copy16((lane + 32 < kSlotCopies ? slots : unit) + 16 * 32, from + 16 * 32);
  }
  copy16(shared_address(control.first_rows) + 16 * lane, from + 16 * (kSlotCopies + kUnitCopies));
  copies_commit();
  copies_wait<0>();
}

template <int kHeadDim, Drafts kDrafts>
struct Fetcher {
  using S = Shape<kHeadDim>;

  const ForwardParams& p;
  const Shared<kHeadDim>& s;
  const int lane;
  SlotRing slots;
  QRing q;
  NarrowRing narrow;
  int given;  // tiles, from the next one on, whose slots are there already: see FirstUnit

  // Starts the copy of the slots of one tile, whose first token is token `first` of the unit,
  // unless they are given.
  __device__ __forceinline__ void fetch_slots(const int32_t* from, int first, int tokens) {
    if (given > 0) {
      // No wait: the loaders do not wait for given slots, and may have released them already (see
      // UnitScheduler::push).
      --given;
      barrier_arrive(slots.full(s.base));
    } else {
      slots.wait_empty(s.base);
      const int t = first + lane;
      const uint32_t to = shared_address(&s.control().slots[slots.index][lane]);
      if (t < tokens) copy4(to, from + t);
      if (t + 32 < tokens) copy4(to + 128, from + t + 32);
      barrier_arrive_copies(slots.full(s.base));
    }
    slots.advance();
  }

  // Offset of a packed row of a query with several draft tokens in its Q, in bytes.
  __device__ __forceinline__ int64_t offset_in_query(const WorkUnit& unit, int row) const {
    const int draft_token = (row * p.head_group_magic) >> 16;
    return (unit.kv_head * p.head_group + row) * p.q_stride_head + draft_token * p.bytes_between;
  }

  // Offset in Q of row `row` of the unit, in units of 16 bytes.
  __device__ __forceinline__ uint32_t q_offset(const WorkUnit& unit, int row) const {
    const int packed_row = unit.first_packed_row + row;
    const int member = (packed_row * p.group_magic) >> 16;
    [[maybe_unused]] const int head = unit.kv_head * p.group + packed_row - member * p.group;
    const int query =
        row < unit.num_rows ? load_member(s.control(), unit.member_offset + member).query : 0;
    if constexpr (kDrafts != kNoDrafts) {
      const int64_t in_query = offset_in_query(unit, packed_row - member * p.group);
      return static_cast<uint32_t>((query * p.q_stride_query + in_query) >> 4);
    }
    return static_cast<uint32_t>((query * p.q_stride_query + head * p.q_stride_head) >> 4);
  }

  // Copies the unit's rows of Q to a buffer whose panels are `panel` bytes apart. Lane i holds the
  // offsets of rows i and i + 32.
  __device__ __forceinline__ void copy_rows(const WorkUnit& unit, const uint32_t (&offsets)[2],
                                            uint32_t to, uint32_t panel) {
    const int chunk = lane % S::kChunks;
    const int sub_row = lane / S::kChunks;
    const char* from = p.q + chunk * 16;
    to += (chunk >> 3) * panel + sub_row * 128;
#pragma unroll 1
    for (int i = 0; i < unit.num_rows; i += 8) {
      const uint32_t of_lane = i < 32 ? offsets[0] : offsets[1];
#pragma unroll
      for (int j = 0; j < 8; j += S::kRowsPerCopy) {
        const uint64_t offset = __shfl_sync(~0u, of_lane, i + j + sub_row);  // lanes wrap at 32
        if (i + j + sub_row < unit.num_rows) {
          copy16(to + (i + j) * 128 + (((chunk & 7) ^ ((j + sub_row) & 7)) << 4),
                 from + (offset << 4));
        }
      }
    }
  }

  // Does the same for a unit of one query, whose rows are neighbouring heads of each draft token.
  __device__ __forceinline__ void copy_query(const WorkUnit& unit, uint32_t to, uint32_t panel) {
    const int chunk = lane % S::kChunks;
    int row = lane / S::kChunks;
    const char* from = p.q + unit.member.query * p.q_stride_query + chunk * 16;
    if constexpr (kDrafts == kNoDrafts) {
      from += (unit.kv_head * p.group + row) * p.q_stride_head;
    }
    to += (chunk >> 3) * panel;
#pragma unroll 1
    for (; row < unit.num_rows; row += S::kRowsPerCopy) {
      const uint32_t place = to + row * 128 + (((chunk & 7) ^ (row & 7)) << 4);
      if constexpr (kDrafts != kNoDrafts) {
        copy16(place, from + offset_in_query(unit, unit.first_packed_row + row));
      } else {
        copy16(place, from);
        from += S::kRowsPerCopy * p.q_stride_head;
      }
    }
  }

  // Copies the unit's Q to the next buffer of its kind.
  __device__ __forceinline__ void fetch_q(const WorkUnit& unit, const uint32_t (&offsets)[2]) {
    const bool is_narrow = unit.narrow != kNotNarrow;
    barrier_wait(is_narrow ? narrow.empty(s.base) : q.empty(s.base),
                 (is_narrow ? narrow.phase : q.phase) ^ 1);
    const uint32_t to = is_narrow ? s.narrow_q(narrow.index) : s.q(q.index);
    const uint32_t panel = is_narrow ? S::kNarrowPanelBytes : S::kPanelBytes;
    if (unit.single_query()) {
      copy_query(unit, to, panel);
    } else {
      copy_rows(unit, offsets, to, panel);
    }
    barrier_arrive_copies(is_narrow ? narrow.full(s.base) : q.full(s.base));
    if (is_narrow) {
      narrow.advance();
    } else {
      q.advance(p.q_buffers);
    }
  }

  __device__ void run() {
    given = s.control().given ? kGivenTiles : 0;
    for (WorkRing work;; work.advance()) {
      work.wait_full(s.base);
      const WorkUnit unit = s.control().units[work.index];
      const int tokens = unit.num_tokens;
      if (tokens < 0) break;
      if (tokens > 0) {
        const int32_t* from = s.control().list + unit.list_start;
        const bool copies_q = given == 0 || !consumers_copy_q<kHeadDim>(unit);
        uint32_t offsets[2];
        if (copies_q && !unit.single_query()) {
          offsets[0] = q_offset(unit, lane);
          offsets[1] = q_offset(unit, lane + 32);
        }
        // Fetches the slots of some tiles while the members are on their way; but not of as many as
        // the ring holds, or this warp would wait for the loaders while they wait for Q. Then Q,
        // then the slots of all others.
        int token = first_token(unit, s.sm_half);
        for (int ahead = kSlotTiles / 2;; ahead = INT_MAX) {
#pragma unroll 1  // short code: see join_warps()
          for (int i = 0; i < ahead && token < tokens; ++i) {
            fetch_slots(from, token, tokens);
            token = next_token(unit, s.sm_half, token);
          }
          if (ahead == INT_MAX) break;
          if (copies_q) {
            fetch_q(unit, offsets);
          } else {
            barrier_arrive(q.full(s.base));
            q.advance(p.q_buffers);
          }
        }
      }

      given = 0;  // the first unit may have fewer tiles
      barrier_release(work.empty(s.base), lane);
    }
  }
};

}  // namespace pat
