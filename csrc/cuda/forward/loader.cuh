// SPDX-License-Identifier: Apache-2.0
// The loader warps of the forward kernel.
#pragma once

#include "cuda/forward/pipeline.cuh"

namespace pat {

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
    const bool whole = u.wide || (S::kWgmma && (u.rows > kHeavyRows || u.branch));
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
