// SPDX-License-Identifier: Apache-2.0
// What the warps of a half share: work units, slots, K/V stages and Q buffers in shared memory,
// each kind in a ring, and the mbarriers by which one warp hands them to the next.
#pragma once

#include "cuda/params.h"
#include "cuda/ptx.cuh"
#include "cuda/tiles.h"
#include "state.h"

namespace pat {

// What the tokens of a query in one step are: one alone, a chain of draft tokens, or a tree of them
// with masks. A kernel is compiled for one of the three: with code for masks in it, chains were 2 %
// slower.
enum Drafts : int { kNoDrafts = 0, kChains = 1, kTrees = 2 };
enum Narrow : int8_t { kNotNarrow = 0, kNarrow = 1, kShort = 2 };
// Whether the halves of an SM run two units at the same time that begin with the same tokens. They
// are paired branches, each with tokens of its own behind these or before them, or the two parts of
// a wide item, which have none of their own.
enum Pairing : int8_t { kAlone = 0, kCommonFirst = 1, kOwnFirst = 2 };

// One item of the plan for one KV head, or, of items with more packed rows than a Q buffer has, a
// part of that. num_tokens < 0: the scheduler has no more work units.
struct alignas(16) WorkUnit {
  int32_t member_offset;     // of the item's first member in the plan
  int32_t first_packed_row;  // of the item's
  int32_t num_rows;          // packed rows of this unit
  int32_t list_start;        // where its slots begin in the list
  int32_t num_tokens;
  int32_t halved_tokens;  // so many of the first, of which each half loads every second tile: 0,
                          // whole tiles, or num_tokens
  int32_t item;
  int16_t kv_head;
  int16_t unmasked_tiles;  // as in Item
  Member member;           // of a single query; else members are looked up
  int16_t pair;            // its number among the pairs of this SM, from 1 on
  ItemKind kind;
  BranchOrder order;
  Narrow narrow;
  Pairing pairing;
  int8_t joint;  // both halves work on it, each on all rows and on every second tile

  __device__ __forceinline__ bool is_branch() const { return kind == ItemKind::kBranch; }
  // Its last tokens are draft tokens, to which not all of its rows attend.
  __device__ __forceinline__ bool has_drafts() const { return kind == ItemKind::kDrafts; }
  // All packed rows belong to one query.
  __device__ __forceinline__ bool single_query() const {
    return kind == ItemKind::kSingle || kind == ItemKind::kDrafts;
  }
};

// Which tiles a half loads of a unit: of the first `halved_tokens` tokens every second one, and all
// others. With kOwnFirst the others come first.
//
// First token of the first tile; not less than num_tokens if there is none.
__device__ __forceinline__ int first_token(const WorkUnit& unit, int sm_half) {
  const int of_half = min(sm_half * kTileTokens, unit.halved_tokens);
  return unit.pairing == kOwnFirst ? unit.halved_tokens : of_half;
}
// That of the tile after the one that begins at `token`.
__device__ __forceinline__ int next_token(const WorkUnit& unit, int sm_half, int token) {
  const bool own_first = unit.pairing == kOwnFirst;
  if (token < unit.halved_tokens) {
    const int next = token + 2 * kTileTokens;
    if (next < unit.halved_tokens) return next;
    return own_first ? unit.num_tokens : unit.halved_tokens;
  }
  const int next = token + kTileTokens, of_half = sm_half * kTileTokens;
  return own_first && next >= unit.num_tokens && of_half < unit.halved_tokens ? of_half : next;
}
// The same tiles as two ranges, numbers 0 and 1, either of which may be empty: a loop over a range
// takes fewer instructions a tile.
struct TileRange {
  int first, end;  // tokens
  int step;        // from a tile's first token to that of the next one
  bool halved;     // the other half loads the tiles between these

