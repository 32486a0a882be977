// SPDX-License-Identifier: Apache-2.0
// The loader warps where K and V are fp8. Units that mma.sync runs get raw tiles (raw_tile.cuh).
// Units that wgmma runs get tiles of fp16, because wgmma reads its operands from shared memory and
// takes no fp8 beside fp16: a lane copies 16 bytes to the place of the first or second half of what
// they become, and when they have arrived, some fills later, it widens them in place.
#pragma once

#include "cuda/forward/loader.cuh"
#include "cuda/forward/raw_tile.cuh"

namespace pat {

template <int kHeadDim>
struct Fp8Loader : Loader<kHeadDim> {
  using Base = Loader<kHeadDim>;
  using S = Shape<kHeadDim>;
  using Raw = RawTile<kHeadDim>;
  using Base::lane;
  using Base::p;
  using Base::s;
  using Base::shared_fills;
  using Base::slots;
  using Base::stage;
  using Base::warp;
  using Base::work;
  static constexpr int kTokens = Base::kTokens;
  static constexpr int kChunks = kHeadDim / 16;                 // 16-byte chunks of a raw row
  static constexpr int kLaneRows = kTokens / (32 / kChunks);    // rows of a tile, per lane
  static constexpr int kBatch = kLaneRows < 8 ? kLaneRows : 8;  // rows whose slots are read at once
  // Fills that may be under way while the next one starts: with the two that consumers read, about
  // as many as there are stages.
  static constexpr int kPending = kHeadDim == 64 ? 5 : 3;

  int pending = 0;  // fills to be widened
  int oldest = 0;   // stage of the first of them

  __device__ __forceinline__ int chunk() const { return lane % kChunks; }
  __device__ __forceinline__ int first_row() const { return lane / kChunks * kLaneRows; }

  // Where the lane's chunk of its first row is in a tile, of which this warp has the rows from
  // `row` on. A chunk that is to be widened becomes two: half of the lanes copy it to the place of
  // the first one, half to that of the second one, so that neither has bank conflicts.
  template <bool kWidened>
  __device__ __forceinline__ uint32_t place(uint32_t tile, int row) const {
    const int first = first_row();
    if constexpr (kWidened) {
      const int second = (lane >> 2) & 1;
      return tile + (chunk() >> 2) * S::kPanelBytes + (row + first) * 128 +
             (((2 * (chunk() & 3) + second) ^ (first & 7)) << 4);
    } else {
      return tile + (chunk() >> 3) * Raw::kPanelBytes + Raw::row_offset(row + first) +
             (((chunk() & 7) << 4) ^ Raw::swizzle(first));
    }
  }
  // From there to the same chunk of the j-th row on.
  template <bool kWidened>
  static __device__ __forceinline__ uint32_t next(uint32_t place, int j) {
    if constexpr (kWidened) return (place ^ ((j & 7) << 4)) + j * 128;
    return (place ^ Raw::swizzle(j)) + Raw::row_offset(j);
  }

  // Copies this warp's share of a tile: the tokens from `row` on, of which `left` exist. With
  // kZeros rows from `left` up to `end` are set to zero.
  template <bool kWidened, bool kZeros>
  __device__ __forceinline__ void copy_chunks(const char* base, uint32_t stride, uint32_t tile,
                                              int row, int left, int end) {
    const int first = first_row();
    const auto* ids = reinterpret_cast<const uint4*>(&s.control().slots[slots.index][row + first]);
    const uint32_t dst = place<kWidened>(tile, row);
    base += chunk() * 16;
    asm volatile("" : "+l"(base));  // one 64-bit sum: see Loader
    const bool full = left >= kTokens;
#pragma unroll 1
    for (int i = 0; i < kLaneRows; i += kBatch) {
      uint32_t id[kBatch];
#pragma unroll
      for (int j = 0; j < kBatch; j += 4) {
        const uint4 four = ids[(i + j) / 4];
        id[j] = four.x, id[j + 1] = four.y, id[j + 2] = four.z, id[j + 3] = four.w;
      }
      const uint32_t to = dst + i * 128;  // kBatch == 8 wherever i > 0
      if (full) {
        const char* src[kBatch];
#pragma unroll
        for (int j = 0; j < kBatch; ++j) src[j] = base + static_cast<uint64_t>(id[j]) * stride;
#pragma unroll
        for (int j = 0; j < kBatch; ++j) copy16(next<kWidened>(to, j), src[j]);
      } else {
#pragma unroll
        for (int j = 0; j < kBatch; ++j) {
          const bool valid = first + i + j < left;
          const char* src = base + static_cast<uint64_t>(valid ? id[j] : 0) * stride;
          if constexpr (kZeros) {
            if (first + i + j < end) copy16_or_zero(next<kWidened>(to, j), src, valid);
          } else if (valid) {
            copy16(next<kWidened>(to, j), src);
          }
        }
      }
    }
  }

  // Waits until all but this lane's last `fills` are done.
  template <int kFills>
  static __device__ __forceinline__ void wait_all_but(int fills) {
    if constexpr (kFills > 0) {
      if (fills < kFills) return wait_all_but<kFills - 1>(fills);
    }
    copies_wait<kFills>();
  }

