// SPDX-License-Identifier: Apache-2.0
// The scheduler warp, the fetcher warp and the loader warps of the forward kernel.
#pragma once

#include "cuda/forward.cuh"

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

template <int kHeadDim>
struct Loader {
  using S = Shape<kHeadDim>;
  static constexpr int kTokens = kTileTokens / kLoaderWarps;   // of a tile, per warp
  static constexpr int kLaneRows = kTokens / S::kRowsPerCopy;  // rows of a tile, per lane

  const ForwardParams& p;
  const Shared<kHeadDim>& s;
  const int warp;  // 0 .. kLoaderWarps - 1
  const int lane;
  Cursor ring, slots, stage;
  int shared_fills = 0;  // fills to come of stages that the other half may still read

  __device__ __forceinline__ int chunk() const { return lane % S::kChunks; }
  __device__ __forceinline__ int sub_row() const { return lane / S::kChunks; }

  // Copies this warp's share of a tile to rows `row` on: the tokens from `token` of the tile on, of
  // which `left` exist. Zeros follow up to `end`.
  template <bool kZeros>
  __device__ __forceinline__ void copy_rows(const char* base, uint32_t stride, int token, int row,
                                            int left, int end) {
    const int first = sub_row() * kLaneRows;
    const auto* ids =
        reinterpret_cast<const uint4*>(&s.control().slots[slots.index][token + first]);
    const uint32_t dst = s.tile(stage.index) + (chunk() >> 3) * S::kPanelBytes +
                         (row + first) * 128 + ((chunk() & 7) << 4);
    base += chunk() * 16;
    asm volatile("" : "+l"(base));  // one 64-bit sum: each address is then one instruction
    const bool full = left >= kTokens;
#pragma unroll 1
    for (int i = 0; i < kLaneRows; i += 8) {
      const uint4 a = ids[i / 4], b = ids[i / 4 + 1];
      const uint32_t id[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
      if (full) {
        const char* src[8];
#pragma unroll
        for (int j = 0; j < 8; ++j) src[j] = base + static_cast<uint64_t>(id[j]) * stride;
#pragma unroll
        for (int j = 0; j < 8; ++j) copy16((dst ^ (j << 4)) + (i + j) * 128, src[j]);
      } else {
#pragma unroll
        for (int j = 0; j < 8; ++j) {
          const bool valid = first + i + j < left;
          const char* src = base + static_cast<uint64_t>(valid ? id[j] : 0) * stride;
          const uint32_t to = (dst ^ (j << 4)) + (i + j) * 128;
          if constexpr (kZeros) {
            if (first + i + j < end) copy16_or_zero(to, src, valid);
          } else if (valid) {
            copy16(to, src);
          }
        }
      }
    }
  }

  // Wide units come first, so that both barriers of a stage are in the same phase for as long as
  // the other half reads this half's tiles.
  __device__ __forceinline__ void wait_stage() {
    barrier_wait(s.empty(stage.index), stage.phase ^ 1);
    if (shared_fills > 0) {
      barrier_wait(s.peer_empty(stage.index), stage.phase ^ 1);
      --shared_fills;
    }
  }
  __device__ __forceinline__ void finish_stage() {
    barrier_arrive_copies(s.full(stage.index));
    stage.advance(p.stages);
  }

  __device__ __forceinline__ void load_short(const Unit& u, const char* k, const char* v) {
    barrier_wait(s.slot_full(slots.index), slots.phase);
    wait_stage();
    // One warp copies K, the other V.
    copy_rows<true>(warp == 0 ? k : v, warp == 0 ? p.k_stride_slot : p.v_stride_slot, 0,
                    warp * kTokens, u.tokens, (u.tokens + 15) & ~15);
    finish_stage();
    barrier_release(s.slot_empty(slots.index), lane);
    slots.advance(kSlotTiles);
  }

  __device__ __forceinline__ void load_tiles(const Unit& u, const char* k, const char* v) {
    // wgmma multiplies all of a tile
    const bool whole = u.wide || (S::kWgmma && (u.rows > 32 || u.branch));
    const uint16_t* seen = p.branches.rows + u.kv_start + 8 * lane;
    const int step = u.wide ? 2 * kTileTokens : kTileTokens;
    for (int left = u.tokens - (u.wide ? s.side * kTileTokens : 0); left > 0; left -= step) {
      barrier_wait(s.slot_full(slots.index), slots.phase);
      if (u.wide) shared_fills = p.stages + 2;
      wait_stage();
      if (u.branch && warp == 0 && lane < kTileTokens / 8) {
        copy16(shared_address(&s.control().rows[stage.index][8 * lane]), seen);
        seen += kTileTokens;
      }
      const int mine = left - warp * kTokens;
      copy_rows<false>(k, p.k_stride_slot, warp * kTokens, warp * kTokens, mine, 0);
      finish_stage();
      wait_stage();
      copy_rows<true>(v, p.v_stride_slot, warp * kTokens, warp * kTokens, mine,
                      whole ? kTokens : (mine + 15) & ~15);
      finish_stage();
      barrier_release(s.slot_empty(slots.index), lane);
      slots.advance(kSlotTiles);
      if (left > step) publish();
    }
  }

  // One more tile is loaded, or a unit without tokens is passed.
  __device__ __forceinline__ void publish() {
    if (warp == 0 && lane == 0) count_one(s.control().loaded_tiles);
  }

  __device__ void run() {
    for (;; ring.advance(kUnits)) {
      barrier_wait(s.unit_full(ring.index), ring.phase);
      const Unit u = s.control().units[ring.index];
      if (u.tokens < 0) break;
      const char* k = p.k + u.head * p.k_stride_head;
      const char* v = p.v + u.head * p.v_stride_head;
      if (u.narrow == kShort) {
        load_short(u, k, v);
      } else {
        load_tiles(u, k, v);
      }
      publish();
      barrier_release(s.unit_empty(ring.index), lane);
    }
  }
};

}  // namespace pat
