// SPDX-License-Identifier: Apache-2.0
// bf16, fp16 and fp8 to fp32 and back, exp2 and tanh: branch-free, so that the compiler vectorises
// loops over them.
#pragma once

#include <bit>
#include <cstdint>

#include "state.h"

namespace pat {

struct BF16 {
  uint16_t bits;
};
struct F16 {
  uint16_t bits;
};
struct E4M3 {  // float8_e4m3fn: no infinity, 0x7f and 0xff are NaN
  uint8_t bits;
};

inline float to_float(float x) { return x; }
inline float to_float(BF16 x) { return std::bit_cast<float>(uint32_t{x.bits} << 16); }
inline float to_float(F16 x) {
  const uint32_t magnitude = (x.bits & 0x7fffu) << 13;
  // The exponent biases differ by 112; the product is exact and turns subnormals into normals.
  const uint32_t finite = std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude) * 0x1p112f);
  const uint32_t special = magnitude | 0x7f800000u;  // infinity or NaN
  return std::bit_cast<float>(((x.bits & 0x7c00u) == 0x7c00u ? special : finite) |
                              (x.bits & 0x8000u) << 16);
}
// Exact. No fp32 subnormal occurs on the way, so that a thread that flushes them reads the same.
inline float to_float(E4M3 x) {
  const uint32_t magnitude = (x.bits & 0x7fu) << 20;
  // The exponent biases differ by 120. A subnormal is read as the normal number of the least
  // exponent that has its mantissa, and 2^-6, the implicit bit, is taken off again.
  const uint32_t implicit = magnitude < 1u << 23 ? 1u << 23 : 0u;
  const float taken_off = magnitude < 1u << 23 ? 0x1p-6f : 0.0f;
  const float finite = std::bit_cast<float>(magnitude + implicit + (120u << 23)) - taken_off;
  const uint32_t bits = magnitude == 0x7fu << 20 ? 0x7fc00000u : std::bit_cast<uint32_t>(finite);
  return std::bit_cast<float>(bits | (x.bits & 0x80u) << 24);
}

// Rounds to nearest, ties to even, as torch does.
inline void assign(float& to, float x) { to = x; }
inline void assign(BF16& to, float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  const uint32_t rounded = (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
  to.bits = static_cast<uint16_t>(x != x ? bits >> 16 | 0x40u : rounded);
}
inline void assign(F16& to, float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  const uint32_t magnitude = bits & 0x7fffffffu;
  const uint32_t normal = (magnitude - (112u << 23) + 0xfffu + (magnitude >> 13 & 1u)) >> 13;
  // Below 2^-14 the addition itself rounds at 2^-24, the least subnormal.
  const uint32_t subnormal =
      std::bit_cast<uint32_t>(std::bit_cast<float>(magnitude) + 0.5f) - 0x3f000000u;
  uint32_t half = magnitude < 0x38800000u ? subnormal : normal;
  half = magnitude >= 0x477ff000u ? 0x7c00u : half;  // rounds to 2^16 or more
  half = x != x ? 0x7e00u : half;
  to.bits = static_cast<uint16_t>(half | (bits >> 16 & 0x8000u));
}

// 2^x within 1e-7 relative for x <= 126; 0 below -125; NaN stays NaN.
inline float exp2_of(float x) {
  constexpr float kRound = 0x1.8p23f;  // adding it rounds to an integer, left in the low bits
  const float clamped = x < -125.0f ? -125.0f : x;
  const float shifted = clamped + kRound;
  const float f = clamped - (shifted - kRound);
  // 2^f on [-1/2, 1/2], minimax with 2^0 = 1 exact.
  float p = f * 0.0001535336341476068f + 0.0013398875016719103f;
  p = p * f + 0.00961843691766262f;
  p = p * f + 0.055503323674201965f;
  p = p * f + 0.24022647738456726f;
  p = p * f + 0.6931471824645996f;
  p = p * f + 1.0f;
  const float y =
      std::bit_cast<float>(std::bit_cast<uint32_t>(p) + (std::bit_cast<uint32_t>(shifted) << 23));
  const float kept = x < -125.0f ? 0.0f : y;
  return x != x ? x : kept;
}

// tanh(x) within 2e-7 relative.
inline float tanh_of(float x) {
  const float magnitude = x < 0.0f ? -x : x;
  const float capped = magnitude > 10.0f ? 10.0f : magnitude;  // 1 in fp32
  const float large = 1.0f - 2.0f / (exp2_of(capped * (2.0f * kLog2E)) + 1.0f);
  // Odd polynomial below 0.625, where the difference above would cancel.
  const float z = x * x;
  float p = z * -0.005704982206225395f + 0.02063908241689205f;
  p = p * z + -0.05373971536755562f;
  p = p * z + 0.13331441581249237f;
  p = p * z + -0.3333328068256378f;
  const float small = x + x * z * p;
  const float y = magnitude < 0.625f ? small : (x < 0.0f ? -large : large);
  return x != x ? x : y;
}

}  // namespace pat
