// SPDX-License-Identifier: Apache-2.0
// The kernels of the CPU executor: forward of one item for one KV head, merge of one query.
// Compiled once per instruction set, PAT_ISA being its name; see job.h and core.cmake.
// Everything here has internal linkage, and nothing of the standard library is called, so that no
// AVX code leaks into functions that other sources share.
#include "cpu/dim_lanes.h"
#include "cpu/job.h"
#include "cpu/row_lanes.h"

namespace pat::PAT_ISA {
namespace {

// The packed rows of an item and KV head: by member, draft token, head.
struct PackedRows {
  const DecodeJob& job;
  const Member* members;
  int first_head;
  int count;

  const Member& member(int row) const { return members[row / job.group]; }
  int draft_token(int row) const { return row % job.group / job.head_group; }
  int head(int row) const { return first_head + row % job.head_group; }
  // Of q, out and lse.
  int64_t tensor_row(int row) const {
    return static_cast<int64_t>(member(row).query) * job.args.draft_tokens + draft_token(row);
  }
};

// T: of q and out. KV: of the cache, which k_scale and v_scale multiply.
template <typename T, typename KV>
class ItemRunner {
 public:
  ItemRunner(const DecodeJob& job, int index, int kv_head, float* scratch)
      : job_(job),
        item_(job.items[index]),
        item_segments_(job.item_segments[index]),
        rows_{job, job.members + item_.member_offset, kv_head * job.head_group,
              item_.num_queries * job.group},
        shape_{job.args.head_dim, job.args.v_head_dim, job.args.logit_cap * kLog2E},
        q_scale_(job.args.k_scale * (job.args.logit_cap == 0.0f
                                         ? job.args.scale * kLog2E
                                         : job.args.scale / job.args.logit_cap)),
        k_(static_cast<const KV*>(job.args.k_cache) + kv_head * job.args.k_stride_head),
        v_(static_cast<const KV*>(job.args.v_cache) + kv_head * job.args.v_stride_head),
        converted_(scratch),
        scores_(converted_ + kBlockTokens * (job.args.head_dim + job.args.v_head_dim)),
        tiles_(scores_ + kBlockTokens * kMaxChunkRows) {}

  bool run() {
    const Segment& first = job_.segments[item_segments_.first_segment];
    if (is_branch(item_) || masked_tokens(first) > 0) return run_row_lanes();
    read_from(first);
    switch (rows_.count) {
      case 1:
        return run_dim_lanes<1>();
      case 2:
        return run_dim_lanes<2>();
      case 3:
      case 4:
        return run_dim_lanes<4>();
      default:
        return run_row_lanes();
    }
  }

 private:
  // Makes a segment's tokens the tokens at hand.
  void read_from(const Segment& s) {
    const DecodeArgs& args = job_.args;
    slots_ = args.req_to_token + args.rows[s.query] * args.table_stride + s.kv_start;
    tokens_ = is_dynamic(s) ? args.seq_lens[s.query] - s.kv_start : s.kv_len;
  }

  // Of a segment's last tokens, those that only some of the query's draft tokens attend to.
  int masked_tokens(const Segment& s) const {
    return is_dynamic(s) ? job_.args.draft_tokens - 1 : 0;
  }
  // Whether a draft token of a segment's query attends to another one.
  bool attends(const Segment& s, int draft_token, int to) const {
    if (!job_.args.draft_masks) return to <= draft_token;
    return job_.args.draft_masks[int64_t{s.query} * job_.args.draft_tokens + draft_token] >> to & 1;
  }

  // The addresses of a block of K and V rows; false if a slot lies outside the pool.
  bool find_rows(int64_t first, TokenRows<KV>& rows) const {
    const DecodeArgs& args = job_.args;
    const int64_t left = tokens_ - first;
    rows.count = static_cast<int>(left < kBlockTokens ? left : kBlockTokens);
    bool inside = true;
    for (int t = 0; t < rows.count; ++t) {
      const int64_t slot = slots_[first + t];
      inside &= slot >= 0 && slot < args.num_slots;
      rows.k[t] = k_ + slot * args.k_stride_slot;
      rows.v[t] = v_ + slot * args.v_stride_slot;
    }
    for (int t = rows.count; t % 8 != 0; ++t) rows.k[t] = rows.k[rows.count - 1];
    return inside;
  }

