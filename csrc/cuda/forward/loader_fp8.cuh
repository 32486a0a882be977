// SPDX-License-Identifier: Apache-2.0
// The loader warps where K and V are fp8. Every unit gets raw tiles, K and V in one stage
// (raw_tile.cuh). For units that wgmma runs, V is transposed (ValueBlocks) when its copies
// have arrived, some fills later.
#pragma once

#include "cuda/forward/loader.cuh"
#include "cuda/forward/raw_tile.cuh"

namespace pat {

template <int kHeadDim>
struct Fp8Loader : Loader<kHeadDim, 1> {
  using Base = Loader<kHeadDim, 1>;
  using S = Shape<kHeadDim>;
  using Raw = RawTile<kHeadDim>;
  using Blocks = ValueBlocks<kHeadDim>;
  using Base::chunk;
  using Base::first_row;
  using Base::lane;
  using Base::p;
  using Base::s;
  using Base::slots;
  using Base::stage;
  using Base::warp;
  using Base::work;
  static constexpr int kTokens = Base::kTokens;
  // Fills that may be under way while the next one starts: with the two that consumers read, about
  // as many as there are stages.
  static constexpr int kPending = kHeadDim == 64 ? 5 : 2;

  int pending = 0;  // fills whose V is to be transposed: the last ones

  // Waits until all but this lane's last `fills` are done.
  template <int kFills>
  static __device__ __forceinline__ void wait_all_but(int fills) {
    if constexpr (kFills > 0) {
      if (fills < kFills) return wait_all_but<kFills - 1>(fills);
    }
    copies_wait<kFills>();
  }

  // Where this warp's V begins in a stage, for wgmma.
  __device__ __forceinline__ uint32_t values_of(int stage) const {
    return s.tile(stage) + Raw::kValues + warp * Blocks::kBytes;
  }
  // Transposes V of the fill that has waited longest, when its copies are done, and hands it over.
  __device__ __forceinline__ void transpose_oldest() {
    wait_all_but<kPending>(pending - 1);
    __syncwarp();
    const int behind = stage.index - pending;
    const int oldest = behind < 0 ? behind + static_cast<int>(p.stages) : behind;
    Blocks::transpose(values_of(oldest));
    barrier_arrive(StageRing::full(s.base, oldest));
    --pending;
  }
  __device__ __forceinline__ void transpose_all() {
    if constexpr (S::kWgmma) {
#pragma unroll 1
      while (pending > 0) transpose_oldest();
    }
  }

  // Called before a wait for what `ready` tells. Hands over what there is if the wait is not over
  // at once: consumers may be waiting for that.
  template <typename Ready>
  __device__ __forceinline__ void before_wait(const Ready& ready) {
    if constexpr (S::kWgmma) {
#pragma unroll 1
      while (pending > kPending || (pending > 0 && !__all_sync(~0u, ready()))) transpose_oldest();
    }
  }
  __device__ __forceinline__ bool stage_ready() const {
    const uint32_t parity = stage.phase ^ 1;
    return barrier_ready(stage.empty(s.base), parity) &&
           (!Base::may_be_unread() ||
            barrier_ready(peer_empty_barrier(s.base, stage.index), Base::peer_parity()));
  }

  // Loads every tile of a unit that mma.sync runs.
  __device__ __forceinline__ void load_raw(const WorkUnit& unit, const char* k, const char* v) {
    const uint16_t* row_masks = p.row_masks + unit.list_start + 8 * lane;
    for (int left = unit.num_tokens; left > 0; left -= kTileTokens, row_masks += kTileTokens) {
      slots.wait_full(s.base);
      Base::wait_stage(false);
      if (unit.is_branch()) Base::copy_row_masks(row_masks);
      // Of a tile that one warp could load alone, warp 0 copies K and warp 1 V.
      const bool apart = left <= kTokens;
      const int row = apart ? 0 : warp * kTokens;
      const int mine = left - row;
      const uint32_t keys = Raw::place(s.tile(stage.index), row + first_row(), chunk());
      if (!apart || warp == 0)
        Base::template copy_chunks<Raw, false>(k, p.k_stride_slot, keys, row, mine, 0);
      if (!apart || warp != 0) {
        Base::template copy_chunks<Raw, true>(v, p.v_stride_slot, keys + Raw::kValues, row, mine,
                                              (mine + 15) & ~15);
      }
      Base::finish_stage();
      Base::finish_slots();
      if (left > kTileTokens) Base::count_tile();
    }
    Base::count_tile();
  }

  // Loads the tiles of a unit that wgmma runs.
  __device__ __forceinline__ void load_for_wgmma(const char* k, const char* v) {
    // Looked up for each range: there are no registers to keep it in.
    const WorkUnit& unit = s.control().units[work.index];
    const bool branch = unit.is_branch();
    const int row = warp * kTokens;
#pragma unroll 1  // short code: see join_warps()
    for (int number = TileRange::first_number(unit); number < 2; ++number) {
      const TileRange tiles(unit, number, s.sm_half);
      const bool shared = tiles.halved && unit.pairing;
      int masks = unit.list_start + tiles.first + 8 * lane;  // in p.row_masks
      for (int left = tiles.end - tiles.first; left > 0; left -= tiles.step, masks += tiles.step) {
        Base::note_shared(shared, p.stages + 1);
        before_wait(
            [&] { return barrier_ready(slots.full(s.base), slots.phase) && stage_ready(); });
        slots.wait_full(s.base);
        Base::wait_stage(shared);
        if (branch) Base::copy_row_masks(p.row_masks + masks);
        const uint32_t keys = Raw::place(s.tile(stage.index), row + first_row(), chunk());
        Base::template copy_chunks<Raw, false>(k, p.k_stride_slot, keys, row, left - row, 0);
        const uint32_t values = Blocks::place(values_of(stage.index), first_row(), chunk());
        Base::template copy_chunks<Blocks, true>(v, p.v_stride_slot, values, row, left - row,
                                                 kTokens);
        copies_commit();
        ++pending;
        stage.advance(p.stages);
        Base::finish_slots();
        Base::count_tile();
      }
    }
    if (unit.num_tokens == 0) Base::count_tile();
  }

  __device__ void run() {
    // Position in the ring of work units: one register for index and phase.
    for (uint32_t count = 0;; ++count) {
      const auto set_work = [&] {
        work.index = static_cast<int>(count % kWorkUnits);
        work.phase = count / kWorkUnits % 2;
      };
      set_work();
      before_wait([&] { return barrier_ready(work.full(s.base), work.phase); });
      work.wait_full(s.base);
      const WorkUnit unit = s.control().units[work.index];
      const bool last = unit.num_tokens < 0;
      const bool for_wgmma = !last && by_wgmma<kHeadDim>(unit);
      if (!for_wgmma) transpose_all();
      if (last) break;
      const char* k = Base::k_base(unit);
      const char* v = Base::v_base(unit);
      if (for_wgmma) {
        load_for_wgmma(k, v);
      } else {
        load_raw(unit, k, v);
      }
      set_work();
      barrier_release(work.empty(s.base), lane);
    }
  }
};

}  // namespace pat
