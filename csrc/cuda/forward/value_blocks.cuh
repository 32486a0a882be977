// SPDX-License-Identifier: Apache-2.0
// V of fp8 for wgmma, which takes e4m3 only with the tokens of a column next to each other: a
// loader warp copies the rows of its 32 tokens and transposes them in place, so that only its own
// lanes must meet.
//
// Blocks of 1 KB hold 32 columns of the 32 tokens: as copied, 32 rows of 32 bytes, a token each; as
// transposed, a column each. The columns of 16 come in the order in which write_quads() takes them,
// the even ones first. The tokens of 16 come in the order in which a lane has their weights: 2 q,
// 2 q + 1, 2 q + 8 and 2 q + 9 for q = 0 to 3, so that pack_weights() needs no shuffle.
#pragma once

#include "cuda/forward/pipeline.cuh"

namespace pat {

template <int kHeadDim>
struct ValueBlocks {
  static constexpr int kTokens = kTileTokens / kLoaderWarps;
  static constexpr int kBytes = kTokens * kHeadDim;  // of one loader warp
  static constexpr int kBlockBytes = 1024;
  static constexpr int kRowBytes = 32;
  static_assert(kTokens * kRowBytes == kBlockBytes);

  // What a token's place in its block is XORed with: together with the block's number this keeps
  // copies and ldmatrix free of bank conflicts.
  static __device__ __forceinline__ constexpr uint32_t swizzle(uint32_t token) {
    return ((token >> 2) & 1) * 80;
  }
  // Where a loader copies 16-byte chunk `chunk` of a token; and, from a token on that is a multiple
  // of 8 (of 4 at head dim 64), where it copies the same chunk of the j-th token.
  static __device__ __forceinline__ uint32_t place(uint32_t values, uint32_t token,
                                                   uint32_t chunk) {
    const uint32_t block = chunk >> 1;
    return values + block * kBlockBytes +
           ((token * kRowBytes) ^ ((block & 3) << 5) ^ ((chunk & 1) << 4) ^ swizzle(token));
  }
  static __device__ __forceinline__ uint32_t next(uint32_t place, int j) {
    return place ^ (j * kRowBytes) ^ swizzle(j);
  }

  // Transposes the blocks that this warp has copied. Rows of a transposed block have the XOR
  // swizzle of 32 bytes.
  static __device__ __forceinline__ void transpose(uint32_t values) {
    const uint32_t lane = lane_id();
    const uint32_t from = (lane * kRowBytes) ^ swizzle(lane);
    // Lanes 0-7: tokens 0-15 of the even columns; 8-15: tokens 16-31; 16-31: the same of the odd
    // ones.
    const uint32_t to =
        (lane >> 4) * 256 + (lane & 7) * kRowBytes + ((((lane >> 3) ^ (lane >> 2)) & 1) << 4);
#pragma unroll
    for (int first = 0; first < kHeadDim / 32; first += 2) {
      uint32_t raw[4][4];  // [16 columns][8 tokens]: a lane's two columns of two tokens
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int block = first + i / 2;
        load_matrix_transposed(
            raw[i], values + block * kBlockBytes + (from ^ ((block & 3) << 5) ^ ((i & 1) << 4)));
      }
      __syncwarp();
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        // Bytes 0 and 2 are of the even column, 1 and 3 of the odd one.
        const uint32_t columns[4] = {
            __byte_perm(raw[i][0], raw[i][1], 0x6420), __byte_perm(raw[i][2], raw[i][3], 0x6420),
            __byte_perm(raw[i][0], raw[i][1], 0x7531), __byte_perm(raw[i][2], raw[i][3], 0x7531)};
        store_matrix(values + (first + i / 2) * kBlockBytes + (i & 1) * 512 + to, columns);
      }
    }
  }
};

}  // namespace pat
