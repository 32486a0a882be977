// SPDX-License-Identifier: Apache-2.0
// Emit: the bytes of a plan (csrc/plan.h) from what the stages before have decided. Gives every
// item its tile (PAT section 5.2) and lists the items in the order in which they run.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cstdint>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "../check.h"
#include "../plan.h"
#include "branch.h"
#include "cut.h"
#include "packs.h"
#include "target.h"

namespace pat {

// A plan on the host: its bytes, and for how long they hold.
struct Plan {
  std::vector<uint8_t> blob;  // laid out as plan.h says
  // The plan holds while min_seq_lens[q] <= seq_lens[q] <= max_seq_lens[q] for every query. The
  // room above the scheduled length grows with the tail, so that plans get rarer as sequences get
  // longer; a branch has little (kBranchHeadroom).
  std::vector<int64_t> min_seq_lens;
  std::vector<int64_t> max_seq_lens;
  // Tokens that the items read for one layer and KV head, re-reads counted, are fixed_tokens plus
  // sum(seq_lens): each query has at most one tail item, and its length enters once.
  int64_t fixed_tokens = 0;
  // What an executor's buffers must hold, so that a plan that comes from here need not be read for
  // it: where the last of the tokens ends that items read of any sequence, tails at their least,
  // and the most packed rows of an item.
  int64_t last_token = 0;
  int64_t most_rows = 0;
  // Why a simpler plan was made than the rules ask for: empty, or the capacity that was too small.
  std::string degraded;
  double seconds = 0.0;  // that the judge expects of forward and merge, the launch included

  const PlanHeader& header() const { return *reinterpret_cast<const PlanHeader*>(blob.data()); }
  // What begins at a byte of the blob.
  template <typename T>
  T* part(int32_t offset) {
    return reinterpret_cast<T*>(blob.data() + offset);
  }
};

// Of the lengths of items: eight per octave.
inline constexpr uint32_t kNumBuckets = 256;

// Writes plans. Keeps its working memory between calls.
class Emitter {
 public:
  // The items' partials are numbered (Items::assign).
  Plan emit(const Items& from) {
    drafts_.clear();
    buckets_.fill(0);
    weights_.fill(0);
    num_shared_ = 0;
    tile_queries_ = from.target->max_tile_queries();
    segments_.clear();
    num_branch_segments_ = count_of(from.brancher.segments());
    list_tokens_ = from.brancher.list_tokens();
    Plan plan;
    const int32_t num_queries = count_of(from.splits);
    plan.min_seq_lens.resize(num_queries);
    plan.max_seq_lens.resize(num_queries);
    for (int32_t i = 0; i < count_of(from.packs.packs); ++i) list_pack(from, i, plan);
    for (const Branch& branch : from.brancher.branches()) list_branch(from, branch, plan);
    sort();
    PAT_CHECK(list_tokens_ <= INT32_MAX, "the items of a plan list ", list_tokens_,
              " tokens, at most ", INT32_MAX,
              " fit: decode fewer requests at once, or requests that share more");

    int32_t num_members = 0;
    for (const Draft& draft : drafts_) num_members += draft.item.num_queries;
    const int32_t num_segments = num_branch_segments_ + count_of(segments_);
    size_t bytes = sizeof(PlanHeader);
    const auto place = [&](size_t count, size_t size) {  // of the next part
      return static_cast<int32_t>(std::exchange(bytes, bytes + count * size));
    };
    const PlanHeader header{
        .magic = kPlanMagic,
        .version = kPlanVersion,
        .num_queries = num_queries,
        .num_items = count_of(drafts_),
        .num_members = num_members,
        .num_segments = num_segments,
        .num_partials = static_cast<int32_t>(from.num_partials),
        .num_shared_items = num_shared_,
        .items_offset = place(drafts_.size(), sizeof(Item)),
        .item_segments_offset = place(drafts_.size(), sizeof(ItemSegments)),
        .members_offset = place(num_members, sizeof(Member)),
        .queries_offset = place(num_queries, sizeof(QuerySplits)),
        .segments_offset = place(num_segments, sizeof(Segment)),
        .total_bytes = static_cast<int32_t>(bytes),
        .num_q_heads = from.target->num_q_heads,
        .num_kv_heads = from.target->num_kv_heads,
        .num_wide_items = weights_[kWide],
        .num_heavy_items = weights_[kPaired] + weights_[kHeavy],
        .branch_tokens = from.brancher.list_tokens(),
        .list_tokens = static_cast<int32_t>(list_tokens_),
        .list = nullptr,
        .draft_tokens = from.target->draft_tokens,
        .joint = is_joint(*from.target),
        .first_units = 0,
        .num_paired_items = weights_[kPaired],
        .unused = {},
    };
    plan.blob.resize(bytes);
    std::memcpy(plan.blob.data(), &header, sizeof(header));
    write_items(from, plan.part<Item>(header.items_offset),
                plan.part<ItemSegments>(header.item_segments_offset),
                plan.part<Member>(header.members_offset));
    std::ranges::transform(from.splits, plan.part<QuerySplits>(header.queries_offset),
                           [](const QuerySplits& query) -> QuerySplits {
                             return {query.num_splits > 1 ? query.partial_offset : 0,
                                     query.num_splits};
                           });
    Segment* const segments = plan.part<Segment>(header.segments_offset);
    std::ranges::copy(segments_, std::ranges::copy(from.brancher.segments(), segments).out);
    return plan;
  }

