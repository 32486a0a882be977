// SPDX-License-Identifier: Apache-2.0
// The forward kernel: a persistent CTA an SM, of two halves that run the plan's units (item x KV
// head), each on its own. A half has two warpgroups:
//
//   producers, warp 0     scheduler  claims units, heaviest first, and describes them in a ring
//              warp 3     fetcher    fetches Q and the slot ids of the tokens, some tiles ahead
//              warps 1-2  loaders    gather K and V rows into shared memory, ahead of the consumers
//                                    and across units
//              of half 1 the warps are 1, 2, 0 and 3: see forward_kernel
//   consumers, warps 0-3  attention of a unit, and its output or partial result
//
// They meet in mbarriers only. K and V tiles of 64 tokens share one ring of stages. A tile is kept
// as panels of 64 elements: [head_dim / 64][64 rows][128 bytes], 16-byte chunks XORed with row % 8,
// which both ldmatrix (free of bank conflicts) and wgmma read.
//
// Wide units, of up to 128 packed rows, come first, and both halves work on them: each loads every
// second tile, and multiplies all of them with 64 rows of its own. Then one half begins with the
// heavy units, the other with the light ones.
#pragma once

#include "cuda/forward/attend_mma.cuh"
#include "cuda/forward/attend_wgmma.cuh"
#include "cuda/forward/fetcher.cuh"
#include "cuda/forward/loader.cuh"
#include "cuda/forward/scheduler.cuh"

