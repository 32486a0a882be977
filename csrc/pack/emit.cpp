// SPDX-License-Identifier: Apache-2.0
#include "emit.h"

#include <algorithm>
#include <cstring>

#include "../count_of.h"
#include "cost_model.h"
#include "headroom.h"

namespace pat {
namespace {

// Of items, in the order in which a plan lists them.
enum Kind : uint32_t { kWide, kHeavy, kLight, kNumKinds };

Kind kind_of(const Item& item) {
  return item.row_tile > kWideRows ? kWide : item.row_tile > kHeavyRows ? kHeavy : kLight;
}

// Eight buckets per octave, longest first: a linear-time sort that is LPT (longest processing time
// first) within 9 %.
constexpr uint32_t kNumBuckets = 2048;
uint32_t lpt_bucket(double seconds) {
  const auto microseconds = static_cast<float>(seconds * 1e6);
  uint32_t bits;
  std::memcpy(&bits, &microseconds, sizeof(bits));
  return kNumBuckets - 1 - (bits >> 20);  // sign 0, exponent, 3 bits of mantissa
}

// Where the parts of a plan begin, in bytes.
struct Layout {
  Layout(size_t num_items, size_t num_members, size_t num_queries)
      : members(items + num_items * sizeof(Item)),
        queries(members + num_members * sizeof(Member)),
        segments(queries + num_queries * sizeof(QuerySplits)) {}