 private:
  // Of items, in the order in which a plan lists them.
  enum Weight : uint32_t { kWide, kPaired, kHeavy, kLight };

  static Weight weight_of(int32_t row_tile) {
    return row_tile > kWideRows ? kWide : row_tile > kHeavyRows ? kHeavy : kLight;
  }

  // Longest first: a linear-time sort that is LPT (longest processing time first) within 9 %.
  static uint32_t lpt_bucket(int32_t tokens) {
    const uint32_t bits = std::bit_cast<uint32_t>(static_cast<float>(std::max(tokens, 1)));
    return kNumBuckets - 1 - ((bits >> 20) - (127 << 3));  // exponent, 3 bits of mantissa
  }

  // Tokens that a tail that is an item of its own may grow beyond its scheduled length before the
  // plan is made anew: plans get rarer as sequences get longer. The last piece takes all of the
  // growth: half a chunk more unbalances items little.
  static int32_t headroom(const Pack& tail) {
    const int32_t share = tail.tokens() / kTailToHeadroom;
    return std::max(kMinHeadroom, tail.pieces == 1 ? share : std::min(share, tail.chunk / 2));
  }

  // An item before it has its place. Until then member_offset counts in Items::members.
  struct Draft {
    Item item;
    ItemSegments segments;
    int32_t piece;  // of its pack
    uint32_t key;   // where it sorts
  };
  // Makes a pack items: one for each piece and row tile. Row tiles of one piece read the same part
  // of the list. A tail's last piece is as long as the sequence at run time.
  void list_pack(const Items& from, int32_t index, Plan& plan) {
    const Target& target = *from.target;
    const Pack& pack = from.packs.packs[index];
    const int32_t query = index - from.packs.num_nodes;  // < 0: the pack is no tail
    if (query >= 0 && pack.queries == 0 && pack.tokens() == 0) {
      // The sequence ends with a shared node: no room to grow.
      plan.min_seq_lens[query] = plan.max_seq_lens[query] = pack.end;
      plan.fixed_tokens -= pack.end;
    }
    if (pack.queries == 0) return;
    plan.most_rows =
        std::max(plan.most_rows, int64_t{std::min(pack.queries, tile_queries_)} * target.group());
    for (int32_t piece = 0; piece < pack.pieces; ++piece) {
      const int32_t start = pack.start + piece * pack.chunk;
      const bool last = piece + 1 == pack.pieces;
      const int32_t tokens = last ? pack.end - start : pack.chunk;
      const bool dynamic = query >= 0 && last;
      int64_t end = int64_t{start} + tokens;  // of its room
      if (dynamic) {
        end = std::min<int64_t>(int64_t{pack.end} + headroom(pack), INT32_MAX);
        plan.fixed_tokens -= start;
        plan.min_seq_lens[query] = start + target.draft_tokens - 1;  // all drafts but the first
        plan.max_seq_lens[query] = end;
      } else {
        plan.fixed_tokens += tokens * target.num_row_tiles(pack.queries);
      }
      plan.last_token = std::max(plan.last_token, dynamic ? start : end);
      const auto room = static_cast<int32_t>(end - start);
      for (int32_t first = 0; first < pack.queries; first += tile_queries_) {
        const int32_t queries = std::min(tile_queries_, pack.queries - first);
        const int32_t row_tile = target.row_tile_for(queries);
        const int32_t offset = from.member_offsets[index] + first;
        // Both are filled in place: a copy of what was just written stalls the processor.
        Draft& draft = add(weight_of(row_tile), row_tile, tokens);
        draft.item.member_offset = offset;
        draft.item.num_queries = queries;
        draft.item.list_start = static_cast<int32_t>(list_tokens_);
        draft.item.query = -1;
        draft.item.kind = queries > 1                          ? ItemKind::kPack
                          : dynamic && target.draft_tokens > 1 ? ItemKind::kDrafts
                                                               : ItemKind::kSingle;
        draft.segments = {num_branch_segments_ + count_of(segments_), 1};
        draft.piece = piece;
        Segment& segment = segments_.emplace_back();
        segment.query = from.members[offset].query;
        segment.kv_start = start;
        segment.kv_len = dynamic ? kDynamic : tokens;
        segment.room = room;
        segment.num_queries = queries;
        num_shared_ += queries > 1;
      }
      list_tokens_ += room;
    }
  }

