// SPDX-License-Identifier: Apache-2.0
// What wgmma multiplies in units that it runs: a tile's K and V in shared memory, and a unit's Q.
#pragma once

#include "cuda/forward/consumer.cuh"
#include "cuda/forward/raw_tile.cuh"
#include "cuda/forward/wgmma.cuh"

namespace pat {

#if PAT_WGMMA

// K and V as operands of M: of 16 bits as the loaders copy them, a stage each.
template <typename M, int kHeadDim>
struct WgmmaTile {
  // From the V of one product to that of the next, in bytes.
  static constexpr uint32_t kNextValues = 2048;

  static __device__ __forceinline__ uint64_t keys(uint32_t tile) { return wgmma_operand(tile); }
  // Where the columns of product i begin, in bytes.
  static __device__ __forceinline__ constexpr uint32_t columns(int i) {
    return (i >> 2) * Shape<kHeadDim>::kPanelBytes + (i & 3) * 32;
  }
  static __device__ __forceinline__ uint64_t values(uint32_t tile) {
    return wgmma_operand(tile, Shape<kHeadDim>::kPanelBytes);
  }
};

// Of e4m3. Q is the sum of two such numbers (split_queries()), so products come in twos: half of
// them multiply the remainders, half the leading parts, with the same columns of K.
template <int kHeadDim>
struct WgmmaTile<E4M3, kHeadDim> {
  static constexpr uint32_t kNextValues = ValueBlocks<kHeadDim>::kBytes;