  size_t items = sizeof(PlanHeader);
  size_t members;
  size_t queries;
  size_t segments;
};

void write_splits(const std::vector<QuerySplits>& splits, QuerySplits* out) {
  for (const QuerySplits& query : splits) {
    *out++ = {query.num_splits > 1 ? query.partial_offset : 0, query.num_splits};
  }
}

void write_segments(const std::vector<Segment>& segments, void* out) {
  if (!segments.empty()) std::memcpy(out, segments.data(), segments.size() * sizeof(Segment));
}

}  // namespace

Plan Emitter::emit(const Decisions& from) {
  drafts_.clear();
  buckets_.assign(kNumKinds * kNumBuckets + 1, 0);
  num_of_kind_ = {};
  num_shared_ = 0;
  tile_queries_ = from.target.max_tile_queries();
  Plan plan;
  plan.min_seq_lens.resize(from.num_queries);
  plan.max_seq_lens.resize(from.num_queries);
  for (int32_t i = 0; i < count_of(from.packs.packs); ++i) list_pack(from, i, plan);
  for (const Branch& branch : from.brancher.branches()) list_branch(from, branch, plan);
  sort();

  size_t num_members = 0;
  for (const Draft& draft : drafts_) num_members += draft.item.num_queries;
  const std::vector<Segment>& segments = from.brancher.segments();
  const Layout at(drafts_.size(), num_members, from.num_queries);
  plan.blob.resize(at.segments + segments.size() * sizeof(Segment));
  uint8_t* const blob = plan.blob.data();
  write_items(from, reinterpret_cast<Item*>(blob + at.items),
              reinterpret_cast<Member*>(blob + at.members));
  write_splits(from.assigned.splits, reinterpret_cast<QuerySplits*>(blob + at.queries));
  write_segments(segments, blob + at.segments);
  const PlanHeader header{
      .magic = kPlanMagic,
      .version = kPlanVersion,
      .num_queries = from.num_queries,
      .num_items = count_of(drafts_),
      .num_members = static_cast<int32_t>(num_members),
      .num_partials = static_cast<int32_t>(from.assigned.num_partials),
      .num_shared_items = num_shared_,
      .items_offset = static_cast<int32_t>(at.items),
      .members_offset = static_cast<int32_t>(at.members),
      .queries_offset = static_cast<int32_t>(at.queries),
      .total_bytes = count_of(plan.blob),
      .max_queries = from.target.max_queries,
      .max_items = from.target.max_items,
      .max_partials = from.target.max_partials,
      .num_q_heads = from.target.num_q_heads,
      .num_kv_heads = from.target.num_kv_heads,
      .num_wide_items = num_of_kind_[kWide],
      .num_heavy_items = num_of_kind_[kHeavy],
      .num_segments = count_of(segments),
      .segments_offset = static_cast<int32_t>(at.segments),
      .branch_tokens = from.brancher.list_tokens(),
      .reserved = {},
  };
  std::memcpy(blob, &header, sizeof(header));
  return plan;
}

// Makes a pack items: one for each piece and row tile. A tail's last piece is as long as the
// sequence at run time.
void Emitter::list_pack(const Decisions& from, int32_t index, Plan& plan) {
  const Pack& pack = from.packs.packs[index];
  const int32_t query = index - from.packs.num_nodes;  // < 0: the pack is no tail
  if (query >= 0 && pack.queries == 0 && pack.tokens() == 0) {
    // The sequence ends with a shared node: no room to grow.
    plan.min_seq_lens[query] = plan.max_seq_lens[query] = from.seq_lens[query];
    plan.fixed_tokens -= from.seq_lens[query];
  }
  if (pack.queries == 0) return;
  for (int32_t piece = 0; piece < pack.pieces; ++piece) {
    const int32_t start = pack.start + piece * pack.chunk;
    const bool last = piece + 1 == pack.pieces;
    const int32_t tokens = last ? pack.end - start : pack.chunk;
    const bool dynamic = query >= 0 && last;
    if (dynamic) {
      plan.fixed_tokens -= start;
      plan.min_seq_lens[query] = start;
      plan.max_seq_lens[query] = std::min<int64_t>(int64_t{pack.end} + headroom(pack), INT32_MAX);
    } else {
      plan.fixed_tokens += tokens * from.target.num_row_tiles(pack.queries);
    }
    for (int32_t first = 0; first < pack.queries; first += tile_queries_) {
      const int32_t queries = std::min(tile_queries_, pack.queries - first);
      const int32_t row_tile = from.target.row_tile_for(queries);
      const int32_t offset = from.assigned.member_offsets[index] + first;
      add({.member_offset = offset,
           .num_queries = queries,
           .row = from.assigned.members[offset].query,
           .kv_start = start,
           .kv_len = dynamic ? kDynamic : tokens,
           .row_tile = static_cast<int16_t>(row_tile),
           .kv_tile = static_cast<int16_t>(from.target.kv_tile_for(tokens)),
           .partial = 0,
           .tokens = 0},
          piece, item_seconds(from.target, row_tile, tokens));
      num_shared_ += queries > 1;
    }
  }
}

// Makes a branch an item, whose fields plan.h names first_segment() and so on.
void Emitter::list_branch(const Decisions& from, const Branch& branch, Plan& plan) {
  if (branch.num_queries == 0) return;
  bool shared = false;
  for (int32_t i = 0; i < branch.num_segments; ++i) {
    const Segment& segment = from.brancher.segments()[branch.first_segment + i];
    shared |= segment.num_queries > 1;
    if (!is_dynamic(segment)) {
      plan.fixed_tokens += segment.kv_len;
      continue;
    }
    plan.fixed_tokens -= segment.kv_start;
    plan.min_seq_lens[segment.row] = segment.kv_start;
    plan.max_seq_lens[segment.row] =
        std::min<int64_t>(int64_t{segment.kv_start} + segment.room, INT32_MAX);
  }
  num_shared_ += shared;
  const int32_t num_packed = from.assigned.member_offsets[count_of(from.packs.packs)];
  const int32_t unmasked = std::min(branch.unmasked / kBranchAlign, int32_t{INT16_MAX});
  add({.member_offset = num_packed + branch.first_member,
       .num_queries = branch.num_queries,
       .row = branch.first_segment,
       .kv_start = branch.list_start,
       .kv_len = kBranch,
       .row_tile = static_cast<int16_t>(kBranchRows),
       .kv_tile = static_cast<int16_t>(branch.tails_first ? -unmasked : unmasked),
       .partial = branch.num_segments,
       .tokens = 0},
      0, item_seconds(from.target, kBranchRows, branch.tokens));
}

void Emitter::add(const Item& item, int32_t piece, double seconds) {
  const Kind kind = kind_of(item);
  const uint32_t key = lpt_bucket(seconds) + kind * kNumBuckets;
  ++num_of_kind_[kind];
  drafts_.push_back({item, piece, key});
  ++buckets_[key + 1];
}

// Wide items, then heavy, then light ones, each by descending cost; among equals shared ones first
// and the row tiles of one piece side by side, so that the second finds its K/V in the cache.
void Emitter::sort() {
  for (uint32_t key = 0; key < kNumKinds * kNumBuckets; ++key) buckets_[key + 1] += buckets_[key];
  order_.resize(drafts_.size());
  for (int32_t i = 0; i < count_of(drafts_); ++i) order_[buckets_[drafts_[i].key]++] = i;
}

void Emitter::write_items(const Decisions& from, Item* items, Member* members) {
  int32_t num_members = 0;
  for (const int32_t i : order_) {
    const Draft& draft = drafts_[i];
    Item item = draft.item;
    for (int32_t m = 0; m < item.num_queries; ++m) {
      const Member& member = from.assigned.members[item.member_offset + m];
      const QuerySplits& splits = from.assigned.splits[member.query];
      const int32_t slot = splits.partial_offset + member.partial + draft.piece;
      members[num_members + m] = {member.query, splits.num_splits > 1 ? slot : kDirect};
    }
    item.member_offset = num_members;
    // An item of one query repeats its member's partial.
    if (!is_branch(item) && item.num_queries == 1) item.partial = members[num_members].partial;
    *items++ = item;
    num_members += item.num_queries;
  }
}

}  // namespace pat
