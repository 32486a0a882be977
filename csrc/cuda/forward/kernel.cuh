// SPDX-License-Identifier: Apache-2.0
// The forward kernel: a persistent CTA per SM, of two halves that run the plan's work units
// (item x KV head) independently; of one half at head dim 256, with little shared memory, or where
// launches share an SM. A half has two warpgroups, one of producers, one of consumers:
//
//   producers, warp 0     scheduler  claims work units, long ones first, and puts them into a ring
//              warp 3     fetcher    copies Q of most units, and slots of tokens some tiles ahead
//              warps 1-2  loaders    gather K and V rows into shared memory, ahead of the consumers
//                                    and across units
//              in half 1: scheduler 1, fetcher 2, loaders 0 and 3 (see forward_kernel)
//   consumers, warps 0-3  attention of a unit, and its output or partial result
//
// Warps of different roles hand over through mbarriers; the consumers of a half also meet at a
// named barrier, and the scheduler polls how many tiles are loaded. K and V tiles of 64 tokens
// share one ring of stages. A tile is kept as panels of 64 elements: [head_dim / 64][64 rows][128
// bytes], 16-byte chunks XORed with row % 8, which both ldmatrix (free of bank conflicts) and wgmma
// read. Where K and V are fp8 they share a stage, and wgmma multiplies e4m3: see loader_fp8.cuh.
//
// Which units there are, in which order they run and why: docs/kernels.md. tiles.h defines the
// sizes.
#pragma once

#include "cuda/forward/attend_mma.cuh"
#include "cuda/forward/attend_wgmma.cuh"
#include "cuda/forward/attend_wgmma_fp8.cuh"
#include "cuda/forward/fetcher.cuh"
#include "cuda/forward/loader_fp8.cuh"
#include "cuda/forward/scheduler.cuh"

