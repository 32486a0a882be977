// SPDX-License-Identifier: Apache-2.0
// The scheduler warp of a half: decides which work units the half runs, the longest of a list
// first, and puts them into the ring that fetcher, loaders and consumers read.
//
// Work units are numbered as the plan orders its items: unit i is KV head i % num_kv_heads of item
// i / num_kv_heads. So those of wide items come first, then heavy, then light ones.
#pragma once

#include "cuda/forward/pipeline.cuh"

namespace pat {

// Item of work unit `index`.
__device__ __forceinline__ int item_of(const ForwardParams& p, int index) {
  return divide(index, p.kv_heads_magic);
}

// Reads work unit `index` from the plan. Returns false if another launch runs it: kStreams.
template <Drafts kDrafts>
__device__ __forceinline__ bool describe(const ForwardParams& p, const Control& control, int index,
                                         WorkUnit& unit) {
  const int item = item_of(p, index);
  // The fields of Item, as two loads: member_offset, num_queries, list_start, tokens; query,
  // partial, row_tile and unmasked_tiles in one word, common_tiles, kind and order in one.
  const auto* items = reinterpret_cast<const int4*>(control.items) + 2 * item;
  const int4 a = __ldg(items), b = __ldg(items + 1);
  unit.member_offset = a.x;
  unit.first_packed_row = 0;
  unit.num_rows = a.y * p.group;
  unit.list_start = a.z;
  unit.num_tokens = a.w;
  // The common tiles, if it is one of a pair: run_both() does the rest.
  unit.halved_tokens = (b.w & 0xFFFF) * kTileTokens;
  unit.item = item;
  unit.kv_head = static_cast<int16_t>(index - item * p.num_kv_heads);
  unit.unmasked_tiles = static_cast<int16_t>(b.z >> 16);
  unit.member = {b.x, b.y};
  unit.pair = 0;
  unit.kind = static_cast<ItemKind>(b.w >> 16 & 0xFF);
  unit.order = static_cast<BranchOrder>(b.w >> 24);
  unit.narrow = kNotNarrow;
  unit.pairing = kAlone;
  unit.joint = 0;
  const int row_tile = b.z & 0xFFFF;
  return row_tile >= p.min_row_tile && row_tile <= p.max_row_tile;
}

__device__ __forceinline__ int tiles_of(int tokens) {
  return (tokens + kTileTokens - 1) / kTileTokens;
}

// kFirst: only finds the unit that it would push first, and keeps it in `found`.
template <int kHeadDim, Drafts kDrafts, bool kFirst = false>
struct UnitScheduler {
  const ForwardParams& p;
  const Shared<kHeadDim>& s;
  const int lane;
  WorkRing work;
  int claimed_tiles = 0;
  bool given = false;  // the next unit has been pushed: see FirstUnit
  WorkUnit found;      // with kFirst: of lane `finder`
  int finder = -1;

  // Puts the unit of lane `writer`, of which this half loads `tiles` tiles, into the ring.
  __device__ __forceinline__ void push(const WorkUnit& unit, int writer, int tiles) {
    if constexpr (kFirst) {
      if (finder >= 0) return;
      found = unit;
      finder = writer;
      return;
    }
    if (given) {
      // No wait: the half may have released the unit already. Then the barrier is in its second
      // phase, in which the parity that the first wait asks for reads as "not empty".
      given = false;
    } else {
      work.wait_empty(s.base);
      if (lane == writer) {
        s.control().units[work.index] = unit;
        barrier_arrive(work.full(s.base));
      }
    }
    claimed_tiles += tiles;
    work.advance();
  }

  // Tells the half that there are no more units. A unit of which nothing else is written takes less
  // code than push().
  __device__ __forceinline__ void push_end() {
    if constexpr (kFirst) {
      WorkUnit end{};
      end.num_tokens = -1;
      push(end, 0, 0);
    } else if (!given) {
      work.wait_empty(s.base);
      if (lane == 0) {
        s.control().units[work.index].num_tokens = -1;
        barrier_arrive(work.full(s.base));
      }
    }
  }