namespace pat {

// Appends what a consumer warp did to p.trace: [0] entries so far, from [4] on per entry (item, KV
// head), (SM, half, warp, rows), begin and end in nanoseconds.
__device__ __forceinline__ void trace_unit(const ForwardParams& p, const Unit& u, int half,
                                           int warp, uint64_t begin) {
  if (lane_id() != 0) return;
  const uint64_t entry = atomicAdd(reinterpret_cast<unsigned long long*>(p.trace), 1ull);
  uint64_t* to = p.trace + 4 * (entry + 1);
  to[0] = static_cast<uint64_t>(u.item) << 32 | static_cast<uint32_t>(u.head);
  to[1] = static_cast<uint64_t>(sm_id()) << 32 |
          static_cast<uint32_t>(half << 24 | warp << 16 | u.rows);
  to[2] = begin;
  to[3] = nanoseconds();
}

template <typename T, int kHeadDim, bool kTransforms>
__device__ __forceinline__ void consume(const ForwardParams& p, const Shared<kHeadDim>& s,
                                        int warp) {
  using S = Shape<kHeadDim>;
  Consumer<kHeadDim, kTransforms> c{p, s, warp};
  for (Cursor ring;; ring.advance(kUnits)) {
    barrier_wait(s.unit_full(ring.index), ring.phase);
    const Unit u = s.control().units[ring.index];
    const int rows = __shfl_sync(~0u, u.rows, 0);
    if (u.tokens < 0) break;
    const uint64_t begin = p.trace ? nanoseconds() : 0;
    bool busy = true;
    if (u.narrow) {
      // Of the units in a row, each warp takes every fourth, and passes by the others.
      const bool brief = u.narrow == kShort;
      if (c.narrow.index != c.warp) {
        c.pass_stage();
        if (!brief) c.pass_stage();
        busy = false;
      } else if (brief) {
        attend_narrow<T, kShortTokens>(c, u);
      } else {
        attend_narrow<T, kTileTokens>(c, u);
      }
      c.narrow.advance(kNarrowUnits);
    } else if (rows <= kWarpRows && !u.wide && !u.branch) {
      attend_mma<T, 1, false>(c, u);
    } else if (rows <= 2 * kWarpRows && !u.wide && !u.branch) {
      attend_mma<T, 2, false>(c, u);
    } else {
#if PAT_WGMMA
      if constexpr (S::kWgmma) {
        attend_wgmma<T>(c, u);
      } else
#endif
      {
        u.branch ? attend_mma<T, 4, true>(c, u) : attend_mma<T, 4, false>(c, u);
      }
    }
    if (p.trace && busy) trace_unit(p, u, s.side, c.warp, begin);
    c.release(s.unit_empty(ring.index));
  }
}

template <typename T, int kHeadDim, bool kTransforms>
__global__ void __launch_bounds__(kThreads* Shape<kHeadDim>::kHalves, 1)
    forward_kernel(const __grid_constant__ ForwardParams p) {
  using S = Shape<kHeadDim>;
  extern __shared__ __align__(1024) uint8_t memory[];
  // Broadcasts, here and below, tell the compiler that a value is uniform in a warp.
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
  const int halves = S::kHalves == 1 ? 1 : static_cast<int>(blockDim.x / kThreads);
  const int half = (warp / 4) % halves;
  const uint32_t base = shared_address(memory);
  const Shared<kHeadDim> s{base + half * p.half_bytes,
                           base + (halves - 1 - half) * p.half_bytes,
                           static_cast<uint32_t>(p.stages),
                           static_cast<uint32_t>(p.q_buffers),
                           half,
                           halves};
  if (threadIdx.x % 128 == 0 && warp < 4 * halves) {
    constexpr int kConsumerArrivals = kConsumers / 32 * kArriving;
    for (int i = 0; i < p.stages; ++i) {
      barrier_init(s.full(i), kLoaderWarps * 32);
      barrier_init(s.empty(i), kConsumerArrivals);
      barrier_init(s.peer_empty(i), kConsumerArrivals);
    }
    for (int i = 0; i < p.q_buffers; ++i) {
      barrier_init(s.q_full(i), 32);
      barrier_init(s.q_empty(i), kConsumerArrivals);
    }
    for (int i = 0; i < kUnits; ++i) {
      barrier_init(s.unit_full(i), 1);
      barrier_init(s.unit_empty(i), (1 + kLoaderWarps) * kArriving + kConsumerArrivals);
    }
    for (int i = 0; i < kSlotTiles; ++i) {
      barrier_init(s.slot_full(i), 32);
      barrier_init(s.slot_empty(i), kLoaderWarps * kArriving);
    }
    for (int i = 0; i < kNarrowUnits; ++i) {
      barrier_init(s.narrow_full(i), 32);
      barrier_init(s.narrow_empty(i), kArriving);
    }
    Control& plan = s.control();
    plan.loaded_tiles = 0;
    const auto* begin = reinterpret_cast<const char*>(p.plan);
    // The first item of this half most likely: on its way while the header is.
    const uint32_t first = (blockIdx.x + half * gridDim.x) / p.num_kv_heads;
    prefetch(begin + sizeof(PlanHeader) + first * sizeof(Item));
    const PlanHeader header = *p.plan;
    plan.num_queries = header.num_queries;
    plan.num_items = header.num_items;
    plan.num_wide_items = header.num_wide_items;
    plan.num_heavy_items = header.num_heavy_items;
    plan.items = reinterpret_cast<const Item*>(begin + header.items_offset);
    plan.members = reinterpret_cast<const Member*>(begin + header.members_offset);
  }
  __syncthreads();
  allow_next_kernel();

  const int role = warp % 4;
  if (warp < 4 * halves) {
    // A warp's asynchronous copies come at 10 bytes a cycle, those of two warps of one partition of
    // an SM at 17, and an SM takes 35: no two of the four loaders share a partition.
    const int job = half == 0 ? role : role ^ 1;
#if PAT_WGMMA
    if constexpr (S::kWgmma) give_registers<64>();
#endif
    const int lane = static_cast<int>(threadIdx.x & 31);
    if (job == 0) {
      UnitScheduler<kHeadDim> scheduler{p, s, lane};
      scheduler.run();
    } else if (job <= kLoaderWarps) {
      Loader<kHeadDim> loader{p, s, job - 1, lane};
      loader.run();
    } else {
      Fetcher<kHeadDim> fetcher{p, s, lane};
      fetcher.run();
    }
  } else {
#if PAT_WGMMA
    if constexpr (S::kWgmma) take_registers<192>();
#endif
    consume<T, kHeadDim, kTransforms>(p, s, role);
  }
}

}  // namespace pat