  // Calls visit(block, next block or null) for the item's blocks of tokens. Stops and returns false
  // before a block that names a slot outside the pool.
  template <typename Visit>
  [[gnu::always_inline]] bool for_each_block(const Visit& visit) const {
    if (tokens_ == 0) return true;
    TokenRows<KV> blocks[2];
    if (!find_rows(0, blocks[0])) return false;
    Prefetcher first_keys;
    first_keys.add(blocks[0].k, blocks[0].count, shape_.head_dim * sizeof(KV));
    first_keys.step(blocks[0].count);
    for (int64_t first = 0, i = 0; first < tokens_; first += kBlockTokens, ++i) {
      const bool last = first + kBlockTokens >= tokens_;
      if (!last && !find_rows(first + kBlockTokens, blocks[(i + 1) % 2])) return false;
      visit(blocks[i % 2], last ? nullptr : &blocks[(i + 1) % 2]);
    }
    return true;
  }

  // What to prefetch during the work on a block: its V rows, unless they were copied before, and
  // the rows that the next block begins with.
  Prefetcher fetch_during(const TokenRows<KV>& block, const TokenRows<KV>* next,
                          bool copied) const {
    Prefetcher ahead;
    const int k_bytes = shape_.head_dim * sizeof(KV), v_bytes = shape_.v_head_dim * sizeof(KV);
    if (!copied) ahead.add(block.v, block.count, v_bytes);
    if (next) ahead.add(next->k, next->count, k_bytes);
    if (next && copied) ahead.add(next->v, next->count, v_bytes);
    return ahead;
  }

  // Copies a block to fp32; fp32 itself stays where it is.
  const TokenRows<float>& as_floats(const TokenRows<KV>& from, TokenRows<float>& to) const {
    if constexpr (sizeof(KV) == sizeof(float)) {
      return from;
    } else {
      float* at = converted_;
      to.count = from.count;
      for (int t = 0; t < from.count; ++t) {
        to.k[t] = copy_row(from.key(t), shape_.head_dim, at);
        to.v[t] = copy_row(from.value(t), shape_.v_head_dim, at);
      }
      for (int t = from.count; t % 8 != 0; ++t) to.k[t] = to.k[from.count - 1];
      return to;
    }
  }

  static const float* copy_row(const KV* from, int dim, float*& at) {
    constexpr int kWidth = kLanes < 8 ? kLanes : 8;
    float* const row = at;
    for (int j = 0; j < dim; j += kWidth) store<kWidth>(row + j, load<kWidth>(from + j));
    at += dim;
    return row;
  }

  void read_q(int row, float* to, int stride) const {
    const DecodeArgs& args = job_.args;
    const T* q = static_cast<const T*>(args.q) + rows_.tensor_row(row) * args.q_stride_row +
                 rows_.head(row) * args.q_stride_head;
    for (int j = 0; j < shape_.head_dim; ++j) to[j * stride] = to_float(q[j]) * q_scale_;
  }

  template <int Rows>
  bool run_dim_lanes() {
    DimLanesTile<Rows, KV> tile(shape_, tiles_, scores_);
    for (int64_t i = 0; i < tile.size(shape_); ++i) tiles_[i] = 0.0f;
    for (int r = 0; r < rows_.count; ++r) read_q(r, tile.q(r), 1);
    const bool done = for_each_block([&](const TokenRows<KV>& block, const TokenRows<KV>* next) {
      Prefetcher ahead = fetch_during(block, next, false);
      tile.attend(block, ahead);
    });
    if (!done) return false;
    for (int r = 0; r < rows_.count; ++r) write(r, tile.o(r), 1, tile.state(r));
    return true;
  }

