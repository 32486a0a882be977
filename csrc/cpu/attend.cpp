// SPDX-License-Identifier: Apache-2.0
// Attention row by row, in loops over contiguous floats that the compiler vectorises. run_item()
// and merge_query() are compiled for several instruction sets, with all that they call inlined; the
// loader picks the machine's.
#include <algorithm>
#include <bit>

#include "cpu/forward.h"

#ifdef __x86_64__
#define PAT_FOR_EACH_ISA \
  [[gnu::flatten, gnu::target_clones("default", "arch=x86-64-v3", "arch=x86-64-v4")]]
#else
#define PAT_FOR_EACH_ISA [[gnu::flatten]]
#endif

namespace pat {
namespace {

// Tokens whose K and V a thread holds as fp32: with head dims of 128 they fit a cache of 48 KB.
constexpr int kBlockTokens = 32;
constexpr float kNone = -INFINITY;

// bf16, fp16 and fp8 to fp32 and back, exp2 and tanh: branch-free, so that the compiler vectorises
// loops over them.
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

// Calls run() with a number of a type.
template <typename Run>
inline auto with_type(DType type, const Run& run) {
  switch (type) {
    case DType::kBF16:
      return run(BF16{});
    case DType::kF16:
      return run(F16{});
    default:
      return run(float{});
  }
}

// K and V of a block of tokens.
struct Block {
  int count;
  const float* k[kBlockTokens];
  const float* v[kBlockTokens];
};

// q . k of each token. Four at a time, so that q is loaded once for four and their sums overlap.
inline void score(const float* q, const Block& block, int dim, float* scores) {
  int t = 0;
  for (; t + 4 <= block.count; t += 4) {
    const float *a = block.k[t], *b = block.k[t + 1], *c = block.k[t + 2], *d = block.k[t + 3];
    float sum_a = 0, sum_b = 0, sum_c = 0, sum_d = 0;
#pragma omp simd reduction(+ : sum_a, sum_b, sum_c, sum_d)
    for (int j = 0; j < dim; ++j) {
      sum_a += q[j] * a[j];
      sum_b += q[j] * b[j];
      sum_c += q[j] * c[j];
      sum_d += q[j] * d[j];
    }
    scores[t] = sum_a, scores[t + 1] = sum_b, scores[t + 2] = sum_c, scores[t + 3] = sum_d;
  }
  for (; t < block.count; ++t) {
    const float* k = block.k[t];
    float sum = 0;
#pragma omp simd reduction(+ : sum)
    for (int j = 0; j < dim; ++j) sum += q[j] * k[j];
    scores[t] = sum;
  }
}

// Turns scores into weights relative to the row's new maximum, updates its state and returns the
// factor of its output so far.
inline float weigh(float (&scores)[kBlockTokens], SoftmaxState& state) {
  constexpr int kLanes = 8;
  float highest[kLanes];
  for (int i = 0; i < kLanes; ++i) highest[i] = scores[i];
  for (int t = kLanes; t < kBlockTokens; t += kLanes) {
    for (int i = 0; i < kLanes; ++i) {
      highest[i] = highest[i] < scores[t + i] ? scores[t + i] : highest[i];
    }
  }
  float max = state.max;
  for (int i = 0; i < kLanes; ++i) max = max < highest[i] ? highest[i] : max;
  const float reference = max == kNone ? 0.0f : max;
  float sum = 0;
#pragma omp simd reduction(+ : sum)
  for (int t = 0; t < kBlockTokens; ++t) {
    scores[t] = exp2_of(scores[t] - reference);
    sum += scores[t];
  }
  const float factor = rescale(state.max, max);
  state = {max, state.sum * factor + sum};
  return factor;
}

// o = o * factor + V * weights. The block has sums of its own, for accuracy.
inline void add_values(const Block& block, const float* weights, float factor, int dim, float* sums,
                       float* o) {
  std::fill_n(sums, dim, 0.0f);
  int t = 0;
  for (; t + 4 <= block.count; t += 4) {
    const float *a = block.v[t], *b = block.v[t + 1], *c = block.v[t + 2], *d = block.v[t + 3];
    const float p = weights[t], q = weights[t + 1], r = weights[t + 2], s = weights[t + 3];
#pragma omp simd
    for (int j = 0; j < dim; ++j) sums[j] += p * a[j] + q * b[j] + (r * c[j] + s * d[j]);
  }
  for (; t < block.count; ++t) {
    const float* v = block.v[t];
    const float p = weights[t];
#pragma omp simd
    for (int j = 0; j < dim; ++j) sums[j] += p * v[j];
  }
#pragma omp simd
  for (int j = 0; j < dim; ++j) o[j] = o[j] * factor + sums[j];
}

// T: of q and out. KV: of the cache, which k_scale and v_scale multiply.
template <typename T, typename KV>
class ItemRunner {
 public:
  ItemRunner(const DecodeJob& job, int index, int kv_head, float* scratch)
      : job_(job),
        args_(job.args),
        item_(job.plan.items[index]),
        members_(job.plan.members + item_.member_offset),
        first_head_(kv_head * job.head_group),
        num_rows_(item_.num_queries * job.group),
        k_(static_cast<const KV*>(args_.k_cache.data) + kv_head * args_.k_cache.stride_head),
        v_(static_cast<const KV*>(args_.v_cache.data) + kv_head * args_.v_cache.stride_head),
        v_in_k_(k_ == v_ && args_.k_cache.stride_row == args_.v_cache.stride_row &&
                args_.v_head_dim <= args_.head_dim),
        converted_(scratch),
        sums_(converted_ + kBlockTokens * (args_.head_dim + args_.v_head_dim)),
        q_(sums_ + args_.v_head_dim),
        o_(q_ + int64_t{num_rows_} * args_.head_dim),
        states_(reinterpret_cast<SoftmaxState*>(o_ + int64_t{num_rows_} * args_.v_head_dim)) {}

