// SPDX-License-Identifier: Apache-2.0
// The fetcher warp of the forward kernel.
#pragma once

#include "cuda/forward/pipeline.cuh"

namespace pat {

// Fetches Q and the slots of all tokens of all units, ahead of the loaders: what has to wait for
// one look-up before it can ask for another.
template <int kHeadDim>
struct Fetcher {
  using S = Shape<kHeadDim>;

  const ForwardParams& p;
  const Shared<kHeadDim>& s;
  const int lane;
  Cursor tile, q, narrow;

  // Asks for the slots of the tile that begins at token `first` of the unit.
  __device__ __forceinline__ void fetch_slots(const int32_t* from, int first, int tokens) {
    barrier_wait(s.slot_empty(tile.index), tile.phase ^ 1);
    const int t = first + lane;
    const uint32_t to = shared_address(&s.control().slots[tile.index][lane]);
    if (t < tokens) copy4(to, from + t);
    if (t + 32 < tokens) copy4(to + 128, from + t + 32);
    barrier_arrive_copies(s.slot_full(tile.index));
    tile.advance(kSlotTiles);
  }

  // Where packed row `row` of Q begins, in units of 16 bytes.
  __device__ __forceinline__ uint32_t row_of_q(const Unit& u, int row) const {
    const int packed = u.row_begin + row;
    const int index = (packed * p.group_magic) >> 16;
    const int head = u.head * p.group + packed - index * p.group;
    const int query = row < u.rows ? load_member(s.control(), u.member_offset + index).query : 0;
    return static_cast<uint32_t>((query * p.q_stride_query + head * p.q_stride_head) >> 4);
  }

  // Copies packed rows of Q to a buffer whose panels are `panel` bytes apart; lane i holds where
  // rows i and i + 32 begin.
  __device__ __forceinline__ void copy_rows(const Unit& u, const uint32_t (&rows)[2], uint32_t to,
                                            uint32_t panel) {
    const int chunk = lane % S::kChunks;
    const int sub_row = lane / S::kChunks;
    const char* from = p.q + chunk * 16;
    to += (chunk >> 3) * panel + sub_row * 128;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
#pragma unroll 1
      for (int i = 0; i < 32; i += 8) {
        const int first = 32 * half + i;
        if (first >= u.rows) return;
#pragma unroll
        for (int j = 0; j < 8; j += S::kRowsPerCopy) {
          const uint64_t row = __shfl_sync(~0u, rows[half], i + j + sub_row);
          if (first + j + sub_row < u.rows) {
            copy16(to + (first + j) * 128 + (((chunk & 7) ^ ((j + sub_row) & 7)) << 4),
                   from + (row << 4));
          }
        }
      }
    }
  }

  // The same of a unit of one query, whose rows are neighbouring heads.
  __device__ __forceinline__ void copy_query(const Unit& u, uint32_t to, uint32_t panel) {
    const int chunk = lane % S::kChunks;
    int row = lane / S::kChunks;
    const char* from = p.q + u.member.query * p.q_stride_query +
                       (u.head * p.group + row) * p.q_stride_head + chunk * 16;
    to += (chunk >> 3) * panel;
#pragma unroll 1
    for (; row < u.rows; row += S::kRowsPerCopy) {
      copy16(to + row * 128 + (((chunk & 7) ^ (row & 7)) << 4), from);
      from += S::kRowsPerCopy * p.q_stride_head;
    }
  }

  __device__ __forceinline__ void copy_q(const Unit& u, const uint32_t (&rows)[2], uint32_t to,
                                         uint32_t panel) {
    if (u.single) {
      copy_query(u, to, panel);
    } else {
      copy_rows(u, rows, to, panel);
    }
  }

  __device__ void run() {
    for (Cursor ring;; ring.advance(kUnits)) {
      barrier_wait(s.unit_full(ring.index), ring.phase);
      const Unit u = s.control().units[ring.index];
      const int tokens = u.tokens;
      if (tokens < 0) break;
      if (tokens > 0) {
        const int32_t* from =
            (u.branch ? p.branches.slots : p.slots + u.batch_row * p.slots_stride) + u.kv_start;
        const int step = u.wide ? 2 * kTileTokens : kTileTokens;
        int first = u.wide ? s.side * kTileTokens : 0;
        if (first < tokens) fetch_slots(from, first, tokens);
        uint32_t rows[2];  // of Q; not of a unit of one query
        if (!u.single) {
          rows[0] = row_of_q(u, lane);
          rows[1] = row_of_q(u, lane + 32);
        }
        if (u.narrow) {
          barrier_wait(s.narrow_empty(narrow.index), narrow.phase ^ 1);
          copy_q(u, rows, s.narrow_q(narrow.index), kNarrowRows * 128);
          barrier_arrive_copies(s.narrow_full(narrow.index));
          narrow.advance(kNarrowUnits);
        } else {
          // Some tiles ahead, while the members are on their way; but not as many as the ring has,
          // or loaders and consumers could wait for Q while this waits for them.
          first += step;
          for (int i = 1; i < kSlotTiles / 2 && first < tokens; ++i, first += step) {
            fetch_slots(from, first, tokens);
          }
          barrier_wait(s.q_empty(q.index), q.phase ^ 1);
          copy_q(u, rows, s.q(q.index), S::kPanelBytes);
          barrier_arrive_copies(s.q_full(q.index));
          q.advance(p.q_buffers);
          for (; first < tokens; first += step) fetch_slots(from, first, tokens);
        }
      }
      barrier_release(s.unit_empty(ring.index), lane);
    }
  }
};

}  // namespace pat
