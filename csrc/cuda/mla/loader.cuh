// SPDX-License-Identifier: Apache-2.0
// The four loader warps of the MLA forward: they gather the latents that the slots name into the
// stages, and each unit's Q into its buffer, 16 rows a warp. The first one claims units besides.
#pragma once

#include "cuda/mla/units.cuh"

namespace pat::mla {

struct Loader {
  static constexpr int kWarpRows = kTileTokens / kGroupWarps;
  // A copy of a warp takes 128 bytes of four rows, so that a lane has every fourth of the warp's.
  static constexpr int kLaneRows = kWarpRows / 4;

  // What is to be loaded next: a tile of a part of a unit.
  struct Tile {
    int at;       // where its first token is in the list
    int left;     // tokens from that on; 0 of a unit without tokens
    bool masked;  // it is a branch's
    bool first;   // of a part, whose Q is to be loaded
  };

  const Params& p;
  const Place s;
  const int warp, lane;
  Claims claims;  // only warp 0 claims
  Position<kUnits> work;
  Position<kTileStages> stage;
  uint32_t q_phase = 0;
  // Of the unit that is being loaded:
  int member_offset, num_rows, list_start, num_tokens;
  int single_query;  // the query, if the unit has but one, or -1
  bool masked;       // it is a branch
  int row;           // first one of the part

  __device__ __forceinline__ int lane_row(int j) const {
    return warp * kWarpRows + 4 * j + (lane >> 3);
  }

  // The lane's rows of a tile or of Q: where the first panel's chunk of row j goes. The chunks of
  // rows j and j + 2 lie 8 rows apart.
  __device__ __forceinline__ uint32_t place_of(uint32_t buffer, int j) const {
    const uint32_t sub_row = (4 * (j & 1)) | (lane >> 3);
    return buffer + (warp * kWarpRows + sub_row) * 128 + (((lane & 7) ^ sub_row) << 4) +
           (j >> 1) * 8 * 128;
  }

  // ---- tiles

  // Waits for the next unit and goes to its first tile. Returns false if there is none.
  __device__ __forceinline__ bool take_unit(Tile& tile) {
    barrier_wait(s.unit_full(work.index), work.phase);
    const WorkUnit& unit = s.board().units[work.index];
    member_offset = unit.member_offset;
    num_rows = unit.num_rows;
    list_start = unit.list_start;
    num_tokens = unit.num_tokens;
    single_query = unit.single_query() ? unit.member.query : -1;
    masked = unit.is_branch();
    barrier_release(s.unit_empty(work.index), lane);
    work.advance();
    row = 0;
    begin_part(tile);
    return num_tokens >= 0;
  }
  __device__ __forceinline__ void begin_part(Tile& tile) const {
    tile = {list_start, num_tokens, masked, true};
  }
  // Goes to the tile behind `tile`, which is one of `unit`. Returns whether there is one.
  __device__ __forceinline__ bool next_tile(Tile& tile) {
    if (tile.left > kTileTokens) {
      tile.at += kTileTokens;
      tile.left -= kTileTokens;
      tile.first = false;
      return true;
    }
    row += kTileRows;
    if (row >= num_rows) return take_unit(tile);
    begin_part(tile);
    return true;
  }

  // Asks for the slots of the lane's tokens.
  __device__ __forceinline__ void fetch_slots(uint32_t (&ids)[kLaneRows], const Tile& tile) const {
#pragma unroll
    for (int j = 0; j < kLaneRows; ++j) {
      const bool exists = lane_row(j) < tile.left;
      ids[j] = exists ? static_cast<uint32_t>(__ldg(claims.plan.list + tile.at + lane_row(j))) : 0;
    }
  }

  // Copies kCount panels from `panel` on of the rows at `from`. Rows that do not exist become
  // zeros: V must hold no NaN there, as 0 * NaN is NaN.
  template <int kCount>
  __device__ __forceinline__ void copy_panels(const char* const (&from)[kLaneRows], uint32_t even,
                                              uint32_t odd, int panel, int left) const {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
#pragma unroll
      for (int j = 0; j < kLaneRows; ++j) {
        const uint32_t to = (j & 1 ? odd : even) + (j >> 1) * 8 * 128 + (panel + i) * kPanelBytes;
        copy16_or_zero(to, from[j] + (panel + i) * 128, lane_row(j) < left);
      }
    }
  }

