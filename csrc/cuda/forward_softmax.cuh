// SPDX-License-Identifier: Apache-2.0
// What all consumers of the forward kernel share: online softmax in registers, the epilogue.
#pragma once

#include "cuda/forward.cuh"

namespace pat {

// What a consumer warp keeps over all units. kTransforms: the logits are not kPlain.
template <int kHeadDim, bool kTransforms>
struct Consumer {
  const ForwardParams& p;
  const Shared<kHeadDim>& s;
  const int warp;  // 0 .. 3
  Cursor stage, peer_stage, q, narrow;

  __device__ __forceinline__ void wait_stage() { barrier_wait(s.full(stage.index), stage.phase); }
  __device__ __forceinline__ void release(uint32_t bar) { barrier_release(bar, lane_id()); }
  __device__ __forceinline__ void release_stage(int index) { release(s.empty(index)); }
  // Passes by a stage of another warp. Every warp waits for every stage and releases it: who left
  // one out would take the parity of a later phase for that of an earlier one.
  __device__ __forceinline__ void pass_stage() {
    wait_stage();
    release_stage(stage.index);
    stage.advance(p.stages);
  }

  // The next stage, of this half or of the other, once it is full: where it is and the barrier to
  // release it with.
  struct Stage {
    uint32_t tile, empty, rows;
  };
  __device__ __forceinline__ Stage take_stage(bool of_peer) {
    const uint32_t base = of_peer ? s.peer : s.base;
    const int index = of_peer ? peer_stage.index : stage.index;
    const uint32_t phase = of_peer ? peer_stage.phase : stage.phase;
    barrier_wait(base + offsetof(Control, full) + 8 * index, phase);
    if (of_peer) {
      peer_stage.advance(p.stages);
    } else {
      stage.advance(p.stages);
    }
    return {base + static_cast<uint32_t>(sizeof(Control)) + index * Shape<kHeadDim>::kTileBytes,
            base + 8 * index +
                static_cast<uint32_t>(of_peer ? offsetof(Control, peer_empty)
                                              : offsetof(Control, empty)),
            rows_of(index)};
  }
  // Control::rows of a stage of this half.
  __device__ __forceinline__ uint32_t rows_of(int index) const {
    return s.base + static_cast<uint32_t>(offsetof(Control, rows)) + 2 * kTileTokens * index;
  }
  // All consumer warps of this half.
  __device__ __forceinline__ void sync() const { named_barrier(1 + s.side, kConsumers); }
};

// Which tiles of a unit hold tokens that not all of its rows attend to: those of a branch, but for
// the first or last ones.
struct MaskedTiles {
  int above, below;  // tokens from such a tile on

