// SPDX-License-Identifier: Apache-2.0
// The scheduler warp of the forward kernel.
#pragma once

#include "cuda/forward/pipeline.cuh"

namespace pat {

// Item of a unit.
__device__ __forceinline__ int item_of(const ForwardParams& p, int unit) {
  return p.kv_heads_magic == 0 ? unit : static_cast<int>(__umulhi(unit, p.kv_heads_magic));
}

// What the scheduler makes of unit `unit`; false if another launch runs it.
__device__ __forceinline__ bool describe(const ForwardParams& p, const Control& plan, int unit,
                                         Unit& u) {
  const int item = item_of(p, unit);
  const auto* items = reinterpret_cast<const int4*>(plan.items) + 2 * item;
  const int4 a = __ldg(items), b = __ldg(items + 1);
  u.member_offset = a.x;
  u.row_begin = 0;
  u.rows = a.y * p.group;
  u.batch_row = a.z;
  u.kv_start = a.w;
  u.tokens = b.w;
  u.head = unit - item * p.num_kv_heads;
  u.item = item;
  u.narrow = kNotNarrow;
  u.wide = 0;
  u.branch = b.x == kBranch;
  if (u.branch) u.batch_row = b.y >> 16;
  u.single = a.y == 1 && !u.branch;
  u.member = {a.z, b.z};
  const int row_tile = b.y & 0xFFFF;
  return row_tile >= p.min_row_tile && row_tile <= p.max_row_tile;
}

__device__ __forceinline__ int tiles_of(int tokens) {
  return (tokens + kTileTokens - 1) / kTileTokens;
}

template <int kHeadDim>
struct UnitScheduler {
  const ForwardParams& p;
  const Shared<kHeadDim>& s;
  const int lane;
  Cursor ring;
  int claimed_tiles = 0;

  // Lane `writer` puts its unit, of `tiles` tiles to load, into the ring.
  __device__ __forceinline__ void push(const Unit& u, int writer, int tiles) {
    barrier_wait(s.unit_empty(ring.index), ring.phase ^ 1);
    if (lane == writer) {
      s.control().units[ring.index] = u;
      barrier_arrive(s.unit_full(ring.index));
    }
    claimed_tiles += tiles;
    ring.advance(kUnits);
  }

  // The wide units of this CTA. Both halves take the same, in the same order.
  __device__ void run_wide(int total) {
    for (int unit = blockIdx.x; unit < total; unit += gridDim.x) {
      Unit u;
      if (!describe(p, s.control(), unit, u)) continue;
      const int tiles = max((tiles_of(u.tokens) + 1 - s.side) / 2, 1);
      const int rows = u.rows;
      u.wide = u.tokens > 0;
      for (u.row_begin = kTileRows * s.side; u.row_begin - kTileRows * s.side < rows;
           u.row_begin += 2 * kTileRows) {
        u.rows = min(max(rows - u.row_begin, 0), kTileRows);
        if (u.wide || u.rows > 0) push(u, 0, tiles);
      }
    }
  }

  __device__ __forceinline__ int claim(int32_t* tickets, int batch) const {
    int ticket = 0;
    if (lane == 0) ticket = atomicAdd(tickets, batch);
    return __shfl_sync(~0u, ticket, 0);
  }

  // The units before `end`: `first` (if negative, claimed too), then those from `begin` on that it
  // claims by ticket, and only when few tiles are left to load.
  __device__ __forceinline__ void run_list(int begin, int end, int first, int32_t* tickets) {
    int batch = 1;
    if (first < 0) first = begin + claim(tickets, batch);
    while (first < end) {
      // Lane i looks up the i-th unit of the batch.
      const int count = min(batch, end - first);
      Unit u{};
      bool mine = false;
      if (lane < count) {
        mine = describe(p, s.control(), first + lane, u);
        if (p.narrow && u.rows <= kNarrowRows && u.tokens > 0 && u.tokens <= kTileTokens &&
            !u.branch) {
          u.narrow = u.tokens <= kShortTokens ? kShort : kNarrow;
        }
      }
      int tiles = 1;
      for (int i = 0; i < count; ++i) {
        const int rows = __shfl_sync(~0u, u.rows, i);
        if (!__shfl_sync(~0u, static_cast<int>(mine), i)) continue;
        tiles = max(tiles_of(__shfl_sync(~0u, u.tokens, i)), 1);
        for (int begin_row = 0; begin_row < rows; begin_row += kTileRows) {
          Unit part = u;
          part.row_begin = begin_row;
          part.rows = min(rows - begin_row, kTileRows);
          push(part, i, tiles);
        }
      }
      batch = max(kAheadTiles / tiles, 1);
      int32_t& loaded = s.control().loaded_tiles;
      while (claimed_tiles - counted(loaded) > kAheadTiles) __nanosleep(40);
      __syncwarp();
      first = begin + claim(tickets, batch);
    }
  }

  // Heavy units keep the matrix units busy, light ones the memory: one half begins with these, the
  // other with those, and each goes on with what the others leave. Who finds no unit of its own
  // kind to begin with has one of the other kind.
  __device__ void run_lists(int begin, int middle, int end) {
    const int grid = gridDim.x, cta = blockIdx.x;
    const int heavy = middle - begin, light = end - middle;
    const bool two = s.halves == 2;
    bool is_light = s.side == 1;
    int first = is_light ? middle + cta : begin + cta;
    bool more = first < (is_light ? end : middle);
    if (!more) {
      first = is_light ? begin + grid + cta - light : middle + (two ? grid : 0) + cta - heavy;
      is_light = !is_light;
    }
#pragma unroll 1
    while (true) {
      const int given = is_light ? middle + (two ? grid : 0) + max(grid - heavy, 0)
                                 : begin + grid + (two ? max(grid - light, 0) : 0);
      run_list(given, is_light ? end : middle, first, p.queue + is_light);
      if (!more) break;
      more = false;
      is_light = !is_light;
      first = -1;
    }
  }

  __device__ void run() {
    // A plan of more queries than the batch has rows is not run; the merge says so in the output.
    const Control& plan = s.control();
    if (plan.num_queries <= p.num_rows) {
      const int wide =
          Shape<kHeadDim>::kWgmma && s.halves == 2 ? plan.num_wide_items * p.num_kv_heads : 0;
      run_wide(wide);
      run_lists(wide, (plan.num_wide_items + plan.num_heavy_items) * p.num_kv_heads,
                plan.num_items * p.num_kv_heads);
    }
    Unit end{};
    end.tokens = -1;
    push(end, 0, 0);
    // The last half leaves the queue as it found it, for the next launch.
    if (lane == 0) {
      __threadfence();
      if (atomicAdd(p.queue + 2, 1) == static_cast<int>(gridDim.x) * s.halves - 1) {
        for (int i = 0; i < 3; ++i) p.queue[i] = 0;
      }
    }
  }
};

}  // namespace pat
