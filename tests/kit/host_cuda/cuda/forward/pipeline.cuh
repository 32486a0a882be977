// SPDX-License-Identifier: Apache-2.0
// Stands in for csrc/cuda/forward/pipeline.cuh where g++ compiles softmax.cuh: a thread of the host
// is a lane, and four of them, which hold the same rows, exchange values at a barrier.
#pragma once

#include <algorithm>
#include <barrier>
#include <climits>
#include <cmath>
#include <cstdint>

#include "plan.h"
#include "state.h"

#define __device__
#define __forceinline__ inline

namespace pat {

using std::max;
using std::min;

constexpr int kTileTokens = 64;
constexpr int kRowCountShift = 8;
enum Drafts : int { kNoDrafts = 0, kChains = 1, kTrees = 2 };
enum Logits : int { kPlain = 0, kScaled = 1, kCapped = 2 };
struct ForwardParams {
  float exp_scale = 0.0f, pre_scale = 0.0f, cap = 0.0f;
  int logits = 0, masked_tokens = 0, head_group = 0;
  uint32_t head_group_magic = 0;
  const uint64_t* draft_masks = nullptr;
};
struct WorkUnit {
  int unmasked_tiles, num_tokens;
  ItemKind kind;
  BranchOrder order;

  bool is_branch() const { return kind == ItemKind::kBranch; }
  bool has_drafts() const { return kind == ItemKind::kDrafts; }
};

constexpr int kLanes = 4;
inline thread_local int this_lane = 0;
inline float exchanged[kLanes];
inline std::barrier<> quad(kLanes);

inline int lane_id() { return this_lane; }
inline float __shfl_xor_sync(unsigned, float value, int step) {
  exchanged[this_lane] = value;
  quad.arrive_and_wait();
  const float other = exchanged[this_lane ^ step];
  quad.arrive_and_wait();
  return other;
}
inline int __shfl_sync(unsigned, int value, int) { return value; }
inline float __fmul_rn(float a, float b) { return a * b; }
inline float __fdividef(float a, float b) { return a / b; }
inline uint64_t __ldg(const uint64_t* at) { return *at; }
inline uint32_t load_shared(uint32_t) { return 0; }

}  // namespace pat