  void list_branch(const Items& from, const Branch& branch, Plan& plan) {
    if (branch.num_queries == 0) return;
    plan.most_rows = std::max(plan.most_rows, int64_t{branch.num_queries} * from.target->group());
    bool shared = false;
    for (int32_t i = 0; i < branch.num_segments; ++i) {
      const Segment& segment = from.brancher.segments()[branch.first_segment + i];
      const int64_t end = int64_t{segment.kv_start} + (is_dynamic(segment) ? 0 : segment.kv_len);
      plan.last_token = std::max(plan.last_token, end);
      shared |= segment.num_queries > 1;
      if (!is_dynamic(segment)) {
        plan.fixed_tokens += segment.kv_len;
        continue;
      }
      plan.fixed_tokens -= segment.kv_start;
      plan.min_seq_lens[segment.query] = segment.kv_start + from.target->draft_tokens - 1;
      plan.max_seq_lens[segment.query] =
          std::min<int64_t>(int64_t{segment.kv_start} + segment.room, INT32_MAX);
    }
    num_shared_ += shared;
    const int32_t num_packed = from.member_offsets[count_of(from.packs.packs)];
    const auto whole_tiles = [](int32_t tokens) {
      return static_cast<int16_t>(std::min(tokens / kBranchAlign, int32_t{INT16_MAX}));
    };
    const bool paired = branch.peer != kNoNode;
    // Those of a pair have the same place, so that they stand side by side.
    const int32_t tokens =
        paired ? std::max(branch.tokens, from.brancher.branches()[branch.peer].tokens)
               : branch.tokens;
    Draft& draft = add(paired ? kPaired : kHeavy, kBranchRows, tokens);
    draft.item.unmasked_tiles = whole_tiles(branch.unmasked);
    draft.item.common_tiles = whole_tiles(branch.common);
    draft.item.order =
        branch.tails_first ? BranchOrder::kUnmaskedLast : BranchOrder::kUnmaskedFirst;
    draft.item.member_offset = num_packed + branch.first_member;
    draft.item.num_queries = branch.num_queries;
    draft.item.list_start = branch.list_start;
    draft.item.query = -1;
    draft.item.kind = ItemKind::kBranch;
    draft.segments = {branch.first_segment, branch.num_segments};
  }

