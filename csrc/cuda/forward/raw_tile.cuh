// SPDX-License-Identifier: Apache-2.0
// Tiles of fp8 K and V as they are in the cache: K and V of 64 tokens share a stage. wgmma
// multiplies such K as it is; its V lies as ValueBlocks says. For mma.sync the consumers widen
// both in registers.
//
// ldmatrix moves pairs of bytes. Of 16 bytes of a row of K it gives each lane of a quad four
// neighbouring ones, where the product of fp16 wants columns 2 q, 2 q + 1, 2 q + 8 and 2 q + 9 of
// lane q. The order of columns does not matter to a product, so Q's are permuted likewise: of each
// 16 columns, 0 1 4 5 8 9 12 13 come first and 2 3 6 7 10 11 14 15 last. Of V the transposing
// ldmatrix gives each lane two neighbouring columns of two tokens, which belong to two products:
// one of the even columns of 16 and one of the odd ones. So a lane ends with columns 4 q to 4 q
// + 3.
#pragma once

#include "cuda/forward/pipeline.cuh"

namespace pat {

// What mma.sync multiplies: q's type, or fp16 where K and V are fp8.
template <typename T, bool kFp8>
using Operand = std::conditional_t<kFp8, __half, T>;

// What a lane passes to ldmatrix: where its row of 16 begins, and its swizzled 16-byte chunk in it.
struct Fragment {
  uint32_t row, chunk;
};

// Raw rows of a tile lie in panels of up to 128 bytes a row, one row after the other. Chunks of 16
// bytes are XORed as wgmma reads K; then ldmatrix has no bank conflicts, nor have copies of 128
// bytes a row.
template <int kHeadDim>
struct RawTile {
  static constexpr int kRowBytes = kHeadDim < 128 ? kHeadDim : 128;  // of a panel
  static constexpr int kPanelBytes = kTileTokens * kRowBytes;
  static constexpr int kValues = kTileTokens * kHeadDim;  // where V begins in the stage
  static_assert(2 * kValues == Shape<kHeadDim>::kTileBytes);