  bool run(const ItemSegments& segments) {
    for (int r = 0; r < num_rows_; ++r) begin(r);
    for (int i = 0; i < segments.num_segments; ++i) {
      if (!attend_segment(job_.plan.segments[segments.first_segment + i])) return false;
    }
    for (int r = 0; r < num_rows_; ++r) write(r);
    return true;
  }

 private:
  // Packed rows lie by member, draft token, head.
  const Member& member(int row) const { return members_[row / job_.group]; }
  int draft_token(int row) const { return row % job_.group / job_.head_group; }
  int head(int row) const { return first_head_ + row % job_.head_group; }
  // Of q, out and lse.
  int64_t tensor_row(int row) const {
    return int64_t{member(row).query} * args_.draft_tokens + draft_token(row);
  }
  float* q(int row) const { return q_ + int64_t{row} * args_.head_dim; }
  float* o(int row) const { return o_ + int64_t{row} * args_.v_head_dim; }

  // Reads q, so scaled that scores are base-2 logits, or logits over the cap, and has no output
  // yet.
  void begin(int row) {
    const float logit =
        args_.logit_cap == 0.0f ? args_.scale * kLog2E : args_.scale / args_.logit_cap;
    const float scale = args_.k_scale * logit;
    const int dim = args_.q_rope.data ? args_.v_head_dim : args_.head_dim;
    const T* from = static_cast<const T*>(args_.q.data) + tensor_row(row) * args_.q.stride_row +
                    head(row) * args_.q.stride_head;
    scaled(from, scale, dim, q(row));
    if (args_.q_rope.data) {
      from = static_cast<const T*>(args_.q_rope.data) + tensor_row(row) * args_.q_rope.stride_row +
             head(row) * args_.q_rope.stride_head;
      scaled(from, scale, args_.head_dim - dim, q(row) + dim);
    }
    std::fill_n(o(row), args_.v_head_dim, 0.0f);
    states_[row] = empty_state();
  }

  static void scaled(const T* from, float scale, int dim, float* to) {
#pragma omp simd
    for (int j = 0; j < dim; ++j) to[j] = to_float(from[j]) * scale;
  }

