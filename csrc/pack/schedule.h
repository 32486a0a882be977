// SPDX-License-Identifier: Apache-2.0
// Pack tree -> plan: which queries share an item (PAT section 5.1), where long items split (section
// 6), which tile each item takes (section 5.2) and in which order they run.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "../plan.h"
#include "branch.h"
#include "target.h"
#include "tree.h"

namespace pat {

struct Plan {
  std::vector<uint8_t> blob;  // PlanHeader, items, members, queries: see plan.h
  // The plan holds while min_seq_lens[q] <= seq_lens[q] <= max_seq_lens[q] for every query. The
  // room above the scheduled length grows with the tail, so that plans get rarer as sequences get
  // longer.
  std::vector<int64_t> min_seq_lens;
  std::vector<int64_t> max_seq_lens;
  // Tokens that the items read for one layer and KV head, re-reads counted, are fixed_tokens plus
  // sum(seq_lens): each query has at most one tail item, and its length enters once.
  int64_t fixed_tokens = 0;
  // Why a simpler plan was made than the rules ask for: empty, or the capacity that was too small.
  std::string degraded;

  const PlanHeader& header() const { return *reinterpret_cast<const PlanHeader*>(blob.data()); }
};

// A pack: consecutive tokens of one row that a set of queries attends to.
struct Pack {
  int32_t start;
  int32_t end;      // scheduled end; a tail really ends at its sequence length
  int32_t queries;  // members left after merging; 0 means that no item comes of it
  int32_t above;    // pack that holds the tokens before `start`, or kNoNode
  int32_t pieces;   // KV splits
  int32_t chunk;    // tokens of each piece but the last

  int32_t tokens() const { return end - start; }
};

// Packs of a batch: one per tree node, then one per query (its private tail).
struct Packs {
  std::vector<Pack> packs;  // [num_nodes + num_queries]
  size_t num_nodes = 0;

  const Pack& tail(size_t query) const { return packs[num_nodes + query]; }
};

// Decides which nodes and tails merge with the packs above them. `use_tree` false ignores sharing.
class Packer {
 public:
  explicit Packer(const Target& target) : target_(target) {}
  void choose(const PackTree& tree, const int64_t* seq_lens, size_t num_queries, bool use_tree,
              Packs& out);

 private:
  void merge_below(const PackTree& tree, size_t node, Packs& out);
  void merge_by_bytes(const PackTree& tree, size_t node, Packs& out);
  int32_t tails_of(size_t node) const { return tail_offsets_[node + 1] - tail_offsets_[node]; }
  double gain(double tokens, int64_t queries, int64_t merged, double partials) const;

  const Target& target_;
  std::vector<int32_t> child_offsets_, children_;  // nodes by parent, CSR
  std::vector<int32_t> tail_offsets_, tails_;      // queries with a private tail by node, CSR
  std::vector<uint8_t> merged_;                    // [nodes + queries]
};

// Sets Pack::pieces and Pack::chunk. `enabled` false leaves every pack whole. `branches` run beside
// the packs.
void split_packs(const Target& target, Packs& packs, bool enabled, const Load& branches = {});

// Modelled seconds of packs that are split and of the branches beside them; `unique_tokens`: of the
// batch, each node's once.
double modelled_seconds(const Target& target, const Packs& packs, const Load& branches,
                        int64_t unique_tokens);

// Makes plans. Keeps its working memory between calls; not thread-safe.
class Scheduler {
 public:
  // Throws std::invalid_argument for a target that makes no sense.
  explicit Scheduler(const Target& target);
  // Time linear in queries x tree depth (but for sorting the shared nodes). Deterministic: equal
  // input gives an equal plan. Throws std::invalid_argument for a batch beyond max_queries.
  Plan schedule(const PackTree& tree, const int64_t* seq_lens, size_t num_queries);

 private:
  std::string fit(const PackTree& tree, const int64_t* seq_lens, size_t num_queries);
  bool assign_partials(size_t num_queries);
  bool wide_items_fill() const;
  void choose_branches(const PackTree& tree, const int64_t* seq_lens, size_t num_queries);
  bool place_branches();
  bool drop_branches();
  void emit(Plan& plan, const int64_t* seq_lens, size_t num_queries);
  int32_t list_branches(Plan& plan);
  void push_item(const Item& item, double seconds);

  const Target target_;
  // Packing goes by what one half of a unit holds; and so does all of a plan that has too few wide
  // items to give every unit one.
  const Target without_wide_;
  const Target* tiles_ = nullptr;  // of the two, the one whose row tiles the plan at hand has
  Packer packer_;
  Brancher brancher_;
  Packs packs_;
  Packs cut_packs_;  // of a way to branch that is looked at
  int64_t num_items_ = 0;
  int64_t num_partials_ = 0;
  std::vector<QuerySplits> splits_;      // [queries]
  std::vector<int32_t> member_offsets_;  // [packs + 1]
  std::vector<Member> members_;          // by pack; Member::partial counts from the query's first
  std::vector<Item> items_;
  std::vector<uint32_t> keys_;  // LPT bucket of each item
  std::vector<int32_t> buckets_;
  Load load_;                           // of the branches
  std::vector<Segment> segments_;       // of the branches, with their room
  std::vector<int32_t> branch_starts_;  // in the snapshot's list
  int32_t branch_tokens_ = 0;           // of the list
  std::array<int32_t, 3> num_of_kind_{};
};

// Packed-row tile for `queries` queries and KV tile for `tokens` tokens: the smallest that holds
// them, else the largest. A pack of more queries than fit takes several row tiles.
int32_t row_tile_for(const Target& target, int32_t queries);
int32_t kv_tile_for(const Target& target, int32_t tokens);
// Row tiles, hence items, that `queries` queries take.
int64_t num_row_tiles(const Target& target, int64_t queries);
// Modelled seconds of one item on one unit: overhead + max(memory, arithmetic).
double item_seconds(const Target& target, int32_t row_tile, double tokens);

}  // namespace pat