  // Pushes the units that the two halves of this CTA run at the same time. A joint plan has only
  // such units, at most one a CTA; half 1 sits out a unit of a single tile. In other plans units
  // before `wide` run in two parts, one a half, and those from `wide` to `end` are pairs of
  // branches, one a half, in the same order in both halves. Most plans have few or none. Code that
  // every plan runs should be contiguous, because it is often in no cache (see join_warps()).
  __device__ __forceinline__ void run_both(bool joint, int wide, int end) {
    int num_pairs = 0;
    for (int index = blockIdx.x; __builtin_expect(index < end, 0); index += gridDim.x) {
      const bool paired = index >= wide;
      // Each pair before has two items, and half 1 takes the second one of its own.
      const int further = paired ? item_of(p, index - wide) + s.sm_half : 0;
      WorkUnit unit;
      if (!describe<kDrafts>(p, s.control(), index + further * p.num_kv_heads, unit)) continue;
      const int tiles = tiles_of(unit.num_tokens);
      int halved = tiles;  // those of which each half loads every second one
      if (joint) {
        unit.joint = tiles > 1;
        if (!unit.joint) {
          if (s.sm_half == 1) return;
          halved = 0;
        }
        unit.halved_tokens = unit.joint ? unit.num_tokens : 0;
      } else if (!paired) {
        unit.halved_tokens = unit.num_tokens;
        unit.pairing = tiles > 0 ? kCommonFirst : kAlone;
      } else {
        const int peer_tokens = __ldg(&s.control().items[unit.item + 1 - 2 * s.sm_half].tokens);
        const int least = min(unit.num_tokens, peer_tokens);
        halved = unit.halved_tokens / kTileTokens;
        // If one of the two has no own tiles, both begin with the common ones. Before a snapshot
        // items have no tokens.
        unit.pairing = unit.order == BranchOrder::kCommonLast && least > unit.halved_tokens
                           ? kOwnFirst
                           : kCommonFirst;
        if (least < unit.halved_tokens) {
          unit.pairing = kAlone;
          halved = unit.halved_tokens = 0;
        }
      }
      const int loads = tiles > 0 ? (halved + 1 - s.sm_half) / 2 + tiles - halved : 1;
      const int rows = unit.num_rows, skipped = joint || paired ? 0 : kTileRows * s.sm_half;
      for (int row = skipped; row - skipped < rows; row += 2 * kTileRows) {
        unit.first_packed_row = row;
        unit.num_rows = min(max(rows - row, 0), kTileRows);
        unit.pair = static_cast<int16_t>(++num_pairs);
        if (unit.pairing || unit.num_rows > 0) push(unit, 0, loads);
        if (kFirst && finder >= 0) return;
      }
    }
  }

  // Takes the next `count` tickets of a queue that all CTAs share.
  __device__ __forceinline__ int claim(int32_t* tickets, int count) const {
    int ticket = 0;
    if (lane == 0) ticket = atomicAdd(tickets, count);
    return __shfl_sync(~0u, ticket, 0);
  }

  // Describes the `count` units from `first` on, lane i the i-th. Returns whether this lane has a
  // unit to run.
  __device__ __forceinline__ bool describe_batch(int first, int count, WorkUnit& unit) const {
    if (lane >= count) return false;
    const bool mine = describe<kDrafts>(p, s.control(), first + lane, unit);
    unit.halved_tokens = 0;  // of a pair that no two halves run at the same time
    if (p.narrow && unit.num_rows <= kNarrowRows && unit.num_tokens > 0 &&
        unit.num_tokens <= kTileTokens && !unit.is_branch()) {
      unit.narrow = unit.num_tokens <= kShortTokens ? kShort : kNarrow;
    }
    return mine;
  }

