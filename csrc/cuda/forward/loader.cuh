// SPDX-License-Identifier: Apache-2.0
// The two loader warps of a half: they gather the K and V rows that the slots name into the ring of
// stages, ahead of the consumers and across work units.
#pragma once

#include "cuda/forward/raw_tile.cuh"

namespace pat {

// kBytes: of an element of K and V.
template <int kHeadDim, int kBytes = 2>
struct Loader {
  using S = Shape<kHeadDim>;
  using Panels = RawTile<kHeadDim * kBytes>;
  static constexpr int kTokens = kTileTokens / kLoaderWarps;    // of a tile, per warp
  static constexpr int kChunks = kHeadDim * kBytes / 16;        // 16-byte chunks of a row
  static constexpr int kLaneRows = kTokens / (32 / kChunks);    // rows of a tile, per lane
  static constexpr int kBatch = kLaneRows < 8 ? kLaneRows : 8;  // rows whose slots are read at once
  // At head dim 128 one piece of code copies both K and V: what lies behind the first 64 KB of a
  // kernel takes longer in a server (docs/lessons.md). Other head dims lose 1 to 3 % by that.
  static constexpr int kPartsAtOnce = kHeadDim == 128 ? 1 : 2;

  const ForwardParams& p;
  const Shared<kHeadDim>& s;
  const int warp;  // 0 .. kLoaderWarps - 1
  const int lane;
  WorkRing work;
  SlotRing slots;
  StageRing stage;
  // About tiles that both halves read. Low byte: for how many more fills a stage may hold such a
  // tile that the other half has not read. Bit 8 + i: parity of how many such tiles stage i has
  // held. One word, because the loaders of fp8 have no register to spare.
  uint32_t sharing = 0;
  int given = 0;  // tiles, from the next one on, whose slots are there already: see FirstUnit

  __device__ __forceinline__ int chunk() const { return lane % kChunks; }
  __device__ __forceinline__ int first_row() const { return lane / kChunks * kLaneRows; }

  // K and V of the unit's KV head.
  __device__ __forceinline__ const char* k_base(const WorkUnit& unit) const {
    return p.k + uint64_t{static_cast<uint32_t>(unit.kv_head)} * p.k_stride_head;
  }
  __device__ __forceinline__ const char* v_base(const WorkUnit& unit) const {
    return p.v + uint64_t{static_cast<uint32_t>(unit.kv_head)} * p.v_stride_head;
  }

  // Copies this warp's share of a tile: its tokens from `token` on, of which `left` exist. With
  // kZeros rows from `left` up to `end` are set to zero. `to`: where the lane's first chunk goes,
  // from which on Places::next() gives those of the rows after it.
  template <typename Places, bool kZeros>
  __device__ __forceinline__ void copy_chunks(const char* base, uint32_t stride, uint32_t to,
                                              int token, int left, int end) {
    const int first = first_row();
    const auto* ids =
        reinterpret_cast<const uint4*>(&s.control().slots[slots.index][token + first]);
    base += chunk() * 16;
    // One 64-bit sum, so that fewer instructions make an address.
    asm volatile("" : "+l"(base));
    const bool full = left >= kTokens;
#pragma unroll 1
    for (int i = 0; i < kLaneRows; i += kBatch) {
      uint32_t id[kBatch];
#pragma unroll
      for (int j = 0; j < kBatch; j += 4) {
        const uint4 four = ids[(i + j) / 4];
        id[j] = four.x, id[j + 1] = four.y, id[j + 2] = four.z, id[j + 3] = four.w;
      }
      if (!full) {
#pragma unroll
        for (int j = 0; j < kBatch; ++j) {
          const bool valid = first + i + j < left;
          const char* src = base + static_cast<uint64_t>(valid ? id[j] : 0) * stride;
          if constexpr (kZeros) {
            if (first + i + j < end)
              copy16_or_zero(Places::next(to, j) + i * Places::kRowBytes, src, valid);
          } else if (valid) {
            copy16(Places::next(to, j) + i * Places::kRowBytes, src);
          }
        }
      } else {  // ptxas puts it first, where the code is that most tiles run
        const char* src[kBatch];
#pragma unroll
        for (int j = 0; j < kBatch; ++j) src[j] = base + static_cast<uint64_t>(id[j]) * stride;
#pragma unroll
        for (int j = 0; j < kBatch; ++j)
          copy16(Places::next(to, j) + i * Places::kRowBytes, src[j]);
      }
    }
  }

