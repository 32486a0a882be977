// SPDX-License-Identifier: Apache-2.0
// Which work units a CTA of the MLA forward runs: items, all of one kind, as up to 64 packed rows
// take the same time however few they are. CTA i begins with item i, and what follows is claimed by
// ticket, in the plan's order. An item of more rows is run in parts of 64.
#pragma once

#include "cuda/mla/shape.cuh"

namespace pat::mla {

// An item as it is read from the plan: the fields of Item, as describe() of scheduler.cuh takes
// them.
struct RawItem {
  int4 a, b;

  __device__ __forceinline__ void read(const Item* items, int index) {
    const auto* at = reinterpret_cast<const int4*>(items + index);
    a = __ldg(at);
    b = __ldg(at + 1);
  }
  // `num_rows` are all of the item's, also of one that is run in parts.
  __device__ __forceinline__ WorkUnit unit(const ForwardParams& p, int index) const {
    WorkUnit unit;
    unit.member_offset = a.x;
    unit.first_packed_row = 0;
    unit.num_rows = a.y * p.group;
    unit.list_start = a.z;
    unit.num_tokens = a.w;
    unit.halved_tokens = 0;
    unit.item = index;
    unit.kv_head = 0;
    unit.unmasked_tiles = static_cast<int16_t>(b.z >> 16);
    unit.member = {b.x, b.y};
    unit.pair = 0;
    unit.kind = static_cast<ItemKind>(b.w >> 16 & 0xFF);
    unit.order = static_cast<BranchOrder>(b.w >> 24);
    unit.narrow = kNotNarrow;
    unit.pairing = kAlone;
    unit.joint = 0;
    return unit;
  }
};

// Packed rows of the part of an item that begins with row `row`. All warps run an item's parts one
// after the other.
__device__ __forceinline__ int rows_of_part(int rows, int row) {
  return min(rows - row, kTileRows);
}

// What the warps of a CTA look up of the plan, each for itself.
struct PlanArrays {
  const Item* items;
  const Member* members;
  const int32_t* list;
  int32_t num_items;  // 0 if the batch has fewer rows than the plan: the merge writes NaN then
  bool given;         // the snapshot has written down the first units

  __device__ __forceinline__ explicit PlanArrays(const ForwardParams& p) {
    const auto* plan = reinterpret_cast<const char*>(p.plan);
    const bool fits = p.plan->num_queries <= p.num_rows;
    items = reinterpret_cast<const Item*>(plan + p.plan->items_offset);
    members = reinterpret_cast<const Member*>(plan + p.plan->members_offset);
    list = p.plan->list;
    num_items = fits ? p.plan->num_items : 0;
    given = fits && p.plan->first_units && p.first_units;
  }
  // The query of packed row `row` of an item whose first member is `member_offset`, and where the
  // row's result goes.
  __device__ __forceinline__ Member member_of(const ForwardParams& p, int member_offset,
                                              int row) const {
    const int member = (row * p.group_magic) >> 16;
    const int2 m = __ldg(reinterpret_cast<const int2*>(members) + member_offset + member);
    return {m.x, m.y};
  }
};

inline constexpr int kUnitWords = sizeof(WorkUnit) / 16;

__device__ __forceinline__ const FirstUnit& first_unit_of(const ForwardParams& p, int cta) {
  return p.first_units[2 * cta];
}

// The scheduler: a part of the first loader warp, which must not wait while there are tiles to
// load. So a claim takes three steps, one a tile: the tickets, the items, the ring.
struct Claims {
  // Claims when no more tiles are left to load, so that no CTA holds work that another could start.
  // A push must not wait for a unit that this warp has not loaded yet: the ring holds the unit that
  // it loads, those of the tiles left, and a batch.
  static constexpr int kAhead = 3;
  static_assert(1 + kAhead + kAhead < kUnits);