  // Whether both halves of an SM run each item. If a target has large row tiles alone, an item in
  // one of them counts as heavy but may have few packed rows. The kernels run it as a light one, on
  // one half, so such a plan is not joint.
  bool is_joint(const Target& target) const {
    const auto by_both = [&](const Draft& draft) {
      return is_branch(draft.item) || draft.item.num_queries * target.group() > kHeavyRows;
    };
    return target.runs_jointly(count_of(drafts_), weights_[kHeavy]) &&
           std::all_of(drafts_.begin(), drafts_.end(), by_both);
  }

  // Adds an item of zeros with its row tile and says where it sorts. Valid until the next call.
  Emitter::Draft& add(uint32_t weight, int32_t row_tile, int32_t tokens) {
    Draft& draft = drafts_.emplace_back();
    draft.item.row_tile = static_cast<int16_t>(row_tile);
    draft.key = lpt_bucket(tokens) + weight * kNumBuckets;
    ++buckets_[draft.key];
    ++weights_[weight];
    return draft;
  }

  // Wide items, then pairs, other heavy ones and light ones, each by descending length; among
  // equals shared ones first and the row tiles of one piece side by side, so that the second finds
  // its K/V in the cache.
  void sort() {
    int32_t before = 0;
    for (uint32_t key = 0; key < buckets_.size(); ++key) {
      if (weights_[key / kNumBuckets] > 0) before += std::exchange(buckets_[key], before);
    }
    order_.resize(drafts_.size());
    for (int32_t i = 0; i < count_of(drafts_); ++i) order_[buckets_[drafts_[i].key]++] = i;
  }

  void write_items(const Items& from, Item* items, ItemSegments* item_segments, Member* members) {
    int32_t num_members = 0;
    // Every second group of `in_turn` pairs, about as many as run at once on half of the SMs,
    // begins with its own tokens. Neighbours share more with each other, so they are in one group.
    const int32_t in_turn = std::max(from.target->num_sms / (2 * from.target->num_kv_heads), 1);
    const int32_t paired = weights_[kWide], behind = paired + weights_[kPaired];
    for (int32_t place = 0; place < count_of(order_); ++place) {
      const Draft& draft = drafts_[order_[place]];
      Item& item = *items++;
      item = draft.item;
      if (place >= paired && place < behind && (place - paired) / 2 / in_turn % 2 == 1) {
        item.order = BranchOrder::kCommonLast;
      }
      for (int32_t m = 0; m < item.num_queries; ++m) {
        const Member& member = from.members[item.member_offset + m];
        const QuerySplits& splits = from.splits[member.query];
        const int32_t slot = splits.partial_offset + member.partial + draft.piece;
        members[num_members + m] = {member.query, splits.num_splits > 1 ? slot : kDirect};
      }
      item.member_offset = num_members;
      if (item.kind == ItemKind::kSingle || item.kind == ItemKind::kDrafts) {
        item.query = members[num_members].query;
        item.partial = members[num_members].partial;
      }
      *item_segments++ = draft.segments;
      num_members += item.num_queries;
    }
  }

  std::vector<Draft> drafts_;
  std::vector<int32_t> order_;                    // drafts, as the plan lists them
  std::array<int32_t, 4> weights_;                // wide, paired, heavy and light items
  std::array<int32_t, 4 * kNumBuckets> buckets_;  // by key: items, then where the next one goes
  std::vector<Segment> segments_;                 // one for each item that is no branch
  int32_t num_branch_segments_ = 0;               // which a plan has before them
  int64_t list_tokens_ = 0;                       // of the list, so far
  int32_t num_shared_ = 0;                        // items that several queries share tokens of
  int32_t tile_queries_ = 0;                      // that the largest row tile holds
};

}  // namespace pat