  // Copies the row masks of a branch's tile into the stage.
  __device__ __forceinline__ void copy_row_masks(const uint16_t* from) {
    if (warp == 0 && lane < kTileTokens / 8) {
      copy16(shared_address(&s.control().row_masks[stage.index][8 * lane]), from);
    }
  }

  // Called before a tile is loaded. If the other half reads it (`shared`), the next `fills` fills
  // must wait for that half's consumers.
  __device__ __forceinline__ void note_shared(bool shared, int fills) {
    if (shared) sharing = (sharing & ~255u) | fills;
  }
  __device__ __forceinline__ bool may_be_unread() const { return (sharing & 255) != 0; }
  // The parity of the phase in which the other half has read the current stage's last tile for it.
  __device__ __forceinline__ uint32_t peer_parity() const {
    return (~sharing >> (8 + stage.index)) & 1;
  }
  // Waits until a stage may be filled.
  __device__ __forceinline__ void wait_stage(bool shared) {
    stage.wait_empty(s.base);
    if (may_be_unread()) {
      barrier_wait(peer_empty_barrier(s.base, stage.index), peer_parity());
      --sharing;
      if (shared) sharing ^= 256u << stage.index;
    }
  }
  __device__ __forceinline__ void finish_stage() {
    barrier_arrive_copies(stage.full(s.base));
    stage.advance(p.stages);
  }
  // Waits until the slots of the next tile are there. Given ones are, though the fetcher has not
  // arrived for them. It does so before it fetches any others, without which this warp does not
  // come to the same buffer again.
  __device__ __forceinline__ void wait_slots() {
    if (given > 0) {
      --given;
    } else {
      slots.wait_full(s.base);
    }
  }
  __device__ __forceinline__ void finish_slots() {
    barrier_release(slots.empty(s.base), lane);
    slots.advance();
  }

  // Loads this half's tiles of a unit: K into one stage, V into the next. Of a short unit warp 0
  // copies K and warp 1 V, both into one stage.
  __device__ __forceinline__ void load_tiles(const WorkUnit& unit, const char* k, const char* v) {
    const bool is_short = unit.narrow == kShort;
    // V must hold no NaN beyond the last token: wgmma multiplies whole tiles, mma.sync 16 tokens.
    const bool whole = by_wgmma<kHeadDim>(unit);
    const int token = is_short ? 0 : warp * kTokens;
#pragma unroll 1  // short code: see join_warps()
    for (int number = TileRange::first_number(unit); number < 2; ++number) {
      const TileRange tiles(unit, number, s.sm_half);
      const bool shared = tiles.halved && unit.pairing;
      const uint16_t* row_masks = p.row_masks + unit.list_start + tiles.first + 8 * lane;
      for (int left = tiles.end - tiles.first; left > 0;
           left -= tiles.step, row_masks += tiles.step) {
        wait_slots();
        note_shared(shared, p.stages + 2);
        const int mine = left - token;
        const int end = whole ? kTokens : (mine + 15) & ~15;
#pragma unroll kPartsAtOnce
        for (int part = 0; part < 2; ++part) {  // K, V
          if (is_short && part != warp) continue;
          wait_stage(shared);
          if (unit.is_branch() && part == 0) copy_row_masks(row_masks);
          // A row of a lane's first copy is a multiple of 8, so its chunks are where they are.
          const uint32_t to = s.tile(stage.index) + (chunk() >> 3) * S::kPanelBytes +
                              (warp * kTokens + first_row()) * 128 + ((chunk() & 7) << 4);
          copy_chunks<Panels, true>(part ? v : k, part ? p.v_stride_slot : p.k_stride_slot, to,
                                    token, mine, part || is_short ? end : mine);
          finish_stage();
        }
        finish_slots();
        count_tile();
      }
    }
    if (unit.num_tokens == 0) count_tile();
  }

  // Tells the scheduler that one more tile is loaded. A unit without tokens counts as one tile.
  __device__ __forceinline__ void count_tile() {
    if (warp == 0 && lane == 0) count_one(s.control().loaded_tiles);
  }

  __device__ void run() {
    if (s.control().given) given = kGivenTiles;
    for (;; work.advance()) {
      work.wait_full(s.base);
      const WorkUnit unit = s.control().units[work.index];
      if (unit.num_tokens < 0) break;
      const char* k = k_base(unit);
      const char* v = v_base(unit);
      load_tiles(unit, k, v);
      given = 0;  // the first unit may have fewer tiles
      barrier_release(work.empty(s.base), lane);
    }
  }
};

}  // namespace pat
