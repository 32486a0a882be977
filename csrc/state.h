// SPDX-License-Identifier: Apache-2.0
// The algebra of online softmax: how partial attention results over disjoint tokens combine (PAT
// section 7, the merge). Written once for the CPU executor and the CUDA kernels.
//
// Logits, maxima and log-sum-exps are base 2: a logit is scale * (q . k) * log2(e), so that a
// weight is one exp2. A result over some tokens is a pair (output o, state), or in memory (o, lse)
// with o normalised. No tokens at all is the empty state, o = 0 and lse = -inf; it is neutral:
// joining it changes nothing, and no step makes a NaN of it.
#pragma once

#include <math.h>

#ifdef __CUDACC__
#define PAT_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define PAT_HOST_DEVICE inline __attribute__((always_inline))
#endif

namespace pat {

inline constexpr float kLog2E = 1.44269504088896340736f;

// On a GPU one to six instructions each, good to 22 bits, where the library's take up to 25:
// fetching code that is in no cache takes longer than running it (docs/lessons.md). A sum
// is 0 or about 1 and more, so subnormal numbers do not matter.
#ifdef __CUDA_ARCH__
PAT_HOST_DEVICE float fast_exp2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}
PAT_HOST_DEVICE float fast_log2(float x) { return __log2f(x); }
PAT_HOST_DEVICE float fast_inverse(float x) { return __fdividef(1.0f, x); }
#else
PAT_HOST_DEVICE float fast_exp2(float x) { return exp2f(x); }
PAT_HOST_DEVICE float fast_log2(float x) { return log2f(x); }
PAT_HOST_DEVICE float fast_inverse(float x) { return 1.0f / x; }
#endif

// Sum of 2^(logit - max) over the tokens seen. `max`: their greatest logit, or a reference near it
// (lazy_softmax.cuh, ScaledScores); -inf where no token was seen.
struct SoftmaxState {
  float max;
  float sum;
};

PAT_HOST_DEVICE SoftmaxState empty_state() { return {-INFINITY, 0.0f}; }

// The state of a stored partial result.
PAT_HOST_DEVICE SoftmaxState stored_state(float lse) {
  return {lse, lse == -INFINITY ? 0.0f : 1.0f};
}

// Factor that brings sums and outputs relative to `max` to those relative to `new_max` >= max.
PAT_HOST_DEVICE float rescale(float max, float new_max) {
  return max == -INFINITY ? 0.0f : fast_exp2(max - new_max);
}

PAT_HOST_DEVICE SoftmaxState join(SoftmaxState a, SoftmaxState b) {
  const float max = a.max < b.max ? b.max : a.max;
  return {max, a.sum * rescale(a.max, max) + b.sum * rescale(b.max, max)};
}

// With an attention sink, a logit (base e) that counts in the softmax of its query head beside the
// tokens and has no value: one state more, of output 0. It belongs to the softmax over all tokens,
// so it is joined once, where the output is written, and never to a partial result. -inf: no sink.
PAT_HOST_DEVICE SoftmaxState with_sink(SoftmaxState tokens, float sink) {
  return join(tokens, {sink * kLog2E, 1.0f});
}

// log2 of the sum of 2^logit.
PAT_HOST_DEVICE float lse(SoftmaxState state) {
  return state.sum == 0.0f ? -INFINITY : state.max + fast_log2(state.sum);
}

// What an output accumulated relative to state.max is multiplied with in the end.
PAT_HOST_DEVICE float normalizer(SoftmaxState state) {
  return state.sum == 0.0f ? 0.0f : fast_inverse(state.sum);
}

// Factor in the join `total` of an output of one of its parts: of a stored one, relative to its
// LSE, or one that accumulated relative to its maximum. Of stored ones without a sink the factors
// sum to 1.
PAT_HOST_DEVICE float share(float reference, SoftmaxState total) {
  return rescale(reference, total.max) * normalizer(total);
}

}  // namespace pat