  __device__ __forceinline__ explicit MaskedTiles(const Unit& u) {
    const int free = __shfl_sync(~0u, u.batch_row, 0) * kTileTokens;
    above = __shfl_sync(~0u, u.branch, 0) ? max(-free, 0) : INT_MAX;
    below = __shfl_sync(~0u, u.tokens, 0) + kTileTokens - max(free, 0);
  }
  // Of the tile that `left` tokens are left from.
  __device__ __forceinline__ bool has(int left) const { return left > above && left < below; }
};

// Which packed rows attend to the tokens of a branch's tile: of each 8 tokens the lane's two, as
// BranchList::rows has them.
template <int kTiles>
__device__ __forceinline__ void read_seen(uint32_t (&seen)[kTiles], uint32_t rows) {
#pragma unroll
  for (int i = 0; i < kTiles; ++i) seen[i] = load_shared(rows + 4 * (lane_id() & 3) + 16 * i);
}

// Hides from rows lane / 4 and lane / 4 + 8, of those from `first_row` on, what they do not attend
// to.
template <int kTiles>
__device__ __forceinline__ void hide_others(float (&s)[4 * kTiles], const uint32_t (&seen)[kTiles],
                                            int first_row) {
  const uint32_t row = first_row + (lane_id() >> 2);
#pragma unroll
  for (int i = 0; i < kTiles; ++i) {
#pragma unroll
    for (int c = 0; c < 2; ++c) {
      const uint32_t first = (seen[i] >> (16 * c)) & 0xFF;
      const uint32_t count = (seen[i] >> (16 * c + BranchList::kRowsCount)) & 0xFF;
      if (row - first >= count) s[4 * i + c] = -INFINITY;
      if (row + 8 - first >= count) s[4 * i + 2 + c] = -INFINITY;
    }
  }
}

// Online softmax over one tile of scores: lane holds rows lane / 4 and lane / 4 + 8 in mma layout.
// Turns scores into weights, updates max and sum (of this lane's columns), and gives the factors
// that the output so far is to be multiplied with. Calls hide(scores) for the logits that no weight
// shall come of, beyond those of tokens that are not there.
template <int kTiles, bool kTransforms, typename Hide>
__device__ __forceinline__ void softmax(const ForwardParams& p, float (&s)[4 * kTiles],
                                        float (&row_max)[2], float (&row_sum)[2],
                                        float (&factor)[2], int first_token, int tokens,
                                        const Hide& hide) {
  const int column = first_token + 2 * (lane_id() & 3);
  if constexpr (kTransforms) {
    const bool capped = p.logits == kCapped;
#pragma unroll
    for (int i = 0; i < 4 * kTiles; ++i) {
      s[i] *= p.pre_scale;
      // tanh(x) = 1 - 2 / (exp(2 x) + 1)
      const float tanh = 1.0f - __fdividef(2.0f, exp2_approx(fminf(s[i], 64.0f)) + 1.0f);
      s[i] = capped ? p.cap * tanh : s[i];
    }
  }
  hide(s);
  if (first_token + 8 * kTiles > tokens) {
#pragma unroll
    for (int i = 0; i < 4 * kTiles; ++i) {
      if (column + (i >> 2) * 8 + (i & 1) >= tokens) s[i] = -INFINITY;
    }
  }
  // The two rows side by side: neither waits for the other's shuffles.
  float m[2] = {row_max[0], row_max[1]};
#pragma unroll
  for (int i = 0; i < kTiles; ++i) {
#pragma unroll
    for (int r = 0; r < 2; ++r) m[r] = fmaxf(m[r], fmaxf(s[4 * i + 2 * r], s[4 * i + 2 * r + 1]));
  }
#pragma unroll
  for (int step = 1; step < 4; step *= 2) {
    const float other[2] = {__shfl_xor_sync(~0u, m[0], step), __shfl_xor_sync(~0u, m[1], step)};
    m[0] = fmaxf(m[0], other[0]);
    m[1] = fmaxf(m[1], other[1]);
  }
  float base[2], sum[2][2] = {};
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    base[r] = m[r] == -INFINITY ? 0.0f : m[r] * p.scale;
    factor[r] = exp2_approx(fmaf(row_max[r], p.scale, -base[r]));
    row_max[r] = m[r];
  }
#pragma unroll
  for (int i = 0; i < kTiles; ++i) {
#pragma unroll
    for (int j = 0; j < 4; ++j) {
      float& x = s[4 * i + j];
      x = exp2_approx(fmaf(x, p.scale, -base[j / 2]));
      sum[j / 2][j % 2] += x;
    }
  }
#pragma unroll
  for (int r = 0; r < 2; ++r) row_sum[r] = row_sum[r] * factor[r] + (sum[r][0] + sum[r][1]);
}

template <int kCount>
__device__ __forceinline__ void rescale_output(float (&o)[kCount], const float (&factor)[2]) {
#pragma unroll
  for (int i = 0; i < kCount; ++i) o[i] *= factor[(i >> 1) & 1];
}

// Adds the four lanes' sums and gives the state of this lane's rows.
__device__ __forceinline__ void finish_states(const ForwardParams& p, const float (&row_max)[2],
                                              float (&row_sum)[2], SoftmaxState (&state)[2]) {
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    row_sum[r] += __shfl_xor_sync(~0u, row_sum[r], 1);
    row_sum[r] += __shfl_xor_sync(~0u, row_sum[r], 2);
    state[r] = {row_max[r] == -INFINITY ? -INFINITY : row_max[r] * p.scale, row_sum[r]};
  }
}