  // Calls visit(tile, first row, number of rows) for the tiles that the rows are cut into.
  template <typename Visit>
  [[gnu::always_inline]] void for_each_tile(const Visit& visit) const {
    constexpr int kFewest = kLanes < 16 ? kLanes : 8;  // rows of the smallest tile
    float* memory = tiles_;
    for (int row = 0; row < rows_.count;) {
      const int left = rows_.count - row;
      if (left > kLanes * 3 / 2) {
        row += visit_tile<kLanes, 2>(visit, row, left, memory);
      } else if (kLanes < 16 || left > kLanes / 2) {
        row += visit_tile<kLanes, 1>(visit, row, left, memory);
      } else {
        row += visit_tile<kFewest, 1>(visit, row, left, memory);
      }
    }
  }

  template <int L, int Vectors, typename Visit>
  [[gnu::always_inline]] int visit_tile(const Visit& visit, int row, int left,
                                        float*& memory) const {
    RowLanesTile<L, Vectors> tile(shape_, memory);
    const int count = left < tile.kRows ? left : tile.kRows;
    visit(tile, row, count);
    memory += tile.size(shape_);
    return count;
  }

  // Packed rows [begin, end) attend to the tokens at hand.
  bool attend_rows(int begin, int end) {
    TokenRows<float> converted;
    return for_each_block([&](const TokenRows<KV>& block, const TokenRows<KV>* next) {
      Prefetcher ahead = fetch_during(block, next, sizeof(KV) != sizeof(float));
      const TokenRows<float>& rows = as_floats(block, converted);
      for_each_tile([&](auto& tile, int row, int count) {
        if (row < end && row + count > begin) {
          tile.attend(rows, scores_, ahead, begin - row, end - row);
        }
      });
    });
  }

  // Packed rows [begin, end) attend to a segment, to its masked tokens as their draft tokens do.
  bool attend_segment(const Segment& s, int begin, int end) {
    const int masked = masked_tokens(s);
    read_from(s);
    tokens_ -= masked;
    if (!attend_rows(begin, end)) return false;
    for (int to = 1; to <= masked; ++to) {
      slots_ += tokens_;
      tokens_ = 1;
      for (int from = 0, next; from <= masked; from = next) {  // runs of draft tokens that attend
        next = from + 1;
        if (!attends(s, from, to)) continue;
        while (next <= masked && attends(s, next, to)) ++next;
        const int first = begin + from * job_.head_group;
        if (!attend_rows(first, begin + next * job_.head_group)) return false;
      }
    }
    return true;
  }

  bool run_row_lanes() {
    for_each_tile([this](auto& tile, int row, int count) {
      tile.clear();
      for (int r = 0; r < count; ++r) read_q(row + r, tile.q(r), tile.kRows);
    });
    for (int i = 0; i < item_segments_.num_segments; ++i) {
      const Segment& s = job_.segments[item_segments_.first_segment + i];
      const int begin = s.first_member * job_.group;
      if (!attend_segment(s, begin, begin + s.num_queries * job_.group)) return false;
    }
    for_each_tile([this](auto& tile, int row, int count) {
      for (int r = 0; r < count; ++r) write(row + r, tile.o(r), tile.kRows, tile.state(r));
    });
    return true;
  }

  // Writes a row's output, normalised, and its log-sum-exp to the query's output or partial slot.
  void write(int row, const float* o, int stride, SoftmaxState state) const {
    const DecodeArgs& args = job_.args;
    const Member& member = rows_.member(row);
    const int head = rows_.head(row);
    const float factor = normalizer(state) * args.v_scale;
    if (member.partial == kDirect) {
      const int64_t to = rows_.tensor_row(row);
      write_row(o, stride, factor,
                static_cast<T*>(args.out) + to * args.out_stride_row + head * args.out_stride_head);
      if (args.lse) args.lse[to * args.num_q_heads + head] = lse(state);
      return;
    }
    const int64_t partial_row =
        static_cast<int64_t>(member.partial) * args.draft_tokens + rows_.draft_token(row);
    const int64_t at = partial_row * args.num_q_heads + head;
    job_.partial_lse[at] = lse(state);
    if (args.partial_dtype == DType::kF32) {
      write_row(o, stride, factor, static_cast<float*>(job_.partials) + at * args.v_head_dim);
    } else {
      write_row(o, stride, factor, static_cast<BF16*>(job_.partials) + at * args.v_head_dim);
    }
  }