  bool attend_segment(const Segment& s) {
    const int32_t* slots =
        args_.req_to_token + args_.rows[s.query] * args_.table_stride + s.kv_start;
    const int64_t tokens = is_dynamic(s) ? args_.seq_lens[s.query] - s.kv_start : s.kv_len;
    // From here on only some of the query's draft tokens attend.
    const int64_t first_masked = tokens - (is_dynamic(s) ? args_.draft_tokens - 1 : 0);
    const int begin = s.first_member * job_.group, end = begin + s.num_queries * job_.group;
    Block block;
    for (int64_t first = 0; first < tokens; first += kBlockTokens) {
      block.count = static_cast<int>(std::min<int64_t>(tokens - first, kBlockTokens));
      if (!read(slots + first, block)) return false;
      for (int r = begin; r < end; ++r) attend(r, block, first - first_masked);
    }
    return true;
  }

  // Finds the rows of a block of slots and converts them; false if a slot lies outside the pool.
  bool read(const int32_t* slots, Block& block) const {
    bool inside = true;
    for (int t = 0; t < block.count; ++t) inside &= slots[t] >= 0 && slots[t] < args_.num_slots;
    if (!inside) return false;
    float* to = converted_;
    for (int t = 0; t < block.count; ++t) {
      block.k[t] = widen(k_ + slots[t] * args_.k_cache.stride_row, args_.head_dim, to);
      block.v[t] = v_in_k_ ? block.k[t]
                           : widen(v_ + slots[t] * args_.v_cache.stride_row, args_.v_head_dim, to);
    }
    return true;
  }

  // A row as fp32, which itself stays where it is.
  static const float* widen(const KV* from, int dim, float*& to) {
    if constexpr (sizeof(KV) == sizeof(float)) {
      return from;
    } else {
      float* const row = to;
#pragma omp simd
      for (int j = 0; j < dim; ++j) row[j] = to_float(from[j]);
      to += dim;
      return row;
    }
  }

  // `past`: the first token of the block, counted from the segment's first masked one.
  void attend(int row, const Block& block, int64_t past) {
    float scores[kBlockTokens];
    std::fill_n(scores, kBlockTokens, kNone);
    score(q(row), block, args_.head_dim, scores);
    if (args_.logit_cap != 0.0f) {
      const float cap = args_.logit_cap * kLog2E;
#pragma omp simd
      for (int t = 0; t < kBlockTokens; ++t) scores[t] = cap * tanh_of(scores[t]);
      std::fill(scores + block.count, scores + kBlockTokens, kNone);
    }
    for (int64_t t = std::max<int64_t>(-past, 0); t < block.count; ++t) {
      if (!attends(row, static_cast<int>(past + t) + 1)) scores[t] = kNone;
    }
    const float factor = weigh(scores, states_[row]);
    add_values(block, scores, factor, args_.v_head_dim, sums_, o(row));
  }

  // Whether a row's draft token attends to draft token `to` of its query.
  bool attends(int row, int to) const {
    const int from = draft_token(row);
    if (!args_.draft_masks) return to <= from;
    return args_.draft_masks[int64_t{member(row).query} * args_.draft_tokens + from] >> to & 1;
  }

  // Writes a row's output, normalised, and its log-sum-exp to the query's output or partial slot.
  void write(int row) const {
    const auto [query, partial] = member(row);
    const SoftmaxState state = states_[row];
    if (partial == kDirect) {
      const SoftmaxState total = complete(args_, head(row), state);
      const float factor = args_.sinks ? share(state.max, total) : normalizer(state);
      const int64_t to = tensor_row(row);
      write_row(row, factor,
                static_cast<T*>(args_.out.data) + to * args_.out.stride_row +
                    head(row) * args_.out.stride_head);
      if (args_.lse) args_.lse[to * args_.num_q_heads + head(row)] = lse(total);
      return;
    }
    const int64_t partial_row = int64_t{partial} * args_.draft_tokens + draft_token(row);
    const int64_t at = partial_row * args_.num_q_heads + head(row);
    job_.partial_lse[at] = lse(state);
    with_type(args_.partial_dtype, [&](auto type) {
      auto* to = static_cast<decltype(type)*>(job_.partials) + at * args_.v_head_dim;
      write_row(row, normalizer(state), to);
    });
  }