  const ForwardParams& p;
  const Place s;
  const PlanArrays plan;
  const int lane;
  Position<kUnits> work;  // where the next unit is pushed
  int left = 0;           // tiles of units pushed, not yet loaded
  int batch = 1;          // items to claim at once
  int first = 0;          // of the items claimed
  enum : int { kNothing, kTickets, kItems, kEnd } asked = kNothing;
  RawItem item{};  // of this lane: item first + lane

  __device__ __forceinline__ void wait_empty() const {
    barrier_wait(s.unit_empty(work.index), work.phase ^ 1);
  }
  // After the unit has been written to the ring.
  __device__ __forceinline__ void pushed(int rows, int tokens) {
    const int tiles = (rows + kTileRows - 1) / kTileRows * tiles_of(tokens);
    left += tiles;
    batch = max(kAhead / tiles, 1);
    work.advance();
  }
  // Pushes the item of lane `writer`.
  __device__ __forceinline__ void push(int index, int writer) {
    wait_empty();
    if (lane == writer) {
      s.board().units[work.index] = item.unit(p, index);
      barrier_arrive(s.unit_full(work.index));
    }
    pushed(__shfl_sync(~0u, item.a.y, writer) * p.group, __shfl_sync(~0u, item.a.w, writer));
  }
  __device__ __forceinline__ void push_end() {
    wait_empty();
    if (lane == 0) {
      s.board().units[work.index].num_tokens = -1;
      barrier_arrive(s.unit_full(work.index));
    }
    __syncwarp();
    work.advance();
    asked = kEnd;
  }
  // Behind all claims: the last CTA to finish resets the queue for the next launch.
  __device__ __forceinline__ void finish() const {
    if (lane != 0) return;
    __threadfence();
    if (atomicAdd(p.queue + 2, 1) == static_cast<int>(gridDim.x) - 1) {
      p.queue[0] = 0;
      p.queue[2] = 0;
    }
  }

  // Whether the unit at `next`, or the end, is still to be pushed.
  __device__ __forceinline__ bool nothing_behind(const Position<kUnits>& next) const {
    return work.index == next.index;
  }

  // Pushes the unit that this CTA begins with, and the end if there are no others to claim.
  // `words`: the lane's of the unit, if the snapshot has written down the first units.
  __device__ __forceinline__ void begin(const int4& words) {
    const int index = blockIdx.x;
    if (index < plan.num_items) push_first(index, words);
    if (plan.num_items <= static_cast<int>(gridDim.x)) push_end();
  }
  __device__ __forceinline__ void push_first(int index, const int4& words) {
    if (!plan.given) {
      item.read(plan.items, index);
      return push(index, 0);
    }
    WorkUnit& to = s.board().units[0];
    if (lane < kUnitWords) reinterpret_cast<int4*>(&to)[lane] = words;
    __syncwarp();
    const int rows = to.num_rows, tokens = to.num_tokens;
    if (lane == 0) barrier_arrive(s.unit_full(0));
    pushed(rows, tokens);
  }

  // Takes what has been claimed one step further. What it asks for arrives while the copies of a
  // tile are made, so that the next step does not wait.
  __device__ __forceinline__ void step() {
    if (asked == kItems) {
      asked = kNothing;
      const int end = min(first + batch, plan.num_items);
#pragma unroll 1
      for (int i = 0; first < end; ++i, ++first) push(first, i);
      if (end == plan.num_items) return push_end();
    }
    if (asked == kTickets) {
      asked = kItems;
      first = static_cast<int>(gridDim.x) + __shfl_sync(~0u, first, 0);
      if (first >= plan.num_items) return push_end();
      if (lane < min(batch, plan.num_items - first)) item.read(plan.items, first + lane);
    } else if (asked == kNothing && left <= kAhead) {
      asked = kTickets;
      if (lane == 0) first = atomicAdd(p.queue, batch);
    }
  }
};

}  // namespace pat::mla
