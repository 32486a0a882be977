// SPDX-License-Identifier: Apache-2.0
// Branches of the pack tree that are done as one item each: queries that stand side by side in the
// tree, with all their tokens but those of long nodes and tails. What several of them share is read
// once for all, what is one query's own is masked for the others: none of it needs a partial.
#pragma once

#include <cstdint>
#include <vector>

#include "../plan.h"
#include "target.h"
#include "tree.h"

namespace pat {

struct Packs;

// A way to cut a tree into branches.
struct BranchCut {
  int32_t limit = 0;    // nodes and tails of more tokens stay items of their own
  int32_t queries = 0;  // of a branch, at most; 0: no branches
};

// What branches ask of the units, for one KV head.
struct Load {
  double seconds = 0.0;  // modelled as of items, all branches
  double longest = 0.0;  // seconds of the longest
  double items = 0.0;
  int64_t tokens = 0;  // of all branches
  int64_t longest_tokens = 0;
  int64_t partials = 0;  // of queries that have other items beside
};

struct Branch {
  int32_t first_member;  // into Brancher::members
  int32_t num_queries;
  int32_t first_segment;  // into Brancher::segments
  int32_t num_segments;
  int32_t tokens;       // scheduled
  int32_t seen_by_all;  // of these, by all members
  bool tails_first;
};

class Brancher {
 public:
  // Orders the queries of a tree, which is kept, with the lengths, until the next call.
  void read(const PackTree& tree, const int64_t* seq_lens, size_t num_queries);
  // Leaves in `packs` what a cut leaves to ordinary items and adds up what its branches ask for.
  Load cut(const Target& target, const BranchCut& cut, Packs& packs);
  // Lists the branches of the last cut. Returns false, with no branches, if one would have more
  // than kBranchSegments segments.
  bool build();
  void clear();

  const std::vector<Branch>& branches() const { return branches_; }
  // By branch, their nodes from the root on, then the tails, or the other way round. Tails have
  // their scheduled length and no room yet.
  const std::vector<Segment>& segments() const { return segments_; }
  const std::vector<int32_t>& members() const { return members_; }  // queries, by branch
  // The branch that has a query as a member, or kNoNode.
  int32_t branch_of(size_t query) const { return branches_.empty() ? kNoNode : branch_of_[query]; }

 private:
  bool kept(int32_t tokens) const { return tokens > cut_.limit; }
  int32_t tail_tokens(size_t query) const;  // that branches take
  void group(const Target& target, Load& load);
  void deal(int32_t first, int32_t queries, int32_t most);

  const PackTree* tree_ = nullptr;
  const int64_t* seq_lens_ = nullptr;
  BranchCut cut_;
  std::vector<int32_t> sorted_;     // queries under a node, as they stand in the tree; those that
                                    // end at one node by length, the longest first
  std::vector<int32_t> order_;      // the same, dealt out to the branches of a node
  std::vector<int32_t> by_length_;  // queries under any node
  std::vector<int32_t> position_;   // [nodes] of a node's first query in order_
  std::vector<int32_t> cursor_;     // [nodes]
  std::vector<int32_t> top_;        // [nodes] highest of it and those above that one branch holds
  std::vector<int32_t> above_;      // [nodes] nearest kept node above
  std::vector<int64_t> path_;       // [nodes] tokens for branches from the root to the node's end
  std::vector<int64_t> subtree_;    // [nodes] tokens for branches of the node and all below
  std::vector<int32_t> ends_;       // in order_, of groups of queries: each is a branch
  std::vector<int32_t> group_of_;   // [order_]
  std::vector<int32_t> rank_;       // [order_ + 1] members before a position
  std::vector<int32_t> branch_of_;  // [queries]
  std::vector<int32_t> tail_counts_, next_node_, next_tail_;  // [branches]
  std::vector<Branch> branches_;
  std::vector<Segment> segments_;
  std::vector<int32_t> members_;
};

}  // namespace pat
