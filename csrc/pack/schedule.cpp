// SPDX-License-Identifier: Apache-2.0
#include "schedule.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <limits>
#include <sstream>

#include "../check.h"

namespace pat {
namespace {

// Room above the scheduled length of a tail before the plan is made anew.
constexpr int64_t kMinHeadroom = 128;

int64_t headroom(int32_t tokens) { return std::max<int64_t>(kMinHeadroom, tokens / 4); }
int64_t headroom(const Pack& tail) {
  if (tail.pieces == 1) return headroom(tail.tokens());
  // The last piece takes all of the growth: half a chunk more unbalances the items little.
  return std::max<int64_t>(kMinHeadroom, std::min(tail.tokens() / 4, tail.chunk / 2));
}

// Eight buckets per octave, longest first: a linear-time sort that is LPT within 9 %.
constexpr uint32_t kNumBuckets = 2048;
uint32_t lpt_bucket(double seconds) {
  const auto microseconds = static_cast<float>(seconds * 1e6);
  uint32_t bits;
  std::memcpy(&bits, &microseconds, sizeof(bits));
  return kNumBuckets - 1 - (bits >> 20);  // sign 0, exponent, 3 bits of mantissa
}

// Of items, in the order in which a plan lists them.
enum Kind : uint32_t { kWide, kHeavy, kLight, kNumKinds };

// The target without the row tile of wide items, if it has that and can do without.
Target drop_wide(const Target& target) {
  Target without = target;
  auto& tiles = without.row_tiles;
  const int32_t needed = std::max(kWideRows, target.group());
  if (tiles.size() > 1 && tiles.back() == 2 * kWideRows && tiles[tiles.size() - 2] >= needed) {
    tiles.pop_back();
  }
  return without;
}

}  // namespace

void Target::validate() const {
  PAT_CHECK(units > 0, "Target.units is ", units, ", must be positive");
  PAT_CHECK(num_kv_heads > 0 && num_q_heads > 0 && num_q_heads % num_kv_heads == 0,
            "Target.num_q_heads is ", num_q_heads,
            ", must be a positive multiple of num_kv_heads, ", num_kv_heads);
  PAT_CHECK(head_dim > 0, "Target.head_dim is ", head_dim, ", must be positive");
  PAT_CHECK(kv_bytes > 0, "Target.kv_bytes is ", kv_bytes, ", must be positive");
  PAT_CHECK(partial_bytes == 2 || partial_bytes == 4, "Target.partial_bytes is ", partial_bytes,
            ", must be 2 (bf16) or 4 (fp32)");
  PAT_CHECK(bytes_per_s > 0 && flops_per_s > 0 && item_overhead_s > 0,
            "Target rates must be positive: bytes_per_s ", bytes_per_s, ", flops_per_s ",
            flops_per_s, ", item_overhead_s ", item_overhead_s);
  PAT_CHECK(reread_weight > 0 && reread_weight <= 1, "Target.reread_weight is ", reread_weight,
            ", must be in (0, 1]");
  for (const auto* tiles : {&row_tiles, &kv_tiles}) {
    const char* name = tiles == &row_tiles ? "row_tiles" : "kv_tiles";
    PAT_CHECK(!tiles->empty() && tiles->front() > 0 && tiles->back() <= INT16_MAX &&
                  std::adjacent_find(tiles->begin(), tiles->end(), std::greater_equal<>()) ==
                      tiles->end(),
              "Target.", name, " must be a strictly ascending list of 1..32767");
  }
  PAT_CHECK(row_tiles.back() >= group(), "Target.row_tiles end at ", row_tiles.back(),
            " rows, fewer than the GQA group of ", group(), " that one query needs");
  PAT_CHECK(max_queries > 0, "Target.max_queries is ", max_queries, ", must be positive");
  PAT_CHECK(max_items >= max_queries, "Target.max_items is ", max_items,
            ", must hold one item per query, at least ", max_queries);
  for (const auto& [name, value] : {std::pair{"max_partials", max_partials},
                                    {"max_segments", max_segments},
                                    {"max_branch_tokens", max_branch_tokens}}) {
    PAT_CHECK(value >= 0, "Target.", name, " is ", value, ", must not be negative");
  }
  for (const int32_t rows : branch_rows) {
    PAT_CHECK(rows > 0 && rows <= kBranchRows, "Target.branch_rows has ", rows,
              ", must be from 1 to ", kBranchRows);
  }
  for (const int32_t limit : branch_limits) {
    PAT_CHECK(limit > 0, "Target.branch_limits has ", limit, ", must be positive");
  }
}

Scheduler::Scheduler(const Target& target)
    : target_(target), without_wide_(drop_wide(target)), packer_(without_wide_) {
  target_.validate();
}

// Whether there is a wide item for every second unit, or none. Each takes all of a unit, which
// otherwise runs two smaller items side by side. (One for every unit, or for every fourth: 1 %
// slower in the mean of the paper's trees.)
bool Scheduler::wide_items_fill() const {
  if (without_wide_.row_tiles.size() == target_.row_tiles.size()) return true;
  const int64_t tile = target_.max_tile_queries();
  int64_t wide = 0;
  for (const Pack& pack : packs_.packs) {
    const bool last = pack.queries % tile * target_.group() > kWideRows;
    wide += (pack.queries / tile + last) * pack.pieces;
  }
  return wide == 0 || 2 * wide * target_.num_kv_heads >= target_.units;
}

Plan Scheduler::schedule(const PackTree& tree, const int64_t* seq_lens, size_t num_queries) {
  PAT_CHECK(num_queries <= static_cast<size_t>(target_.max_queries), "a batch of ", num_queries,
            " queries does not fit the plan's ", target_.max_queries,
            " rows (Target.max_queries): raise it or decode fewer requests at once");
  Plan plan;
  packer_.choose(tree, seq_lens, num_queries, true, packs_);
  drop_branches();
  if (target_.branching != Branching::kNever && !tree.nodes.empty()) {
    choose_branches(tree, seq_lens, num_queries);
  }
  tiles_ = &target_;
  plan.degraded = fit(tree, seq_lens, num_queries);
  if (!wide_items_fill()) {
    tiles_ = &without_wide_;
    plan.degraded = fit(tree, seq_lens, num_queries);
  }
  emit(plan, seq_lens, num_queries);
  return plan;
}

// Takes the way to branch that is modelled to be the fastest, if it is faster than none.
void Scheduler::choose_branches(const PackTree& tree, const int64_t* seq_lens, size_t num_queries) {
  int64_t unique = 0;
  int64_t longest = 0;
  const auto add = [&](int64_t tokens) {
    unique += tokens;
    longest = std::max(longest, tokens);
  };
  for (const PackNode& node : tree.nodes) add(node.end - node.start);
  for (size_t query = 0; query < num_queries; ++query) {
    add(seq_lens[query] - (tree.query_node[query] == kNoNode ? 0 : tree.query_prefix[query]));
  }
  split_packs(target_, packs_, true);
  double least = target_.branching == Branching::kAlways
                     ? std::numeric_limits<double>::infinity()
                     : modelled_seconds(target_, packs_, {}, unique);
  BranchCut best;
  brancher_.read(tree, seq_lens, num_queries);
  for (const int32_t rows : target_.branch_rows) {
    if (rows < target_.group()) continue;
    bool whole = false;  // a limit was looked at that leaves no item out
    for (const int32_t limit : target_.branch_limits) {
      if (whole && limit >= longest) continue;
      whole |= limit >= longest;
      const BranchCut cut{limit, rows / target_.group()};
      const Load load = brancher_.cut(target_, cut, cut_packs_);
      if (load.items == 0.0) continue;
      split_packs(target_, cut_packs_, true, load);
      const double seconds = modelled_seconds(target_, cut_packs_, load, unique);
      if (seconds < least) {
        least = seconds;
        best = cut;
      }
    }
  }
  if (best.queries == 0) return;
  load_ = brancher_.cut(target_, best, cut_packs_);
  if (brancher_.build() && place_branches()) {
    std::swap(packs_, cut_packs_);
  } else {
    drop_branches();
  }
}

// Returns whether there were any.
bool Scheduler::drop_branches() {
  const bool any = load_.items > 0.0;
  brancher_.clear();
  load_ = {};
  segments_.clear();
  branch_tokens_ = 0;
  return any;
}

// Gives the branches their segments and their places in the snapshot's list. Returns false if they
// do not fit the buffers.
bool Scheduler::place_branches() {
  segments_ = brancher_.segments();
  branch_starts_.clear();
  int64_t tokens = 0;
  for (const Branch& branch : brancher_.branches()) {
    branch_starts_.push_back(static_cast<int32_t>(tokens));
    for (int32_t i = 0; i < branch.num_segments; ++i) {
      Segment& segment = segments_[static_cast<size_t>(branch.first_segment + i)];
      if (segment.room == 0) {  // a tail
        segment.room = segment.kv_len + static_cast<int32_t>(headroom(segment.kv_len));
        segment.kv_len = kDynamic;
      }
      tokens += segment.room;
    }
    tokens = (tokens + kBranchAlign - 1) / kBranchAlign * kBranchAlign;
    if (tokens > target_.max_branch_tokens) return false;
  }
  branch_tokens_ = static_cast<int32_t>(tokens);
  return segments_.size() <= static_cast<size_t>(target_.max_segments);
}

// Cuts the packs so that their items fit the buffers: what is too large is made without branches,
// then without splits, then without packs. Returns why, or "" if it has all that the tree gives.
std::string Scheduler::fit(const PackTree& tree, const int64_t* seq_lens, size_t num_queries) {
  std::ostringstream why;
  for (const auto& [use_tree, split] : {std::pair{true, true}, {true, false}, {false, false}}) {
    if (!use_tree) packer_.choose(tree, seq_lens, num_queries, false, packs_);
    split_packs(*tiles_, packs_, split, load_);
    bool fits = assign_partials(num_queries);
    if (!fits && drop_branches()) {
      packer_.choose(tree, seq_lens, num_queries, true, packs_);
      split_packs(*tiles_, packs_, split);
      fits = assign_partials(num_queries);
    }
    if (fits) break;
    why.str("");
    why << (split ? "without splits: " : "without packs: ") << num_items_ << " items (of "
        << target_.max_items << ") and " << num_partials_ << " partials (of "
        << target_.max_partials << ") do not fit";
  }
  return why.str();
}

// Lists the members of every pack and numbers the partial slots of every query by token position.
// Returns false if items or partials exceed the capacities.
bool Scheduler::assign_partials(size_t num_queries) {
  const std::vector<Pack>& packs = packs_.packs;
  member_offsets_.resize(packs.size() + 1);
  int32_t num_members = 0;
  num_items_ = 0;
  for (size_t i = 0; i < packs.size(); ++i) {
    member_offsets_[i] = num_members;
    num_members += packs[i].queries;
    num_items_ += num_row_tiles(*tiles_, packs[i].queries) * packs[i].pieces;
  }
  member_offsets_[packs.size()] = num_members;
  members_.resize(static_cast<size_t>(num_members) + brancher_.members().size());
  for (const Branch& branch : brancher_.branches()) num_items_ += branch.num_queries > 0;
  splits_.resize(num_queries);
  num_partials_ = 0;
  for (size_t query = 0; query < num_queries; ++query) {
    const auto tail = static_cast<int32_t>(packs_.num_nodes + query);
    int32_t total = 0;
    const int32_t first = packs[static_cast<size_t>(tail)].queries > 0
                              ? tail
                              : packs[static_cast<size_t>(tail)].above;
    for (int32_t i = first; i != kNoNode; i = packs[static_cast<size_t>(i)].above) {
      total += packs[static_cast<size_t>(i)].pieces;
    }
    const bool in_branch = brancher_.branch_of(query) != kNoNode;
    total += in_branch;  // its last split
    splits_[query] = {static_cast<int32_t>(num_partials_), total};
    if (total > 1) num_partials_ += total;
    int32_t partial = total - in_branch;
    for (int32_t i = first; i != kNoNode; i = packs[static_cast<size_t>(i)].above) {
      partial -= packs[static_cast<size_t>(i)].pieces;
      const int32_t slot = member_offsets_[static_cast<size_t>(i)]++;
      members_[static_cast<size_t>(slot)] = {static_cast<int32_t>(query), partial};
    }
  }
  // The loop above moved each pack's offset to its end, which is where the next one starts.
  for (size_t i = packs.size(); i > 0; --i) member_offsets_[i] = member_offsets_[i - 1];
  member_offsets_[0] = 0;
  for (const int32_t query : brancher_.members()) {
    members_[static_cast<size_t>(num_members++)] = {
        query, splits_[static_cast<size_t>(query)].num_splits - 1};
  }
  return num_items_ <= target_.max_items && num_partials_ <= target_.max_partials;
}

void Scheduler::push_item(const Item& item, double seconds) {
  const Kind kind = item.row_tile > kWideRows    ? kWide
                    : item.row_tile > kHeavyRows ? kHeavy
                                                 : kLight;
  ++num_of_kind_[kind];
  const uint32_t key = lpt_bucket(seconds) + kind * kNumBuckets;
  items_.push_back(item);
  keys_.push_back(key);
  ++buckets_[key + 1];
}

// Makes the branches items. Returns how many share tokens.
int32_t Scheduler::list_branches(Plan& plan) {
  const auto first_member = static_cast<int32_t>(members_.size() - brancher_.members().size());
  int32_t num_shared = 0;
  for (size_t i = 0; i < brancher_.branches().size(); ++i) {
    const Branch& branch = brancher_.branches()[i];
    if (branch.num_queries == 0) continue;  // its nodes and tails are all items of their own
    bool shared = false;
    for (int32_t k = 0; k < branch.num_segments; ++k) {
      const Segment& segment = segments_[static_cast<size_t>(branch.first_segment + k)];
      shared |= segment.num_queries > 1;
      if (segment.kv_len != kDynamic) {
        plan.fixed_tokens += segment.kv_len;
        continue;
      }
      const auto query = static_cast<size_t>(segment.row);
      plan.fixed_tokens -= segment.kv_start;
      plan.min_seq_lens[query] = segment.kv_start;
      plan.max_seq_lens[query] =
          std::min<int64_t>(int64_t{segment.kv_start} + segment.room, INT32_MAX);
    }
    num_shared += shared;
    const int32_t seen = std::min(branch.seen_by_all / kBranchAlign, int32_t{INT16_MAX});
    push_item({first_member + branch.first_member, branch.num_queries, branch.first_segment,
               branch_starts_[i], kBranch, static_cast<int16_t>(kBranchRows),
               static_cast<int16_t>(branch.tails_first ? -seen : seen), branch.num_segments, 0},
              item_seconds(target_, kBranchRows, branch.tokens));
  }
  return num_shared;
}

// Writes the blob: wide items, then heavy, then light ones, each by descending cost (shared ones
// first among equals, the row tiles of one piece side by side so that the second finds its K/V in
// cache).
void Scheduler::emit(Plan& plan, const int64_t* seq_lens, size_t num_queries) {
  const std::vector<Pack>& packs = packs_.packs;
  const int32_t most = tiles_->max_tile_queries();
  items_.clear();
  keys_.clear();
  buckets_.assign(kNumKinds * kNumBuckets + 1, 0);
  num_of_kind_ = {};
  plan.min_seq_lens.resize(num_queries);
  plan.max_seq_lens.resize(num_queries);

  for (size_t i = 0; i < packs.size(); ++i) {
    const Pack& pack = packs[i];
    const bool is_tail = i >= packs_.num_nodes;
    if (is_tail && pack.queries == 0 &&
        pack.tokens() == 0) {  // the sequence ends with a shared node: no room to grow
      const size_t query = i - packs_.num_nodes;
      plan.min_seq_lens[query] = plan.max_seq_lens[query] = seq_lens[query];
      plan.fixed_tokens -= seq_lens[query];
    }
    for (int32_t piece = 0; piece < pack.pieces && pack.queries > 0; ++piece) {
      const int32_t start = pack.start + piece * pack.chunk;
      const bool last = piece + 1 == pack.pieces;
      const int32_t tokens = last ? pack.end - start : pack.chunk;
      const bool dynamic = is_tail && last;
      plan.fixed_tokens += dynamic ? -start : tokens * num_row_tiles(*tiles_, pack.queries);
      if (dynamic) {
        const size_t query = i - packs_.num_nodes;
        plan.min_seq_lens[query] = start;
        plan.max_seq_lens[query] = std::min<int64_t>(pack.end + headroom(pack), INT32_MAX);
      }
      for (int32_t first = 0; first < pack.queries; first += most) {
        const int32_t queries = std::min(most, pack.queries - first);
        const int32_t row_tile = row_tile_for(*tiles_, queries);
        const int32_t offset = member_offsets_[i] + first;
        push_item({offset, queries, members_[static_cast<size_t>(offset)].query, start,
                   dynamic ? kDynamic : tokens, static_cast<int16_t>(row_tile),
                   static_cast<int16_t>(kv_tile_for(target_, tokens)), piece, 0},
                  item_seconds(target_, row_tile, tokens));
      }
    }
  }
  const int32_t num_shared_branches = list_branches(plan);
  const auto num_items = items_.size();
  int64_t num_members = 0;
  for (const Item& item : items_) num_members += item.num_queries;

  const size_t items_offset = sizeof(PlanHeader);
  const size_t members_offset = items_offset + num_items * sizeof(Item);
  const size_t queries_offset = members_offset + static_cast<size_t>(num_members) * sizeof(Member);
  const size_t segments_offset = queries_offset + num_queries * sizeof(QuerySplits);
  const int64_t total_bytes = plan_bytes(num_items, num_members, num_queries, segments_.size());
  plan.blob.resize(total_bytes);
  auto* items = reinterpret_cast<Item*>(plan.blob.data() + items_offset);
  auto* members = reinterpret_cast<Member*>(plan.blob.data() + members_offset);

  for (uint32_t key = 0; key < kNumKinds * kNumBuckets; ++key) buckets_[key + 1] += buckets_[key];
  for (size_t i = 0; i < items_.size(); ++i) {
    items[buckets_[keys_[i]]++] = items_[i];
  }
  int32_t num_shared = num_shared_branches;
  int32_t next_member = 0;
  for (size_t i = 0; i < num_items; ++i) {
    Item& item = items[i];
    const bool branch = item.kv_len == kBranch;
    const int32_t piece = branch ? 0 : item.partial;  // until here
    for (int32_t m = 0; m < item.num_queries; ++m) {
      const Member& member = members_[static_cast<size_t>(item.member_offset + m)];
      const QuerySplits& splits = splits_[static_cast<size_t>(member.query)];
      members[next_member + m] = {member.query, splits.num_splits > 1
                                                    ? splits.partial_offset + member.partial + piece
                                                    : kDirect};
    }
    item.member_offset = next_member;
    if (!branch) {
      item.partial = item.num_queries == 1 ? members[next_member].partial : 0;
      num_shared += item.num_queries > 1;
    }
    next_member += item.num_queries;
  }
  for (size_t query = 0; query < num_queries; ++query) {
    if (splits_[query].num_splits <= 1) splits_[query].partial_offset = 0;
  }
  if (num_queries > 0) {
    std::memcpy(plan.blob.data() + queries_offset, splits_.data(),
                num_queries * sizeof(QuerySplits));
  }
  if (!segments_.empty()) {
    std::memcpy(plan.blob.data() + segments_offset, segments_.data(),
                segments_.size() * sizeof(Segment));
  }
  const PlanHeader header{kPlanMagic,
                          kPlanVersion,
                          static_cast<int32_t>(num_queries),
                          static_cast<int32_t>(num_items),
                          static_cast<int32_t>(num_members),
                          static_cast<int32_t>(num_partials_),
                          num_shared,
                          static_cast<int32_t>(items_offset),
                          static_cast<int32_t>(members_offset),
                          static_cast<int32_t>(queries_offset),
                          static_cast<int32_t>(total_bytes),
                          target_.max_queries,
                          target_.max_items,
                          target_.max_partials,
                          target_.num_q_heads,
                          target_.num_kv_heads,
                          num_of_kind_[kWide],
                          num_of_kind_[kHeavy],
                          static_cast<int32_t>(segments_.size()),
                          static_cast<int32_t>(segments_offset),
                          branch_tokens_,
                          {}};
  std::memcpy(plan.blob.data(), &header, sizeof(header));
}

}  // namespace pat