// Where the results of rows lane / 4 and lane / 4 + 8 of 16 packed rows go. Looked up at a unit's
// beginning, so that its end does not wait for memory.
struct Destination {
  Member member[2];
  int head[2];
};

__device__ __forceinline__ Destination destination_of(const ForwardParams& p, const Control& plan,
                                                      const Unit& u, int first_row) {
  Destination to;
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = first_row + (lane_id() >> 2) + 8 * r;
    const int packed = u.row_begin + row;
    const int index = (packed * p.group_magic) >> 16;
    to.head[r] = u.head * p.group + packed - index * p.group;
    to.member[r] = u.member;
    if (row < u.rows && !u.single) to.member[r] = load_member(plan, u.member_offset + index);
  }
  return to;
}

// Writes row lane / 4 and, if kRows is 2, row lane / 4 + 8 of 16 packed rows: 8 * kTiles columns
// from `column` on.
template <typename T, int kHeadDim, int kTiles, int kRows = 2, int kCount>
__device__ __forceinline__ void write_rows(const ForwardParams& p, const Unit& u,
                                           const Destination& to, int first_row, int column,
                                           float (&o)[kCount], const SoftmaxState (&state)[2],
                                           bool write_lse) {
  static_assert(kCount >= 4 * kTiles);
  const int lane = lane_id();
  const int quad = lane & 3;
#pragma unroll
  for (int r = 0; r < kRows; ++r) {
    if (first_row + 8 * r >= u.rows) break;
    const int row = first_row + (lane >> 2) + 8 * r;
    const bool live = row < u.rows;
    const Member member = to.member[r];
    const int head = to.head[r];
    const float norm = normalizer(state[r]);
    const bool direct = member.partial == kDirect;
    const int64_t slot = static_cast<int64_t>(member.partial) * p.num_q_heads + head;
    if (write_lse && live && quad == 0) {
      if (!direct) {
        p.partial_lse[slot] = lse(state[r]);
      } else if (p.lse) {
        p.lse[static_cast<int64_t>(member.query) * p.num_q_heads + head] = lse(state[r]);
      }
    }
    char* base = direct ? p.out + member.query * p.out_stride_query + head * p.out_stride_head
                        : p.partials + slot * (p.float_partials ? 4 * kHeadDim : 2 * kHeadDim);
    const bool exact = p.float_partials && !direct;
    if (__any_sync(~0u, live && exact)) {
      if (live && exact) {
        float* dst = reinterpret_cast<float*>(base) + column + 2 * quad;
#pragma unroll
        for (int i = 0; i < kTiles; ++i) {
          *reinterpret_cast<float2*>(dst + 8 * i) =
              make_float2(o[4 * i + 2 * r] * norm, o[4 * i + 2 * r + 1] * norm);
        }
      }
    }
    if (!__any_sync(~0u, live && !exact)) continue;
    // Lanes of a quad swap so that each writes 4 neighbouring columns, the quad a whole sector.
#pragma unroll
    for (int i = 0; i < kTiles; i += 2) {
      const uint32_t a = pack2<T>(o[4 * i + 2 * r] * norm, o[4 * i + 2 * r + 1] * norm);
      const uint32_t b = pack2<T>(o[4 * i + 4 + 2 * r] * norm, o[4 * i + 5 + 2 * r] * norm);
      const uint32_t kept = quad & 2 ? b : a;
      const uint32_t got = __shfl_xor_sync(~0u, quad & 2 ? a : b, 2);
      // quad 0: a0 a2, quad 1: a1 a3, quad 2: b2 b0, quad 3: b3 b1
      const uint32_t x = quad & 2 ? got : kept;  // pair quad & 1
      const uint32_t y = quad & 2 ? kept : got;  // pair (quad & 1) + 2
      const uint32_t other = __shfl_xor_sync(~0u, quad & 1 ? x : y, 1);
      if (live && !exact) {
        auto* dst = reinterpret_cast<T*>(base) + column + 8 * i + 4 * quad;
        *reinterpret_cast<uint2*>(dst) = quad & 1 ? make_uint2(other, y) : make_uint2(x, other);
      }
    }
  }
}

}  // namespace pat