  // Pushes units before `end`: unit `first`, then those from `begin` on that it claims by ticket.
  // If `first` is negative the first unit is claimed too. Claims only when few tiles are left to
  // load, so that no half holds work that another could start.
  __device__ __forceinline__ void run_list(int begin, int end, int first, int32_t* tickets) {
    int batch = 1;
    if (first < 0) first = begin + claim(tickets, batch);
    while (first < end) {
      const int count = min(batch, end - first);
      WorkUnit unit{};
      const bool mine = describe_batch(first, count, unit);
      int tiles = 1;
      for (int i = 0; i < count; ++i) {
        const int rows = __shfl_sync(~0u, unit.num_rows, i);
        if (!__shfl_sync(~0u, static_cast<int>(mine), i)) continue;
        tiles = max(tiles_of(__shfl_sync(~0u, unit.num_tokens, i)), 1);
        for (int packed_row = 0; packed_row < rows; packed_row += kTileRows) {
          WorkUnit part = unit;
          part.first_packed_row = packed_row;
          part.num_rows = min(rows - packed_row, kTileRows);
          push(part, i, tiles);
        }
      }
      if constexpr (kFirst) return;
      batch = max(kAheadTiles / tiles, 1);
      int32_t& loaded = s.control().loaded_tiles;
      // Asking more often takes issue slots from the consumers. A sleep may last twice what it was
      // told, so 80 ns a tile; loading one takes longer.
      for (int more; (more = claimed_tiles - counted(loaded) - kAheadTiles) > 0;) {
        __nanosleep(40 * more);
      }
      __syncwarp();
      first = begin + claim(tickets, batch);
    }
  }

  // Pushes the heavy units, [begin, middle), and the light ones, [middle, end). Heavy units keep
  // the matrix units busy and light ones the memory, so half 0 starts with heavy units and half 1
  // with light ones; each then continues with what is left of the other kind. A half with no unit
  // of its preferred kind starts with one of the other kind.
  __device__ void run_lists(int begin, int middle, int end, int pairs) {
    const int grid = gridDim.x;
    const int heavy = middle - begin, light = end - middle;
    const bool two = s.num_halves == 2;
    bool is_light = s.sm_half == 1;
    // The CTAs take the first units of a list in turn, from the CTA on that comes after the last
    // one that took a unit before: it has the least to do.
    const int before = is_light ? middle : begin;
    const int passed = before - pairs;  // of each pair a CTA takes two units
    const int taken = passed - grid * divide(passed, p.grid_magic);
    const int turn = blockIdx.x - taken + (static_cast<int>(blockIdx.x) < taken ? grid : 0);
    int first = before + turn;
    bool more = first < (is_light ? end : middle);
    if (!more) {
      first = is_light ? begin + grid + turn - light : middle + (two ? grid : 0) + turn - heavy;
      is_light = !is_light;
    }
#pragma unroll 1
    while (true) {
      // The first unit that is claimed by ticket: those before it are some half's first.
      const int ticketed = is_light ? middle + (two ? grid : 0) + max(grid - heavy, 0)
                                    : begin + grid + (two ? max(grid - light, 0) : 0);
      run_list(ticketed, is_light ? end : middle, first, p.queue + is_light);
      if constexpr (kFirst) return;
      if (!more) break;
      more = false;
      is_light = !is_light;
      first = -1;
    }
  }

  __device__ __forceinline__ void run_plan() {
    using S = Shape<kHeadDim>;
    const Control& control = s.control();
    const int total = control.num_items * p.num_kv_heads;
    const bool two = S::kWgmma && s.num_halves == 2;
    const bool joint = S::kJoint && two && control.joint && total <= static_cast<int>(gridDim.x);
    const int wide = joint ? total : two ? control.num_wide_items * p.num_kv_heads : 0;
    const int pairs = two ? control.num_paired_items / 2 * p.num_kv_heads : 0;
    run_both(joint, wide, wide + pairs);
    if (joint || (kFirst && finder >= 0)) return;
    run_lists(wide + 2 * pairs, (control.num_wide_items + control.num_heavy_items) * p.num_kv_heads,
              total, pairs);
  }

  __device__ void run() {
    // A plan of more queries than the buffers have room for is not run: the merge writes NaN.
    if (s.control().num_queries <= p.num_rows) run_plan();
    push_end();
    if constexpr (kFirst) return;
    // The last half to finish resets the queue for the next launch.
    if (lane == 0) {
      __threadfence();
      if (atomicAdd(p.queue + 2, 1) == static_cast<int>(gridDim.x) * s.num_halves - 1) {
        for (int i = 0; i < 3; ++i) p.queue[i] = 0;
      }
    }
  }
};

}  // namespace pat