  // The first range that is not known to be empty.
  static __device__ __forceinline__ int first_number(const WorkUnit& unit) {
    return unit.halved_tokens == 0;
  }
  __device__ __forceinline__ TileRange(const WorkUnit& unit, int number, int sm_half)
      : halved((number == 1) == (unit.pairing == kOwnFirst)) {
    first = halved ? sm_half * kTileTokens : unit.halved_tokens;
    end = halved ? unit.halved_tokens : unit.num_tokens;
    step = halved ? 2 * kTileTokens : kTileTokens;
  }
};

// Where a packed row is in Q, from p.q on: `query` times q_stride_query, `head` times
// q_stride_head, and `draft`, its draft token, times bytes_between.
struct QRow {
  uint32_t query;  // kNoQuery: there is no such row
  uint16_t head, draft;
};
inline constexpr uint32_t kNoQuery = ~0u;

// What a half begins with, written down once a step, so that in every layer it can ask for its
// first K and Q as soon as it runs: the slots of the first tiles that it loads, the unit that its
// scheduler pushes first, and the unit's rows if the consumers copy them (copy_first_q()).
struct alignas(128) FirstUnit {
  uint32_t slots[kGivenTiles][kTileTokens];
  WorkUnit unit;
  QRow rows[kTileRows];
};
static_assert(sizeof(WorkUnit) == 48 && 2 * kMostCtas * sizeof(FirstUnit) == kFirstUnitBytes);
static_assert(kGivenTiles < kSlotTiles);  // see Loader::wait_slots()

// The mbarriers of a ring of buffers.
template <int kCapacity>
struct RingBarriers {
  uint64_t full[kCapacity], empty[kCapacity];
};

// The head of a half's shared memory.
struct alignas(1024) Control {
  RingBarriers<kMaxStages> stage_barriers;
  // Of stages with a common tile of a pair: the other half's consumers have read it.
  uint64_t peer_empty[kMaxStages];
  RingBarriers<2> q_barriers;
  RingBarriers<kWorkUnits> work_barriers;
  RingBarriers<kSlotTiles> slot_barriers;
  RingBarriers<kNarrowBuffers> narrow_barriers;
  alignas(16) uint32_t slots[kSlotTiles][kTileTokens];
  // Row masks of the tokens whose K is in a stage.
  alignas(16) uint16_t row_masks[kMaxStages][kTileTokens];
  WorkUnit units[kWorkUnits];
  union {                             // each consumer warp has a part of its own
    float exchange[4][kWarpRows][2];  // softmax states: [warp][row][max, sum]
    QRow first_rows[4][kWarpRows];    // of the FirstUnit: read before any state is written
  };
  alignas(16) int32_t messages[4][4];  // of pairs: see Consumer::tell()
  int32_t loaded_tiles;
  // The plan's header and arrays, looked up once.
  int32_t num_queries, num_items, num_wide_items, num_paired_items, num_heavy_items, joint;
  int32_t given;  // 1: units[0] and the first slots hold this half's FirstUnit
  const Item* items;
  const Member* members;
  const int32_t* list;

  // Notes what the scheduler and others need of the plan at `at`, whose header is `header`.
  __device__ __forceinline__ void note_plan(const PlanHeader* at, const PlanHeader& header) {
    const auto* plan = reinterpret_cast<const char*>(at);
    num_queries = header.num_queries;
    num_items = header.num_items;
    num_wide_items = header.num_wide_items;
    num_paired_items = header.num_paired_items;
    num_heavy_items = header.num_heavy_items;
    joint = header.joint;
    given = header.first_units;
    items = reinterpret_cast<const Item*>(plan + header.items_offset);
    members = reinterpret_cast<const Member*>(plan + header.members_offset);
    list = header.list;
  }
};
static_assert(sizeof(Control) == 4096);

// One warp's position in a ring of buffers. Warps that fill a buffer wait until it is empty and
// then arrive at full(); warps that read it wait until it is full and then arrive at empty(). Every
// warp must wait on every phase: mbarrier parity cannot tell phase n from phase n + 2. The
// scheduler's first push alone does not wait (UnitScheduler::push). `control` is the address of the
// half's Control, kBarriers the offset of the ring's RingBarriers in it.
template <uint32_t kBarriers, int kCapacity>
struct Ring {
  int index = 0;
  uint32_t phase = 0;