  template <typename Out>
  void write_row(int row, float factor, Out* out) const {
    const float scale = factor * args_.v_scale;
    const float* from = o(row);
    for (int j = 0; j < args_.v_head_dim; ++j) assign(out[j], from[j] * scale);
  }

  const DecodeJob& job_;
  const DecodeArgs& args_;
  const Item& item_;
  const Member* const members_;
  const int first_head_, num_rows_;
  const KV* const k_;
  const KV* const v_;
  const bool v_in_k_;       // the first numbers of K
  float* const converted_;  // [kBlockTokens] rows of K and V
  float* const sums_;       // [v_head_dim]
  float* const q_;          // [num_rows, head_dim]
  float* const o_;          // [num_rows, v_head_dim]
  SoftmaxState* const states_;
};

template <typename T>
bool run_item_of(const DecodeJob& job, int item, int kv_head, float* scratch) {
  const ItemSegments& segments = job.plan.item_segments[item];
  if (job.args.kv_dtype == KVDType::kE4M3) {
    return ItemRunner<T, E4M3>(job, item, kv_head, scratch).run(segments);
  }
  return ItemRunner<T, T>(job, item, kv_head, scratch).run(segments);
}

template <typename T>
void merge_to(const DecodeJob& job, int query, int draft_token, int head, float* sum) {
  const DecodeArgs& args = job.args;
  const QuerySplits splits = job.plan.queries[query];
  const int64_t slot = int64_t{args.draft_tokens} * args.num_q_heads;
  const int64_t first =
      splits.partial_offset * slot + int64_t{draft_token} * args.num_q_heads + head;
  SoftmaxState total = empty_state();
  for (int i = 0; i < splits.num_splits; ++i) {
    total = join(total, stored_state(job.partial_lse[first + i * slot]));
  }
  total = complete(args, head, total);
  std::fill_n(sum, args.v_head_dim, 0.0f);
  for (int i = 0; i < splits.num_splits; ++i) {
    const int64_t at = first + i * slot;
    const float weight = share(job.partial_lse[at], total);
    if (weight == 0.0f) continue;
    with_type(args.partial_dtype, [&](auto type) {
      const auto* from = static_cast<const decltype(type)*>(job.partials) + at * args.v_head_dim;
#pragma omp simd
      for (int j = 0; j < args.v_head_dim; ++j) sum[j] += weight * to_float(from[j]);
    });
  }
  const int64_t row = int64_t{query} * args.draft_tokens + draft_token;
  T* out = static_cast<T*>(args.out.data) + row * args.out.stride_row + head * args.out.stride_head;
  for (int j = 0; j < args.v_head_dim; ++j) assign(out[j], sum[j]);
  if (args.lse) args.lse[row * args.num_q_heads + head] = lse(total);
}

}  // namespace

int64_t scratch_floats(const DecodeArgs& args, int64_t rows) {
  const int64_t dims = args.head_dim + args.v_head_dim;
  return kBlockTokens * dims + args.v_head_dim + rows * (dims + 2);
}

SoftmaxState complete(const DecodeArgs& args, int head, SoftmaxState tokens) {
  if (!args.sinks) return tokens;
  return with_type(args.sink_dtype, [&](auto type) {
    return with_sink(tokens, to_float(static_cast<const decltype(type)*>(args.sinks)[head]));
  });
}

PAT_FOR_EACH_ISA bool run_item(const DecodeJob& job, int item, int kv_head, float* scratch) {
  return with_type(job.args.dtype, [&](auto type) {
    return run_item_of<decltype(type)>(job, item, kv_head, scratch);
  });
}

PAT_FOR_EACH_ISA void merge_query(const DecodeJob& job, int query, int kv_head, float* scratch) {
  for (int row = 0; row < job.group; ++row) {
    const int head = kv_head * job.head_group + row % job.head_group;
    with_type(job.args.dtype, [&](auto type) {
      merge_to<decltype(type)>(job, query, row / job.head_group, head, scratch);
    });
  }
}

}  // namespace pat
