// SPDX-License-Identifier: Apache-2.0
#include "schedule.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <sstream>

#include "../check.h"

namespace pat {
namespace {

// Room above the scheduled length of a tail before the plan is made anew.
constexpr int64_t kMinHeadroom = 128;

int64_t headroom(const Pack& tail) {
  const int64_t grown = tail.tokens() / 4;
  // The last piece takes all of the growth: half a chunk more unbalances the items little.
  return std::max(kMinHeadroom, tail.pieces > 1 ? std::min<int64_t>(grown, tail.chunk / 2) : grown);
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
  PAT_CHECK(max_partials >= 0, "Target.max_partials is ", max_partials, ", must not be negative");
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
  tiles_ = &target_;
  plan.degraded = fit(tree, seq_lens, num_queries);
  if (!wide_items_fill()) {
    tiles_ = &without_wide_;
    plan.degraded = fit(tree, seq_lens, num_queries);
  }
  emit(plan, seq_lens, num_queries);
  return plan;
}

// Cuts the packs so that their items fit the buffers: what is too large is made without splits,
// then without packs. Returns why, or "".
std::string Scheduler::fit(const PackTree& tree, const int64_t* seq_lens, size_t num_queries) {
  std::ostringstream why;
  for (const auto& [use_tree, split] : {std::pair{true, true}, {true, false}, {false, false}}) {
    if (!use_tree) packer_.choose(tree, seq_lens, num_queries, false, packs_);
    split_packs(*tiles_, packs_, split);
    if (assign_partials(num_queries)) break;
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
  members_.resize(static_cast<size_t>(num_members));
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
    splits_[query] = {static_cast<int32_t>(num_partials_), total};
    if (total > 1) num_partials_ += total;
    int32_t partial = total;
    for (int32_t i = first; i != kNoNode; i = packs[static_cast<size_t>(i)].above) {
      partial -= packs[static_cast<size_t>(i)].pieces;
      const int32_t slot = member_offsets_[static_cast<size_t>(i)]++;
      members_[static_cast<size_t>(slot)] = {static_cast<int32_t>(query), partial};
    }
  }
  // The loop above moved each pack's offset to its end, which is where the next one starts.
  for (size_t i = packs.size(); i > 0; --i) member_offsets_[i] = member_offsets_[i - 1];
  member_offsets_[0] = 0;
  return num_items_ <= target_.max_items && num_partials_ <= target_.max_partials;
}

// Writes the blob: wide items, then heavy, then light ones, each by descending cost (shared ones
// first among equals, the row tiles of one piece side by side so that the second finds its K/V in
// cache).
void Scheduler::emit(Plan& plan, const int64_t* seq_lens, size_t num_queries) {
  const std::vector<Pack>& packs = packs_.packs;
  const int32_t most = tiles_->max_tile_queries();
  const auto num_items = static_cast<size_t>(num_items_);
  items_.clear();
  keys_.clear();
  buckets_.assign(kNumKinds * kNumBuckets + 1, 0);
  plan.min_seq_lens.resize(num_queries);
  plan.max_seq_lens.resize(num_queries);
  int64_t num_members = 0;
  std::array<int32_t, kNumKinds> num_of_kind{};

  for (size_t i = 0; i < packs.size(); ++i) {
    const Pack& pack = packs[i];
    const bool is_tail = i >= packs_.num_nodes;
    if (is_tail && pack.queries == 0) {  // the sequence ends with a shared node: no room to grow
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
        items_.push_back({offset, queries, members_[static_cast<size_t>(offset)].query, start,
                          dynamic ? kDynamic : tokens, static_cast<int16_t>(row_tile),
                          static_cast<int16_t>(kv_tile_for(target_, tokens)), piece, 0});
        const Kind kind = row_tile > kWideRows ? kWide : row_tile > kHeavyRows ? kHeavy : kLight;
        ++num_of_kind[kind];
        const uint32_t key =
            lpt_bucket(item_seconds(target_, row_tile, tokens)) + kind * kNumBuckets;
        keys_.push_back(key);
        ++buckets_[key + 1];
        num_members += queries;
      }
    }
  }

  const size_t items_offset = sizeof(PlanHeader);
  const size_t members_offset = items_offset + num_items * sizeof(Item);
  const size_t queries_offset = members_offset + static_cast<size_t>(num_members) * sizeof(Member);
  const int64_t total_bytes = plan_bytes(num_items, num_members, num_queries);
  plan.blob.resize(total_bytes);
  auto* items = reinterpret_cast<Item*>(plan.blob.data() + items_offset);
  auto* members = reinterpret_cast<Member*>(plan.blob.data() + members_offset);

  for (uint32_t key = 0; key < kNumKinds * kNumBuckets; ++key) buckets_[key + 1] += buckets_[key];
  for (size_t i = 0; i < items_.size(); ++i) {
    items[buckets_[keys_[i]]++] = items_[i];
  }
  int32_t num_shared = 0;
  int32_t next_member = 0;
  for (size_t i = 0; i < num_items; ++i) {
    Item& item = items[i];
    const int32_t piece = item.partial;  // until here
    for (int32_t m = 0; m < item.num_queries; ++m) {
      const Member& member = members_[static_cast<size_t>(item.member_offset + m)];
      const QuerySplits& splits = splits_[static_cast<size_t>(member.query)];
      members[next_member + m] = {member.query, splits.num_splits > 1
                                                    ? splits.partial_offset + member.partial + piece
                                                    : kDirect};
    }
    item.member_offset = next_member;
    item.partial = item.num_queries == 1 ? members[next_member].partial : 0;
    next_member += item.num_queries;
    num_shared += item.num_queries > 1;
  }
  for (size_t query = 0; query < num_queries; ++query) {
    if (splits_[query].num_splits <= 1) splits_[query].partial_offset = 0;
  }
  if (num_queries > 0) {
    std::memcpy(plan.blob.data() + queries_offset, splits_.data(),
                num_queries * sizeof(QuerySplits));
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
                          num_of_kind[kWide],
                          num_of_kind[kHeavy],
                          {}};
  std::memcpy(plan.blob.data(), &header, sizeof(header));
}

}  // namespace pat