  // What the offset of a chunk in a row is XORed with.
  static __device__ __forceinline__ constexpr uint32_t swizzle(uint32_t row) {
    return kHeadDim == 64 ? ((row >> 1) & 3) << 4 : (row & 7) << 4;
  }
  static __device__ __forceinline__ Fragment fragment(uint32_t tile, uint32_t row, uint32_t chunk) {
    return {tile + row * kRowBytes, (chunk << 4) ^ swizzle(row)};
  }
  // Where a loader copies a chunk of a row; and, from a row on that is a multiple of 8 (of 4 at
  // head dim 64), where it copies the same chunk of the j-th row.
  static __device__ __forceinline__ uint32_t place(uint32_t tile, uint32_t row, uint32_t chunk) {
    return tile + (chunk >> 3) * kPanelBytes + row * kRowBytes +
           (((chunk & 7) << 4) ^ swizzle(row));
  }
  static __device__ __forceinline__ uint32_t next(uint32_t place, int j) {
    return (place ^ swizzle(j)) + j * kRowBytes;
  }
  // Of K: 16 tokens from token `first` on, of 8 at a time both of two chunks.
  static __device__ __forceinline__ Fragment keys(uint32_t tile, int first) {
    const uint32_t lane = lane_id();
    return fragment(tile, first + (lane & 7) + (lane >> 4) * 8, (lane >> 3) & 1);
  }
  // Of V: of two chunks both 8 tokens.
  static __device__ __forceinline__ Fragment values(uint32_t tile, int first) {
    const uint32_t lane = lane_id();
    return fragment(tile + kValues, first + (lane & 7) + ((lane >> 3) & 1) * 8, lane >> 4);
  }
  // Address of 16 rows from the fragment's on: chunk `chunk` and the next.
  static __device__ __forceinline__ uint32_t address(const Fragment& from, int rows, int chunk) {
    return from.row + rows * kRowBytes + (chunk >> 3) * kPanelBytes +
           (from.chunk ^ ((chunk & 7) << 4));
  }
};

// scores = Q K^T of 16 rows and 8 * kTiles tokens. queries(a, i): gives columns 16 i to 16 i + 15
// of Q, permuted, as an operand.
template <int kTiles, int kHeadDim, typename Queries>
__device__ __forceinline__ void multiply_raw_keys(float (&scores)[4 * kTiles], const Fragment& k,
                                                  const Queries& queries) {
#pragma unroll
  for (int i = 0; i < 4 * kTiles; ++i) scores[i] = 0.0f;
#pragma unroll
  for (int d = 0; d < kHeadDim / 32; ++d) {
    uint32_t a[2][4];
    queries(a[0], 2 * d);
    queries(a[1], 2 * d + 1);
#pragma unroll
    for (int j = 0; j < kTiles / 2; ++j) {
      uint32_t raw[4];
      load_matrix(raw, RawTile<kHeadDim>::address(k, 16 * j, 2 * d));
#pragma unroll
      for (int i = 0; i < 4; ++i) {  // chunk i % 2 of tokens 8 (i / 2) on
        uint32_t b[2];
        widen_e4m3(raw[i], b[0], b[1]);
        mma16816<__half>(scores + 8 * j + 4 * (i / 2), a[i % 2], b[0], b[1]);
      }
    }
  }
}

// o += P V of 16 rows and the first `tokens` of 8 * kTiles tokens; weights(a, i) as in
// add_values(). Of each 16 columns the even ones come first.
template <int kTiles, int kHeadDim, typename Weights>
__device__ __forceinline__ void add_raw_values(float (&o)[kHeadDim / 2], const Fragment& v,
                                               int tokens, const Weights& weights) {
#pragma unroll
  for (int i = 0; i < kTiles / 2; ++i) {
    if (kTiles > 2 && 16 * i >= tokens) break;
    uint32_t a[4];
    weights(a, i);
#pragma unroll
    for (int j = 0; j < kHeadDim / 16; j += 2) {
      uint32_t raw[4];
      load_matrix_transposed(raw, RawTile<kHeadDim>::address(v, 16 * i, j));
#pragma unroll
      for (int c = 0; c < 2; ++c) {
        uint32_t even[2], odd[2];
#pragma unroll
        for (int t = 0; t < 2; ++t) {
          // Bytes 0 and 2 are of the even column, 1 and 3 of the odd one.
          widen_e4m3(__byte_perm(raw[2 * c + t], 0, 0x3120), even[t], odd[t]);
        }
        mma16816<__half>(o + 8 * (j + c), a, even[0], even[1]);
        mma16816<__half>(o + 8 * (j + c) + 4, a, odd[0], odd[1]);
      }
    }
  }
}

// Makes kRows rows of a Q buffer fp16 and permutes their columns, in place; each of the kConsumers
// threads a part. They must synchronise before they read any.
template <typename T, int kRows, int kHeadDim>
__device__ __forceinline__ void widen_queries(uint32_t buffer, int thread) {
#pragma unroll 1
  for (int i = thread; i < kRows * kHeadDim / 16; i += kConsumers) {
    const int row = (i >> 2) % kRows, panel = (i >> 2) / kRows;
    const uint32_t at = buffer + panel * Shape<kHeadDim>::kPanelBytes + row * 128 +
                        ((2 * (i & 3) ^ (row & 7)) << 4);
    const uint4 low = load_shared4(at), high = load_shared4(at ^ 16);
    const auto half = [](uint32_t pair) { return to_half2<T>(pair); };
    store_shared4(at, {half(low.x), half(low.z), half(high.x), half(high.z)});
    store_shared4(at ^ 16, {half(low.y), half(low.w), half(high.y), half(high.w)});
  }
}

// V of fp8 for wgmma, which takes e4m3 only with the tokens of a column next to each other: a
// loader warp copies the rows of its 32 tokens and transposes them in place, so that only its own
// lanes must meet.
//
// Blocks of 1 KB hold 32 columns of the 32 tokens: as copied, 32 rows of 32 bytes, a token each; as
// transposed, a column each. The columns of 16 come in the order in which write_quads() takes them,
// the even ones first. The tokens of 16 come in the order in which a lane has their weights: 2 q,
// 2 q + 1, 2 q + 8 and 2 q + 9 for q = 0 to 3, so that pack_weights() needs no shuffle.
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