  // Widens the fill that has waited longest, when its copies are done, and hands it over.
  __device__ __forceinline__ void widen_oldest() {
    wait_all_but<kPending>(pending - 1);
    const uint32_t at = place<true>(s.tile(oldest), warp * kTokens);
    const bool second = (lane >> 2) & 1;
#pragma unroll
    for (int i = 0; i < kLaneRows; i += 4) {
      uint4 raw[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) raw[j] = load_shared4(next<true>(at, i + j));
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const uint2 low = {raw[j].x, raw[j].y}, high = {raw[j].z, raw[j].w};
        const uint32_t to = next<true>(at, i + j);
        store_shared4(to, widened(second ? high : low));
        store_shared4(to ^ 16, widened(second ? low : high));
      }
    }
    barrier_arrive(StageRing::full(s.base, oldest));
    if (++oldest == p.stages) oldest = 0;
    --pending;
  }
  static __device__ __forceinline__ uint4 widened(uint2 bytes) {
    uint4 r;
    widen_e4m3(bytes.x, r.x, r.y);
    widen_e4m3(bytes.y, r.z, r.w);
    return r;
  }
  __device__ __forceinline__ void widen_all() {
    if constexpr (S::kWgmma) {
#pragma unroll 1
      while (pending > 0) widen_oldest();
    }
  }

  // Called before a wait for what `ready` tells. Widens what there is if it would be long:
  // consumers may be waiting for that.
  template <typename Ready>
  __device__ __forceinline__ void before_wait(const Ready& ready) {
    if constexpr (S::kWgmma) {
#pragma unroll 1
      while (pending > kPending || (pending > 0 && !__all_sync(~0u, ready()))) widen_oldest();
    }
  }
  __device__ __forceinline__ bool stage_ready() const {
    const uint32_t parity = stage.phase ^ 1;
    return barrier_ready(stage.empty(s.base), parity) &&
           (shared_fills == 0 || barrier_ready(peer_empty_barrier(s.base, stage.index), parity));
  }
  // Ends the copies of a fill that is to be widened.
  __device__ __forceinline__ void finish_copies() {
    copies_commit();
    if (pending++ == 0) oldest = stage.index;
    stage.advance(p.stages);
  }

  // Loads every tile of a unit into a stage of its own, K and V.
  __device__ __forceinline__ void load_raw(const WorkUnit& unit, const char* k, const char* v) {
    const uint16_t* row_masks = p.row_masks + unit.list_start + 8 * lane;
    for (int left = unit.num_tokens; left > 0; left -= kTileTokens, row_masks += kTileTokens) {
      slots.wait_full(s.base);
      Base::wait_stage();
      if (unit.branch) Base::copy_row_masks(row_masks);
      const uint32_t keys = s.tile(stage.index), values = keys + Raw::kValues;
      // Of a tile that one warp could load alone, warp 0 copies K and warp 1 V.
      const bool apart = left <= kTokens;
      const int row = apart ? 0 : warp * kTokens;
      const int mine = left - row;
      if (!apart || warp == 0) copy_chunks<false, false>(k, p.k_stride_slot, keys, row, mine, 0);
      if (!apart || warp == 1) {
        copy_chunks<false, true>(v, p.v_stride_slot, values, row, mine, (mine + 15) & ~15);
      }
      Base::finish_stage();
      Base::finish_slots();
      if (left > kTileTokens) Base::count_tile();
    }
  }

  // Loads every tile of a unit, or every second one if the other half loads the others, as fp16: K
  // into one stage, V into the next.
  __device__ __forceinline__ void load_widened(const WorkUnit& unit, const char* k, const char* v) {
    const int step = unit.halved() ? 2 * kTileTokens : kTileTokens;
    const int first = unit.halved() ? s.sm_half * kTileTokens : 0;
    const uint16_t* row_masks = p.row_masks + unit.list_start + first + 8 * lane;
    const int row = warp * kTokens;
    for (int left = unit.num_tokens - first; left > 0; left -= step, row_masks += step) {
      if (unit.wide) shared_fills = p.stages + 2;
      before_wait([&] { return barrier_ready(slots.full(s.base), slots.phase) && stage_ready(); });
      slots.wait_full(s.base);
      Base::wait_stage();
      if (unit.branch) Base::copy_row_masks(row_masks);
      copy_chunks<true, false>(k, p.k_stride_slot, s.tile(stage.index), row, left - row, 0);
      finish_copies();
      before_wait([&] { return stage_ready(); });
      Base::wait_stage();
      copy_chunks<true, true>(v, p.v_stride_slot, s.tile(stage.index), row, left - row, kTokens);
      finish_copies();
      Base::finish_slots();
      if (left > step) Base::count_tile();
    }
  }

  __device__ void run() {
    for (;; work.advance()) {
      before_wait([&] { return barrier_ready(work.full(s.base), work.phase); });
      work.wait_full(s.base);
      const WorkUnit unit = s.control().units[work.index];
      const bool last = unit.num_tokens < 0;
      const bool for_wgmma = !last && Base::by_wgmma(unit);
      if (!for_wgmma) widen_all();
      if (last) break;
      const char* k = p.k + unit.kv_head * p.k_stride_head;
      const char* v = p.v + unit.kv_head * p.v_stride_head;
      if (for_wgmma) {
        load_widened(unit, k, v);
      } else {
        load_raw(unit, k, v);
      }
      Base::count_tile();
      barrier_release(work.empty(s.base), lane);
    }
  }
};

}  // namespace pat