  static __device__ __forceinline__ uint64_t keys(uint32_t tile) {
    return wgmma_operand<RawTile<kHeadDim>::kRowBytes>(tile);
  }
  static __device__ __forceinline__ constexpr uint32_t columns(int i) {
    if (kHeadDim == 64) return (i & 1) * 32;
    return (i >> 3) * RawTile<kHeadDim>::kPanelBytes + (i & 3) * 32;
  }
  // V of columns 64 * part to 64 * part + 63.
  static __device__ __forceinline__ uint64_t values(uint32_t tile, int part) {
    constexpr int kRowBytes = ValueBlocks<kHeadDim>::kRowBytes;
    return wgmma_operand<kRowBytes>(tile + RawTile<kHeadDim>::kValues + part * 64 * kRowBytes);
  }
};

// A unit's Q where the products take it from. In registers: reading it from shared memory for every
// tile as well takes half of the bandwidth that the products need.
template <int kHeadDim, bool kInRegisters = Shape<kHeadDim>::kQInRegisters>
struct Queries {
  uint32_t parts[kHeadDim / 4];
  __device__ __forceinline__ const uint32_t* step(int i) const { return parts + 4 * i; }
};
template <int kHeadDim>
struct Queries<kHeadDim, false> {
  uint64_t operand;
  __device__ __forceinline__ uint64_t step(int i) const {
    return operand + (((i >> 2) * Shape<kHeadDim>::kPanelBytes + (i & 3) * 32) >> 4);
  }
};

// This warp's 16 rows of a Q buffer.
template <int kHeadDim>
__device__ __forceinline__ void load_queries(uint32_t (&q)[kHeadDim / 4], uint32_t buffer,
                                             int warp) {
  const int lane = lane_id();
  const uint32_t low = lane & 7;
  const uint32_t row = (warp * 16 + low + ((lane >> 3) & 1) * 8) * 128;
  const uint32_t chunk = ((lane >> 4) ^ low) << 4;
#pragma unroll
  for (int i = 0; i < kHeadDim / 16; ++i) {
    uint32_t part[4];
    load_matrix(part,
                buffer + (i >> 2) * Shape<kHeadDim>::kPanelBytes + row + (chunk ^ ((i & 3) << 5)));
#pragma unroll
    for (int j = 0; j < 4; ++j) q[4 * i + j] = part[j];
  }
}

// Makes this warp's 16 rows of a Q buffer sums of two e4m3 numbers: of a row of 128 columns, which
// has two panels, the first one gets the remainders and the second one the leading parts; at head
// dim 64 the halves of a row do. The remainders come first, so that the sum of products holds them
// best. Each row is multiplied by a power of two before that, so that its greatest value is 128 to
// 256, or less if it was below 2^-8. Then such a sum is what a number of bf16 was, if that was at
// least 2^-9 of the greatest; errors of all others are at most 2^-17 of the greatest, those of fp16
// at most 2^-8 of the number more. A row with an infinity or NaN becomes NaN. `unscale`: the
// inverse of that power, of the lane's rows lane / 4 and lane / 4 + 8.
template <typename T, int kHeadDim>
__device__ __forceinline__ void split_queries(uint32_t buffer, int warp, float (&unscale)[2]) {
  constexpr int kLanes = kHeadDim < 128 ? kHeadDim / 16 : 8;  // of a row, 16 columns each
  constexpr int kRows = 32 / kLanes;                          // rows at a time
  constexpr int kParts = kHeadDim < 128 ? 1 : kHeadDim / 128;
  constexpr uint32_t kPart = 2 * Shape<kHeadDim>::kPanelBytes;
  const int lane = lane_id();
  const uint32_t column = lane % kLanes;
  float inverse[16 / kRows];
#pragma unroll
  for (int i = 0; i < 16 / kRows; ++i) {
    const uint32_t row = warp * 16 + i * kRows + lane / kLanes, low = row & 7;
    const uint32_t at = buffer + row * 128;
    const uint32_t from =
        at + (column >> 2) * Shape<kHeadDim>::kPanelBytes + (((2 * (column & 3)) ^ low) << 4);
    uint32_t pairs[8 * kParts];
    uint32_t most = 0;
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      const uint4 a = load_shared4(from + part * kPart),
                  b = load_shared4((from ^ 16) + part * kPart);
      const uint32_t read[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
#pragma unroll
      for (int j = 0; j < 8; ++j) {
        pairs[8 * part + j] = to_half2<T>(read[j]);
        most = __vmaxu2(most, pairs[8 * part + j] & 0x7FFF7FFF);
      }
    }
#pragma unroll
    for (int step = 1; step < kLanes; step *= 2) {
      most = __vmaxu2(most, __shfl_xor_sync(~0u, most, step));
    }
    most = max(most & 0xFFFF, most >> 16);
    // fp16 has exponents from 2^-15 on in 5 bits; 2^15 is the greatest power of two that it holds.
    const int exponent = min(22 - static_cast<int>(most >> 10), 15);
    const uint32_t power = static_cast<uint32_t>(exponent + 15) * 0x04000400;
    const uint32_t scale = most >= 0x7C00 ? 0x7E007E00 : power;
    inverse[i] = __int_as_float((127 - exponent) << 23);
    __syncwarp();  // all lanes have read their part of the rows
    const uint32_t to = at + ((column ^ low) << 4);
#pragma unroll
    for (int part = 0; part < kParts; ++part) {
      uint32_t leading[4], rest[4];
#pragma unroll
      for (int j = 0; j < 4; ++j) {
        const uint32_t a = multiply_half2(pairs[8 * part + 2 * j], scale);
        const uint32_t b = multiply_half2(pairs[8 * part + 2 * j + 1], scale);
        leading[j] = pack_e4m3(a, b);
        uint32_t wide_a, wide_b;
        widen_e4m3(leading[j], wide_a, wide_b);
        rest[j] = pack_e4m3(subtract_half2(a, wide_a), subtract_half2(b, wide_b));
      }
      store_shared4(to + part * kPart, {rest[0], rest[1], rest[2], rest[3]});
      store_shared4(kHeadDim < 128 ? to ^ 64 : to + part * kPart + kPart / 2,
                    {leading[0], leading[1], leading[2], leading[3]});
    }
  }
#pragma unroll
  for (int r = 0; r < 2; ++r) {
    const int row = (lane >> 2) + 8 * r;
#pragma unroll
    for (int i = 8 * r / kRows; i < 8 * (r + 1) / kRows; ++i) {
      const float of_row = __shfl_sync(~0u, inverse[i], row % kRows * kLanes);
      if (row / kRows == i) unscale[r] = of_row;
    }
  }
  __syncwarp();  // before other lanes read what this one has stored
}

template <int kHeadDim, bool kTransforms, Drafts kDrafts>
__device__ __forceinline__ void release_queries(Consumer<kHeadDim, kTransforms, kDrafts>& c) {
  c.release(c.q.empty(c.s.base));
  c.q.advance(c.p.q_buffers);
}

// Takes the next unit's Q: into registers, whose buffer is released then unless `keep`, or as an
// operand in its buffer. release_queries() releases what is not released here. `unscale`: see
// split_queries(); only written if M is E4M3.
template <typename M, typename T, int kHeadDim, bool kTransforms, Drafts kDrafts>
__device__ __forceinline__ Queries<kHeadDim> take_queries(
    Consumer<kHeadDim, kTransforms, kDrafts>& c, bool keep, float (&unscale)[2]) {
  constexpr bool kSplit = std::is_same_v<M, E4M3>;
  c.q.wait_full(c.s.base);
  if constexpr (Shape<kHeadDim>::kQInRegisters) {  // see copy_first_q()
    copies_wait<0>();
    __syncwarp();
  }
  const uint32_t buffer = c.s.q(c.q.index);
  if constexpr (kSplit) split_queries<T, kHeadDim>(buffer, c.warp, unscale);
  Queries<kHeadDim> q;
  if constexpr (Shape<kHeadDim>::kQInRegisters) {
    load_queries<kHeadDim>(q.parts, buffer, c.warp);
    if (!keep) release_queries(c);
  } else {
    if constexpr (kSplit) {
      fence_async_proxy();
      c.sync();
    }
    q.operand = wgmma_operand(buffer);
  }
  return q;
}

// Issues scores = Q K^T of 64 rows and 64 tokens as one group.
template <typename M, int kHeadDim>
__device__ __forceinline__ void issue_scores(float (&scores)[32], const Queries<kHeadDim>& q,
                                             uint32_t tile) {
  using Tile = WgmmaTile<M, kHeadDim>;
  const uint64_t k = Tile::keys(tile);
#pragma unroll
  for (int i = 0; i < kHeadDim / 16; ++i) {
    wgmma_k_major<M>(scores, q.step(i), k + (Tile::columns(i) >> 4), i > 0);
  }
  wgmma_commit();
}

#endif  // PAT_WGMMA

}  // namespace pat
