// SPDX-License-Identifier: Apache-2.0
// Branch: which parts of the pack tree become one item each. A branch has queries that stand side
// by side in the tree, and all their tokens but those of long nodes and tails. It reads tokens that
// several of its queries share once, and masks tokens for the queries that do not have them, so
// that none of its tokens needs a partial.
#pragma once

#include <cstdint>
#include <vector>

#include "../plan.h"
#include "packs.h"
#include "target.h"
#include "tree.h"

namespace pat {

// The queries under the nodes of a tree, side by side as they stand in it.
struct TreeOrder {
  // Orders the queries of a tree, which is kept, with the lengths, until the next call.
  void read(const PackTree& tree, const int64_t* seq_lens, int32_t num_queries);

  const PackTree* tree = nullptr;
  const int64_t* seq_lens = nullptr;
  std::vector<int32_t> queries;   // those that end at one node by length, the longest first
  std::vector<int32_t> position;  // [nodes] of a node's first query in `queries`

 private:
  std::vector<int32_t> cursor_;     // [nodes]
  std::vector<int32_t> by_length_;  // queries under any node
};

struct Branch {
  int32_t first_member;   // into Brancher::members
  int32_t num_queries;    // 0: its nodes and tails all stay items of their own
  int32_t first_segment;  // into Brancher::segments
  int32_t num_segments;
  int32_t list_start;  // token position in the snapshot's list
  int32_t tokens;      // scheduled
  int32_t unmasked;    // of these, those that all members attend to
  bool tails_first;
  int32_t peer;    // the branch before or behind it that it is paired with, or kNoNode
  int32_t common;  // tokens that both begin with, whole KV tiles; 0 without a peer
};

// Keeps its working memory between calls.
class Brancher {
 public:
  // Cuts a tree into branches of at most so many queries; nodes and tails of more than `limit`
  // tokens, which it leaves in `packs`, stay items of their own. Returns the tokens that the
  // branches read; `order` must live until build(). `taken`, [nodes], says instead of `limit` which
  // nodes, with the tails of the queries that end there, are no items of their own.
  int64_t cut(const TreeOrder& order, int32_t limit, int32_t queries, Packs& packs,
              const std::vector<uint8_t>* taken = nullptr);
  // Lists the branches of the last cut, with room for their tails to grow. Returns false, with no
  // branches, if one would have more than kBranchSegments segments or if they exceed the target's
  // max_segments or max_branch_tokens.
  bool build(const Target& target);
  void clear();

  const std::vector<Branch>& branches() const { return branches_; }
  // By branch, their nodes from the root on, then the tails, or the other way round.
  const std::vector<Segment>& segments() const { return segments_; }
  const std::vector<int32_t>& members() const { return members_; }  // queries, by branch
  int32_t list_tokens() const { return list_tokens_; }              // length of the snapshot's list
  // The branch that has a query as a member, or kNoNode.
  int32_t branch_of(int32_t query) const { return branches_.empty() ? kNoNode : branch_of_[query]; }

 private:
  struct Group;  // a branch to be, see branch.cpp

  // Whether a node, or the tail of a query that ends there, stays an item of its own, which no
  // branch reads. `tokens`: its own.
  bool has_own_item(int32_t node, int32_t tokens) const {
    return taken_ == nullptr ? tokens > limit_ : tokens > 0 && !(*taken_)[node];
  }
  int32_t own_item_from(int32_t node) const;  // nearest such node from `node` upwards
  int32_t tail_tokens(int32_t query) const;   // that branches take
  void cut_nodes(Packs& packs);
  void cut_tails(Packs& packs);
  void group();
  void finish(Group& group, int32_t end);
  void deal(int32_t first, int32_t queries, int32_t most);
  int32_t begin_of(int32_t branch) const { return branch == 0 ? 0 : ends_[branch - 1]; }
  int32_t common_tokens(int32_t branch) const;
  void pair(const Target& target);
  void list_members(int32_t branch);
  void list_segments(int32_t branch);
  void list_node(int32_t branch, int32_t index);
  void list_tails(int32_t branch);

  const TreeOrder* from_ = nullptr;
  int32_t limit_ = 0, most_queries_ = 0;  // of the last cut
  const std::vector<uint8_t>* taken_ = nullptr;
  std::vector<int32_t> order_;  // as TreeOrder::queries, dealt out to the branches of a node
  std::vector<int32_t> top_;    // [nodes] root of the largest subtree with it that one branch holds
  std::vector<int32_t> above_;  // [nodes] nearest one above with an item of its own
  std::vector<int64_t> path_;   // [nodes] tokens for branches from the root to the node's end
  std::vector<int64_t> subtree_;      // [nodes] tokens for branches of the node and all below
  std::vector<int32_t> ends_;         // in order_, of groups of queries: each is a branch
  std::vector<int32_t> rank_;         // [order_ + 1] members before a position
  std::vector<int32_t> branch_of_;    // [queries]
  std::vector<int32_t> common_;       // [branches] tokens in common with the branch before
  std::vector<int64_t> most_common_;  // [branches + 1] of pairs of the branches before
  std::vector<int32_t> nodes_;        // of a branch
  std::vector<int32_t> seen_by_;      // [nodes] the last branch that has come across a node
  std::vector<Branch> branches_;
  std::vector<Segment> segments_;
  std::vector<int32_t> members_;
  int32_t list_tokens_ = 0;
  int64_t tokens_ = 0;  // that the branches of the last cut read
  int64_t others_ = 0;  // that it leaves to ordinary items
};

}  // namespace pat