  __device__ __forceinline__ void load_tile(const uint32_t (&ids)[kLaneRows], const Tile& tile) {
    const char* from[kLaneRows];
    const char* k = p.f.k + 16 * (lane & 7);
#pragma unroll
    for (int j = 0; j < kLaneRows; ++j) from[j] = k + uint64_t{ids[j]} * p.f.k_stride_slot;
    const uint32_t even = place_of(s.tile(stage.index), 0), odd = place_of(s.tile(stage.index), 1);
#pragma unroll
    for (int part = 0; part < kRopePart; ++part) {
      barrier_wait(s.empty(stage.index, part), stage.phase ^ 1);
      copy_panels<2>(from, even, odd, 2 * part, tile.left);
    }
    barrier_wait(s.empty(stage.index, kRopePart), stage.phase ^ 1);
    copy_panels<1>(from, even, odd, kValuePanels, tile.left);
    if (tile.masked && warp == 0 && lane < kTileTokens / 8) {
      copy16(shared_address(&s.board().row_masks[stage.index][8 * lane]),
             p.f.row_masks + tile.at + 8 * lane);
    }
    barrier_arrive_copies(s.full(stage.index));
    stage.advance();
  }

  // ---- Q

  // Where the two parts of a packed row's Q are.
  struct QRows {
    const char* nope;
    const char* rope;
  };
  __device__ __forceinline__ QRows q_rows(int query, int in_query) const {
    const int draft = p.f.masked_tokens > 0 ? (in_query * p.f.head_group_magic) >> 16 : 0;
    const int head = in_query - draft * p.f.head_group;
    const int64_t token = int64_t{query} * (p.f.masked_tokens + 1) + draft;
    return {p.f.q + token * p.q_stride_row + head * p.f.q_stride_head,
            p.q_rope + token * p.q_rope_stride_row + head * p.q_rope_stride_head};
  }
  // Row lane % 16 of this warp's rows of the part, and its query, which is asked for some time
  // before it is needed.
  __device__ __forceinline__ int packed_row() const {
    return row + warp * kWarpRows + lane % kWarpRows;
  }
  __device__ __forceinline__ int query_of_row() const {
    if (single_query >= 0 || packed_row() >= num_rows) return single_query;
    return claims.plan.member_of(p.f, member_offset, packed_row()).query;
  }

  __device__ __forceinline__ void load_q(int query) {
    const int of_unit = packed_row(), member = (of_unit * p.f.group_magic) >> 16;
    const QRows rows = q_rows(query, of_unit - member * p.f.group);
    const int rows_left = num_rows - row;
    barrier_wait(s.q_empty(), q_phase ^ 1);
    q_phase ^= 1;
#pragma unroll
    for (int j = 0; j < kLaneRows; ++j) {
      const int from = 4 * j + (lane >> 3);
      const auto* nope = reinterpret_cast<const char*>(
          __shfl_sync(~0u, reinterpret_cast<uint64_t>(rows.nope), from));
      const auto* rope = reinterpret_cast<const char*>(
          __shfl_sync(~0u, reinterpret_cast<uint64_t>(rows.rope), from));
      const uint32_t to = place_of(s.q(), j);
      if (lane_row(j) < rows_left) {
#pragma unroll
        for (int i = 0; i < kValuePanels; ++i) {
          copy16(to + i * kPanelBytes, nope + i * 128 + 16 * (lane & 7));
        }
        copy16(to + kRopeOffset, rope + 16 * (lane & 7));
      }
    }
    barrier_arrive_copies(s.q_full());
  }

  __device__ __forceinline__ void run() {
    // The first unit, the slots of its first tile and its rows' queries, on their way with the
    // plan's header.
    uint32_t ids[kLaneRows];
    int query = 0;
    int4 unit_words{};
    if (p.f.first_units) {
      const FirstUnit& first = first_unit_of(p.f, blockIdx.x);
      if (lane < kUnitWords) unit_words = __ldg(reinterpret_cast<const int4*>(&first.unit) + lane);
#pragma unroll
      for (int j = 0; j < kLaneRows; ++j) ids[j] = __ldg(&first.slots[0][lane_row(j)]);
      query = static_cast<int>(__ldg(&first.rows[warp * kWarpRows + lane % kWarpRows].query));
    }
    if (warp == 0) claims.begin(unit_words);
    Tile tile;
    bool more = take_unit(tile);
    if (more && !claims.plan.given) {
      fetch_slots(ids, tile);
      query = query_of_row();
    }
    while (more) {
      if (warp == 0) {
        --claims.left;
        // No claim waits, unless this is the last tile and there is no unit behind it yet.
        const bool last = tile.left <= kTileTokens && row + kTileRows >= num_rows;
        do {
          claims.step();
        } while (last && claims.nothing_behind(work));
      }
      // Q comes first: behind K of all SMs it would take longer. Its buffer is free when the last
      // scores before are made, at about the time when a stage is.
      if (tile.first) load_q(query);
      Tile next = tile;
      uint32_t next_ids[kLaneRows];
      int next_query = 0;
      more = next_tile(next);
      if (more) {
        fetch_slots(next_ids, next);
        if (next.first) next_query = query_of_row();
      }
      load_tile(ids, tile);
      tile = next;
      query = next_query;
#pragma unroll
      for (int j = 0; j < kLaneRows; ++j) ids[j] = next_ids[j];
    }
    if (warp == 0) claims.finish();
  }
};

}  // namespace pat::mla
