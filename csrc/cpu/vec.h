// SPDX-License-Identifier: Apache-2.0
// Vectors of the instruction set that forward_isa.cpp is being compiled for (GCC vector
// extensions), conversions of bf16 and fp16, exp2 and tanh. Only forward_isa.cpp includes this.
#pragma once

#include <cstdint>

#include "state.h"

namespace pat::PAT_ISA {
namespace {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif

template <int N>
struct Lanes {
  typedef float F __attribute__((vector_size(N * sizeof(float))));
  typedef int32_t I __attribute__((vector_size(N * sizeof(float))));
  typedef uint32_t U __attribute__((vector_size(N * sizeof(float))));
  typedef uint16_t H __attribute__((vector_size(N * sizeof(uint16_t))));
  typedef uint8_t B __attribute__((vector_size(N)));
};
template <int N>
using Vec = typename Lanes<N>::F;

struct BF16 {
  uint16_t bits;
};
struct F16 {
  uint16_t bits;
};
struct E4M3 {  // float8_e4m3fn: no infinity, 0x7f and 0xff are NaN
  uint8_t bits;
};

template <typename To, typename From>
[[gnu::always_inline]] inline To bit_cast(const From& from) {
  static_assert(sizeof(To) == sizeof(From));
  To to;
  __builtin_memcpy(&to, &from, sizeof to);
  return to;
}

template <int N>
[[gnu::always_inline]] inline Vec<N> load(const float* from) {
  Vec<N> v;
  __builtin_memcpy(&v, from, sizeof v);
  return v;
}

template <int N>
[[gnu::always_inline]] inline typename Lanes<N>::U load_bits(const void* from) {
  typename Lanes<N>::H halves;
  __builtin_memcpy(&halves, from, sizeof halves);
  return __builtin_convertvector(halves, typename Lanes<N>::U);
}

template <int N>
[[gnu::always_inline]] inline Vec<N> load(const BF16* from) {
  return bit_cast<Vec<N>>(load_bits<N>(from) << 16);
}

template <int N>
[[gnu::always_inline]] inline Vec<N> load(const F16* from) {
  using U = typename Lanes<N>::U;
  const U bits = load_bits<N>(from);
  const U magnitude = (bits & 0x7fff) << 13;
  // The exponent biases differ by 112; the product is exact and turns subnormals into normals.
  const U finite = bit_cast<U>(bit_cast<Vec<N>>(magnitude) * 0x1p112f);
  const U special = magnitude | 0x7f800000u;  // infinity or NaN
  return bit_cast<Vec<N>>(((bits & 0x7c00) == 0x7c00 ? special : finite) | (bits & 0x8000) << 16);
}

// Exact. No fp32 subnormal occurs on the way, so that a thread that flushes them reads the same.
template <int N>
[[gnu::always_inline]] inline Vec<N> load(const E4M3* from) {
  using U = typename Lanes<N>::U;
  typename Lanes<N>::B bytes;
  __builtin_memcpy(&bytes, from, sizeof bytes);
  const U bits = __builtin_convertvector(bytes, U);
  const U magnitude = (bits & 0x7f) << 20;
  // The exponent biases differ by 120. A subnormal is read as the normal number of the least
  // exponent that has its mantissa, and 2^-6, the implicit bit, is taken off again.
  const U implicit = (magnitude < 1u << 23 ? U{} + 1u : U{}) << 23;
  const Vec<N> normal = bit_cast<Vec<N>>(magnitude + implicit + (120u << 23));
  const Vec<N> taken_off = implicit != 0 ? Vec<N>{} + 0x1p-6f : Vec<N>{};
  const U finite = bit_cast<U>(normal - taken_off);
  return bit_cast<Vec<N>>(((bits & 0x7f) == 0x7f ? U{} + 0x7fc00000u : finite) | (bits & 0x80)
                                                                                     << 24);
}

template <int N>
[[gnu::always_inline]] inline void store(float* to, Vec<N> v) {
  __builtin_memcpy(to, &v, sizeof v);
}

[[gnu::always_inline]] inline float to_float(float x) { return x; }
[[gnu::always_inline]] inline float to_float(BF16 x) {
  return bit_cast<float>(static_cast<uint32_t>(x.bits) << 16);
}
[[gnu::always_inline]] inline float to_float(F16 x) {
  const uint32_t magnitude = (x.bits & 0x7fffu) << 13;
  const uint32_t value = (x.bits & 0x7c00u) == 0x7c00u
                             ? magnitude | 0x7f800000u
                             : bit_cast<uint32_t>(bit_cast<float>(magnitude) * 0x1p112f);
  return bit_cast<float>(value | (x.bits & 0x8000u) << 16);
}

// Rounds to nearest, ties to even, as torch does.
[[gnu::always_inline]] inline void assign(float* to, float x) { *to = x; }
[[gnu::always_inline]] inline void assign(BF16* to, float x) {
  const uint32_t bits = bit_cast<uint32_t>(x);
  const uint32_t rounded = (bits + 0x7fffu + (bits >> 16 & 1u)) >> 16;
  to->bits = static_cast<uint16_t>(x != x ? bits >> 16 | 0x40u : rounded);
}
[[gnu::always_inline]] inline void assign(F16* to, float x) {
  const uint32_t bits = bit_cast<uint32_t>(x);
  const uint32_t magnitude = bits & 0x7fffffffu;
  const uint32_t normal = (magnitude - (112u << 23) + 0xfffu + (magnitude >> 13 & 1u)) >> 13;
  // Below 2^-14 the addition itself rounds at 2^-24, the least subnormal.
  const uint32_t subnormal = bit_cast<uint32_t>(bit_cast<float>(magnitude) + 0.5f) - 0x3f000000u;
  uint32_t half = magnitude < 0x38800000u ? subnormal : normal;
  half = magnitude >= 0x477ff000u ? 0x7c00u : half;  // rounds to 2^16 or more
  half = x != x ? 0x7e00u : half;
  to->bits = static_cast<uint16_t>(half | (bits >> 16 & 0x8000u));
}

template <int N>
[[gnu::always_inline]] inline Vec<N> max(Vec<N> a, Vec<N> b) {
  return a < b ? b : a;
}

// 2^x within 1e-7 relative for x <= 126; 0 below -125; NaN stays NaN.
template <int N>
[[gnu::always_inline]] inline Vec<N> exp2(Vec<N> x) {
  constexpr float kRound = 0x1.8p23f;  // adding it rounds to an integer, left in the low bits
  const Vec<N> clamped = x < -125.0f ? Vec<N>{} - 125.0f : x;
  const Vec<N> shifted = clamped + kRound;
  const Vec<N> f = clamped - (shifted - kRound);
  // 2^f on [-1/2, 1/2], minimax with 2^0 = 1 exact.
  Vec<N> p = f * 0.0001535336341476068f + 0.0013398875016719103f;
  p = p * f + 0.00961843691766262f;
  p = p * f + 0.055503323674201965f;
  p = p * f + 0.24022647738456726f;
  p = p * f + 0.6931471824645996f;
  p = p * f + 1.0f;
  using I = typename Lanes<N>::I;
  const Vec<N> y = bit_cast<Vec<N>>(bit_cast<I>(p) + (bit_cast<I>(shifted) << 23));
  const Vec<N> kept = x < -125.0f ? Vec<N>{} : y;
  return x != x ? x : kept;
}

// tanh(x) within 2e-7 relative.
template <int N>
[[gnu::always_inline]] inline Vec<N> tanh(Vec<N> x) {
  const Vec<N> magnitude = x < 0.0f ? -x : x;
  const Vec<N> capped = magnitude > 10.0f ? Vec<N>{} + 10.0f : magnitude;  // 1 in fp32
  const Vec<N> large = 1.0f - 2.0f / (exp2<N>(capped * (2.0f * kLog2E)) + 1.0f);
  // Odd polynomial below 0.625, where the difference above would cancel.
  const Vec<N> z = x * x;
  Vec<N> p = z * -0.005704982206225395f + 0.02063908241689205f;
  p = p * z + -0.05373971536755562f;
  p = p * z + 0.13331441581249237f;
  p = p * z + -0.3333328068256378f;
  const Vec<N> small = x + x * z * p;
  const Vec<N> y = magnitude < 0.625f ? small : (x < 0.0f ? -large : large);
  return x != x ? x : y;
}

}  // namespace
}  // namespace pat::PAT_ISA