  template <typename Out>
  void write_row(const float* o, int stride, float factor, Out* out) const {
    for (int j = 0; j < shape_.v_head_dim; ++j) assign(out + j, o[j * stride] * factor);
  }

  const DecodeJob& job_;
  const Item& item_;
  const ItemSegments item_segments_;
  const PackedRows rows_;
  const Shape shape_;
  const float q_scale_;
  const KV* const k_;
  const KV* const v_;
  const int32_t* slots_ = nullptr;
  int64_t tokens_ = 0;
  float* const converted_;
  float* const scores_;
  float* const tiles_;
};

template <typename T>
bool run_item_of(const DecodeJob& job, int item, int kv_head, float* scratch) {
  if (job.args.kv_dtype == KVDType::kE4M3) {
    return ItemRunner<T, E4M3>(job, item, kv_head, scratch).run();
  }
  return ItemRunner<T, T>(job, item, kv_head, scratch).run();
}

bool run_item(const DecodeJob& job, int item, int kv_head, float* scratch) {
  switch (job.args.dtype) {
    case DType::kBF16:
      return run_item_of<BF16>(job, item, kv_head, scratch);
    case DType::kF16:
      return run_item_of<F16>(job, item, kv_head, scratch);
    default:
      return run_item_of<float>(job, item, kv_head, scratch);
  }
}

// sum[0:dim] += weight * from[0:dim]
template <typename T>
void add_row(const T* from, float weight, int dim, float* sum) {
  constexpr int kWidth = kLanes < 8 ? kLanes : 8;
  for (int j = 0; j < dim; j += kWidth) {
    store<kWidth>(sum + j, load<kWidth>(sum + j) + weight * load<kWidth>(from + j));
  }
}

template <typename T>
void merge_to(const DecodeJob& job, int query, int draft_token, int head, float* sum, T* out) {
  const DecodeArgs& args = job.args;
  const QuerySplits splits = job.queries[query];
  const int64_t slot = static_cast<int64_t>(args.draft_tokens) * args.num_q_heads;
  const int64_t first =
      splits.partial_offset * slot + static_cast<int64_t>(draft_token) * args.num_q_heads + head;
  SoftmaxState total = empty_state();
  for (int i = 0; i < splits.num_splits; ++i) {
    total = join(total, stored_state(job.partial_lse[first + i * slot]));
  }
  for (int j = 0; j < args.v_head_dim; ++j) sum[j] = 0.0f;
  for (int i = 0; i < splits.num_splits; ++i) {
    const int64_t at = first + i * slot;
    const float weight = share(job.partial_lse[at], total);
    if (weight == 0.0f) continue;
    const int64_t element = at * args.v_head_dim;
    if (args.partial_dtype == DType::kF32) {
      add_row(static_cast<const float*>(job.partials) + element, weight, args.v_head_dim, sum);
    } else {
      add_row(static_cast<const BF16*>(job.partials) + element, weight, args.v_head_dim, sum);
    }
  }
  const int64_t row = static_cast<int64_t>(query) * args.draft_tokens + draft_token;
  out += row * args.out_stride_row + head * args.out_stride_head;
  for (int j = 0; j < args.v_head_dim; ++j) assign(out + j, sum[j]);
  if (args.lse) args.lse[row * args.num_q_heads + head] = lse(total);
}

void merge(const DecodeJob& job, int query, int kv_head, float* scratch) {
  for (int row = 0; row < job.group; ++row) {
    const int draft_token = row / job.head_group;
    const int head = kv_head * job.head_group + row % job.head_group;
    switch (job.args.dtype) {
      case DType::kBF16:
        merge_to(job, query, draft_token, head, scratch, static_cast<BF16*>(job.args.out));
        break;
      case DType::kF16:
        merge_to(job, query, draft_token, head, scratch, static_cast<F16*>(job.args.out));
        break;
      default:
        merge_to(job, query, draft_token, head, scratch, static_cast<float*>(job.args.out));
    }
  }
}

}  // namespace

extern const CpuKernels kKernels = {run_item, merge};

}  // namespace pat::PAT_ISA