namespace pat {

// What a warp does. Producers from kFirstLoader on, kLoaderWarps of them, are loaders.
enum Job : int { kScheduler = 0, kFirstLoader = 1, kFetcher = 1 + kLoaderWarps, kConsumer };

// Waits until begin_half() and copy_first_unit() are over. A jump to code that is in no cache takes
// half a microsecond. So every job jumps to its own code first and waits there
// (docs/lessons.md). kJob makes the calls differ: of equal ones the compiler would make
// one, before the jumps. `threads`: of the CTA. To synccheck a barrier in several places is an
// error, so in a build for it (PAT_SANITIZER) all meet before the jumps.
template <Job kJob>
__device__ __forceinline__ void meet_all([[maybe_unused]] int threads) {
#ifndef PAT_SANITIZER
  asm volatile("bar.sync 0, %0; /* %1 */" ::"r"(threads), "n"(static_cast<int>(kJob)) : "memory");
#endif
  allow_next_kernel();
}

// Gives `condition`, and makes the compiler place the code that runs where it is true before the
// code that runs where it is false. A launch fetches the first 64 KB of a kernel's code. In a
// server the code behind that has left all caches since the last launch, and a jump to it waits for
// memory (docs/lessons.md). So what most units need comes first.
__device__ __forceinline__ bool placed_first(bool condition) { return computed_here(condition); }

// Each consumer warp runs every fourth narrow unit and passes the stages of the others.
template <typename T, bool kFp8, int kHeadDim, bool kTransforms, Drafts kDrafts>
__device__ __forceinline__ void take_narrow(Consumer<kHeadDim, kTransforms, kDrafts>& c,
                                            const WorkUnit& unit) {
  const bool is_short = unit.narrow == kShort;
  if (c.narrow.index != c.warp) {
    c.pass_stage();
    if (!kFp8 && !is_short) c.pass_stage();  // K and V have a stage each
  } else if (is_short) {
    attend_narrow<T, kFp8, kShortTokens>(c, unit);
  } else {
    attend_narrow<T, kFp8, kTileTokens>(c, unit);
  }
  c.narrow.advance();
}

// Runs a unit of more than kWarpRows rows, a wide one, or a branch. `rows`: of the unit.
template <typename T, bool kFp8, int kHeadDim, bool kTransforms, Drafts kDrafts>
__device__ __forceinline__ void attend_rows(Consumer<kHeadDim, kTransforms, kDrafts>& c,
                                            const WorkUnit& unit, [[maybe_unused]] int rows) {
#if PAT_WGMMA
  if constexpr (kFp8) {
    attend_wgmma_fp8<T>(c, unit);
  } else {
    attend_wgmma<T>(c, unit);
  }
#else
  if (unit.is_branch()) {
    attend_mma<T, kFp8, 4, true>(c, unit);
  } else if (rows <= 2 * kWarpRows) {
    attend_mma<T, kFp8, 2, false>(c, unit);
  } else {
    attend_mma<T, kFp8, 4, false>(c, unit);
  }
#endif
}

// Starts to copy a consumer warp's rows of the Q of its half's first unit; take_queries() waits for
// them. The warp has nothing else to do yet, and it reads no rows but these.
template <int kHeadDim, Drafts kDrafts>
__device__ __forceinline__ void copy_first_q(const ForwardParams& p, const Shared<kHeadDim>& s,
                                             int warp) {
  using S = Shape<kHeadDim>;
  if (!s.control().given) return;
  const int lane = lane_id(), chunk = lane % S::kChunks, sub_row = lane / S::kChunks;
  const QRow row = s.control().first_rows[warp][lane % kWarpRows];
  int64_t bytes = row.query * p.q_stride_query + row.head * p.q_stride_head;
  if constexpr (kDrafts != kNoDrafts) bytes += row.draft * p.bytes_between;
  const uint32_t of_lane = row.query == kNoQuery ? kNoQuery : static_cast<uint32_t>(bytes >> 4);
  const char* from = p.q + chunk * 16;
  const uint32_t to = s.q(0) + (chunk >> 3) * S::kPanelBytes + (warp * kWarpRows + sub_row) * 128;
#pragma unroll 2  // short code: see join_warps()
  for (int j = 0; j < kWarpRows; j += S::kRowsPerCopy) {
    const uint32_t offset = __shfl_sync(~0u, of_lane, j + sub_row);
    if (offset != kNoQuery) {
      copy16(to + j * 128 + (((chunk & 7) ^ ((j + sub_row) & 7)) << 4),
             from + (uint64_t{offset} << 4));
    }
  }
  copies_commit();
}

// What a consumer warp does: runs every unit of its half, with the products that suit its rows.
template <typename T, bool kFp8, int kHeadDim, bool kTransforms, Drafts kDrafts>
__device__ __forceinline__ void consume(const ForwardParams& p, const Shared<kHeadDim>& s,
                                        int warp) {
  Consumer<kHeadDim, kTransforms, kDrafts> c{p, s, warp};
  for (WorkRing work;; work.advance()) {
    work.wait_full(s.base);
    const WorkUnit unit = s.control().units[work.index];
    const int rows = __shfl_sync(~0u, unit.num_rows, 0);
    if (unit.num_tokens < 0) break;
    if (placed_first(!unit.narrow && rows <= kWarpRows && !unit.pairing && !unit.is_branch())) {
      attend_mma<T, kFp8, 1, false>(c, unit);
    } else if (placed_first(!unit.narrow)) {
      attend_rows<T, kFp8>(c, unit, rows);
    } else {
      take_narrow<T, kFp8>(c, unit);
    }
    c.release(work.empty(s.base));
  }
}

// What one thread of a half does before its warps meet: makes the barriers and looks up the plan.
template <int kHeadDim>
__device__ __forceinline__ void begin_half(const ForwardParams& p, const Shared<kHeadDim>& s) {
  const PlanHeader header = *p.plan;  // on its way while the barriers are made
  constexpr int kConsumerArrivals = kConsumers / 32 * kArriving;
  for (int i = 0; i < p.stages; ++i) {
    StageRing::init(s.base, i, kLoaderWarps * 32, kConsumerArrivals);
    barrier_init(peer_empty_barrier(s.base, i), kConsumerArrivals);
  }
  for (int i = 0; i < p.q_buffers; ++i) QRing::init(s.base, i, 32, kConsumerArrivals);
  for (int i = 0; i < kWorkUnits; ++i) {
    WorkRing::init(s.base, i, 1, (1 + kLoaderWarps) * kArriving + kConsumerArrivals);
  }
  for (int i = 0; i < kSlotTiles; ++i) SlotRing::init(s.base, i, 32, kLoaderWarps * kArriving);
  for (int i = 0; i < kNarrowBuffers; ++i) NarrowRing::init(s.base, i, 32, kArriving);
  Control& control = s.control();
  control.loaded_tiles = 0;
  control.note_plan(p.plan, header);
  for (auto& of_warps : control.messages) *reinterpret_cast<uint4*>(of_warps) = {};
  control.given &= p.first_units && control.num_queries <= p.num_rows;
  if (control.given) barrier_arrive(WorkRing::full(s.base, 0));
}

// T: of q and out. kFp8: K and V are float8_e4m3fn. kTransforms: the logits are not kPlain.
template <typename T, bool kFp8, int kHeadDim, bool kTransforms, Drafts kDrafts>
__global__ void __launch_bounds__(kThreads* Shape<kHeadDim>::kMaxHalves, 1)
    forward_kernel(const __grid_constant__ ForwardParams p) {
  using S = Shape<kHeadDim>;
  extern __shared__ __align__(1024) uint8_t memory[];
  // __shfl_sync, here and elsewhere, tells the compiler that a value is uniform in a warp.
  const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0);
  const int num_halves = S::kMaxHalves == 1 ? 1 : static_cast<int>(blockDim.x / kThreads);
  const int half = num_halves == 2 ? (warp >> 2) & 1 : 0;
  const uint32_t base = shared_address(memory);
  const Shared<kHeadDim> s{base + half * p.half_bytes,
                           base + (num_halves - 1 - half) * p.half_bytes,
                           static_cast<uint32_t>(p.stages),
                           static_cast<uint32_t>(p.q_buffers),
                           half,
                           num_halves};
  // One warp's asynchronous copies reach 10 bytes a cycle, those of two warps in one partition of
  // an SM 17, and an SM can take 35. So no two of the four loaders share a partition.
  const int warp_of_half = warp % 4;
  const int job = half == 0 ? warp_of_half : warp_of_half ^ 1;
  const int lane = static_cast<int>(threadIdx.x & 31);
  const bool producer = warp < 4 * num_halves;
  const int threads = kThreads * num_halves;
  if (producer && job == kFetcher && p.first_units) copy_first_unit(p, s, lane);
  if (threadIdx.x % 128 == 0 && producer) begin_half(p, s);
  __syncwarp();  // what follows wants whole warps
#ifdef PAT_SANITIZER
  __syncthreads();
#endif
  if (placed_first(producer)) {
#if PAT_WGMMA
    if constexpr (S::kWgmma && S::kMaxHalves == 2) warpgroup_reg_dealloc<kFp8 ? 56 : 64>();
#endif
    if (job == kScheduler) {
      meet_all<kScheduler>(threads);
      UnitScheduler<kHeadDim, kDrafts> scheduler{p, s, lane};
      scheduler.given = s.control().given;
      scheduler.run();
    } else if (job < kFetcher) {
      meet_all<kFirstLoader>(threads);
      if constexpr (kFp8) {
        Fp8Loader<kHeadDim> loader{{p, s, job - kFirstLoader, lane}};
        loader.run();
      } else {
        Loader<kHeadDim> loader{p, s, job - kFirstLoader, lane};
        loader.run();
      }
    } else {
      meet_all<kFetcher>(threads);
      Fetcher<kHeadDim, kDrafts> fetcher{p, s, lane};
      fetcher.run();
    }
  } else {
#if PAT_WGMMA
    if constexpr (S::kWgmma && S::kMaxHalves == 2) warpgroup_reg_alloc<kFp8 ? 200 : 192>();
#endif
    meet_all<kConsumer>(threads);
    if constexpr (S::kWgmma && S::kQInRegisters) {
      copy_first_q<kHeadDim, kDrafts>(p, s, warp_of_half);
    }
    consume<T, kFp8, kHeadDim, kTransforms, kDrafts>(p, s, warp_of_half);
  }
}

}  // namespace pat