  static __device__ __forceinline__ uint32_t full(uint32_t control, uint32_t i) {
    return control + kBarriers + 8 * i;
  }
  static __device__ __forceinline__ uint32_t empty(uint32_t control, uint32_t i) {
    return control + (kBarriers + 8 * kCapacity) + 8 * i;
  }
  // Initialises the barriers of buffer i: how many arrivals complete a phase of each.
  static __device__ __forceinline__ void init(uint32_t control, uint32_t i, int full_arrivals,
                                              int empty_arrivals) {
    barrier_init(full(control, i), full_arrivals);
    barrier_init(empty(control, i), empty_arrivals);
  }
  __device__ __forceinline__ uint32_t full(uint32_t control) const { return full(control, index); }
  __device__ __forceinline__ uint32_t empty(uint32_t control) const {
    return empty(control, index);
  }
  __device__ __forceinline__ void wait_full(uint32_t control) const {
    barrier_wait(full(control), phase);
  }
  __device__ __forceinline__ void wait_empty(uint32_t control) const {
    barrier_wait(empty(control), phase ^ 1);
  }
  __device__ __forceinline__ void advance(int size = kCapacity) {
    if (++index == size) {
      index = 0;
      phase ^= 1;
    }
  }
};
using WorkRing = Ring<offsetof(Control, work_barriers), kWorkUnits>;
using SlotRing = Ring<offsetof(Control, slot_barriers), kSlotTiles>;
using NarrowRing = Ring<offsetof(Control, narrow_barriers), kNarrowBuffers>;
// Of these two the launch says how many buffers there are: advance(p.stages), advance(p.q_buffers).
using StageRing = Ring<offsetof(Control, stage_barriers), kMaxStages>;
using QRing = Ring<offsetof(Control, q_barriers), 2>;

// Address of Control::peer_empty[stage] of the half whose Control is at `control`.
__device__ __forceinline__ uint32_t peer_empty_barrier(uint32_t control, int stage) {
  return control + static_cast<uint32_t>(offsetof(Control, peer_empty)) + 8 * stage;
}

template <int kHeadDim>
struct Shape {
  static constexpr int kTileBytes = kTileTokens * kHeadDim * 2;
  static constexpr int kPanelBytes = kTileTokens * 128;
  static constexpr int kChunks = kHeadDim / 8;                     // 16-byte chunks of a row
  static constexpr int kRowsPerCopy = 32 / kChunks;                // rows of one warp-wide copy
  static constexpr int kNarrowPanelBytes = kNarrowRows * 128;      // panel of a narrow unit's Q
  static constexpr int kNarrowBytes = kNarrowRows * kHeadDim * 2;  // Q of a narrow unit
  static constexpr int kMaxHalves = kHeadDim > 128 ? 1 : 2;
  static constexpr bool kWgmma = PAT_WGMMA;
  // Whether both halves of an SM can work on a heavy unit, each on every second tile.
  static constexpr bool kJoint = kWgmma && kMaxHalves == 2;
  // Where wgmma takes Q from. Registers are faster, but at head dim 256 the output needs them.
  static constexpr bool kQInRegisters = kHeadDim <= 128;
};

// The least shared memory that a CTA runs with: one half, two stages and one Q buffer.
template <int kHeadDim>
inline constexpr int kMinSharedBytes =
    static_cast<int>(sizeof(Control)) + 3 * Shape<kHeadDim>::kTileBytes;

// Shared memory of a half: Control, the stages, the Q buffers, the Q buffers of narrow units.
// Addresses are those of the shared window.
template <int kHeadDim>
struct Shared {
  using S = Shape<kHeadDim>;
  uint32_t base;
  uint32_t peer;  // base of the other half
  uint32_t stages, q_buffers;
  int sm_half, num_halves;  // which half this is, of how many

  __device__ __forceinline__ Control& control() const {
    return *static_cast<Control*>(__cvta_shared_to_generic(base));
  }
  __device__ __forceinline__ uint32_t tile(uint32_t i) const {
    return base + static_cast<uint32_t>(sizeof(Control)) + i * S::kTileBytes;
  }
  __device__ __forceinline__ uint32_t q(uint32_t i) const { return tile(stages + i); }
  __device__ __forceinline__ uint32_t narrow_q(uint32_t i) const {
    return tile(stages + q_buffers) + i * S::kNarrowBytes;
  }
};

__device__ __forceinline__ Member load_member(const Control& control, int index) {
  const int2 m = __ldg(reinterpret_cast<const int2*>(control.members) + index);
  return {m.x, m.y};
}

// Whether wgmma runs the unit; else mma.sync does.
template <int kHeadDim>
__device__ __forceinline__ bool by_wgmma(const WorkUnit& unit) {
  return Shape<kHeadDim>::kWgmma &&
         (unit.pairing || unit.num_rows > kHeavyRows || unit.is_branch());
}

// Whether the consumers copy the Q of the half's first unit, and not the fetcher. The fetcher would
// first look up the rows' queries, and by then K and V of all SMs would be on their way to memory,
// and Q behind them (docs/lessons.md).
template <int kHeadDim>
__device__ __forceinline__ bool consumers_copy_q(const WorkUnit& first) {
  return Shape<kHeadDim>::kQInRegisters && first.num_tokens > 0 && by_wgmma<kHeadDim>(first);
}

}  // namespace pat
