// SPDX-License-Identifier: Apache-2.0
// The warpgroup of the MLA forward that makes weights of Q and K: of each tile the scores of all 64
// rows, their softmax, and weights of bf16 in shared memory, for the two that multiply them with V.
#pragma once

#include "cuda/mla/products.cuh"
#include "cuda/mla/units.cuh"
#include "cuda/mla/weights.cuh"

namespace pat::mla {

#if PAT_WGMMA

struct Scorer {
  static constexpr int kBarrier = 1;  // among this warpgroup's threads

  const Params& p;
  const Place s;
  const int warp, lane;
  Position<kUnits> work;
  Position<kTileStages> stage;
  uint32_t q_phase = 0;

  // Scores of the stage's tile. All products follow each other: a fence among them, as each part of
  // a tile arrives, would let the matrix units run dry.
  __device__ __forceinline__ void score_tile(float (&scores)[32]) const {
    const uint64_t q = wgmma_operand(s.q()), k = wgmma_operand(s.tile(stage.index));
    barrier_wait(s.full(stage.index), stage.phase);
    fence_async_proxy();
    warpgroup_fence_operand(scores);
    wgmma_fence();
#pragma unroll
    for (int panel = 0; panel < kPanels; ++panel) {
      const uint32_t offset = panel * kPanelBytes >> 4;
      issue_scores(scores, q + offset, k + offset, panel > 0);
    }
    wgmma_commit();
    wgmma_wait<0>();
    warpgroup_fence_operand(scores);
  }

  // Hides what rows do not attend to. `left`: tokens from the tile's first on.
  __device__ __forceinline__ void mask_tile(float (&scores)[32], const WorkUnit& unit, int left,
                                            bool by_row, bool has_drafts) const {
    const int first_row = warp * kWarpRows;
    if (by_row) {
      uint32_t row_masks[8];
      read_row_masks(row_masks, shared_address(s.board().row_masks[stage.index]));
      mask_scores(scores, row_masks, first_row);
    }
    if (has_drafts) {
      const int first = unit.first_packed_row + first_row;
      if (p.f.draft_masks != nullptr) {
        mask_drafts<8, kTrees>(p.f, scores, unit.member.query, first, 0, left);
      } else {
        mask_drafts<8, kChains>(p.f, scores, unit.member.query, first, 0, left);
      }
    }
    mask_tail<8>(scores, 0, left);
  }

  // Stores the warp's weights where the tile's rope panel was, in the same form.
  __device__ __forceinline__ void store_weights(const uint32_t (&weights)[16]) const {
    const uint32_t row = lane & 7, chunk = lane >> 4;
    const uint32_t to =
        s.tile(stage.index) + kRopeOffset + (warp * kWarpRows + row + (lane & 8)) * 128;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const uint32_t part[4] = {weights[4 * i], weights[4 * i + 1], weights[4 * i + 2],
                                weights[4 * i + 3]};
      store_matrix(to + (((2 * i + chunk) ^ row) << 4), part);
    }
  }

  // Tells the other warpgroups whether the output so far is to be scaled, and by what.
  __device__ __forceinline__ void store_factors(bool raised, const float (&factor)[2]) const {
    Board& board = s.board();
    if (raised && (lane & 3) == 0) {
      float* factors = board.factors[stage.index] + warp * kWarpRows + (lane >> 2);
      factors[0] = factor[0];
      factors[8] = factor[1];
    }
    if (lane == 0) board.raised[stage.index][warp] = raised;
  }
  __device__ __forceinline__ void store_states(const Weights& softmax) const {
    SoftmaxState* states = s.board().states[stage.index] + warp * kWarpRows + (lane >> 2);
#pragma unroll
    for (int r = 0; r < 2; ++r) {
      const SoftmaxState state = softmax.finish(r);
      if ((lane & 3) == 0) states[8 * r] = state;
    }
  }

  // Runs the part of a unit that begins with its first_packed_row and has `rows` rows.
  __device__ __forceinline__ void run_part(const WorkUnit& unit, int rows) {
    Weights softmax(p.f.exp_scale, rows - warp * kWarpRows);
    const MaskedTiles by_row(unit);
    const int drafts = drafts_below(p.f, unit);
    barrier_wait(s.q_full(), q_phase);
    q_phase ^= 1;
    bool last;
#pragma unroll 1
    for (int left = __shfl_sync(~0u, unit.num_tokens, 0);; left -= kTileTokens) {
      last = left <= kTileTokens;
      float scores[32], factor[2];
      uint32_t weights[16];
      score_tile(scores);
      if (last) barrier_release(s.q_empty(), lane);
      const bool masked = by_row.has(left);
      if (masked || left < kTileTokens || left < drafts) {
        mask_tile(scores, unit, left, masked, left < drafts);
      }
      const bool raised = softmax.weigh_tile(weights, scores, factor);
      // All warps have the tile's scores: the matrix units have read the rope panel.
      named_barrier(kBarrier, kGroupWarps * 32);
      store_weights(weights);
      store_factors(raised, factor);
      if (last) store_states(softmax);
      barrier_release(s.weighed(stage.index), lane);
      stage.advance();
      if (last) break;
    }
  }

  __device__ __forceinline__ void run() {
    for (;; work.advance()) {
      barrier_wait(s.unit_full(work.index), work.phase);
      WorkUnit unit = s.board().units[work.index];
      if (unit.num_tokens < 0) break;
      const int rows = __shfl_sync(~0u, unit.num_rows, 0);
#pragma unroll 1
      for (int row = 0; row < rows; row += kTileRows) {
        unit.first_packed_row = row;
        run_part(unit, rows_of_part(rows, row));
      }
      barrier_release(s.unit_empty(work.index), lane);
    }
  }
};

#endif  // PAT_WGMMA

}  // namespace pat::mla
