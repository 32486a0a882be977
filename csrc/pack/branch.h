// SPDX-License-Identifier: Apache-2.0
// Branch: which parts of the pack tree become one item each. A branch has queries that stand side
// by side in the tree, and all their tokens but those of long nodes and tails. It reads tokens that
// several of its queries share once, and masks tokens for the queries that do not have them, so
// that none of its tokens needs a partial. Ends: the branches at the ends of nodes.
#pragma once

#include <algorithm>
#include <cstdint>
#include <utility>
#include <vector>

#include "../plan.h"
#include "packs.h"
#include "target.h"
#include "tree.h"

namespace pat {

// The queries under the nodes of a tree, side by side as they stand in it.
struct TreeOrder {
  // Orders the queries of a tree, which is kept, with the lengths, until the next call.
  void read(const PackTree& of, const int64_t* lens, int32_t num_queries) {
    tree = &of;
    seq_lens = lens;
    const int32_t num_nodes = count_of(of.nodes);
    position.resize(num_nodes);
    cursor_.resize(num_nodes);
    int32_t end = 0;
    for (int32_t i = 0; i < num_nodes; ++i) {  // parents come before their children
      const PackNode& node = of.nodes[i];
      int32_t& next = node.parent == kNoNode ? end : cursor_[node.parent];
      position[i] = cursor_[i] = next;
      next += node.num_queries;
    }
    queries.resize(end);
    by_length_.clear();
    for (int32_t query = 0; query < num_queries; ++query) {
      if (of.query_node[query] != kNoNode) by_length_.push_back(query);
    }
    // So that what a branch holds does not depend on the order of the batch.
    const auto longer = [&](int32_t a, int32_t b) { return lens[a] > lens[b]; };
    if (!std::is_sorted(by_length_.begin(), by_length_.end(), longer)) {
      std::stable_sort(by_length_.begin(), by_length_.end(), longer);
    }
    for (const int32_t query : by_length_) queries[cursor_[of.query_node[query]]++] = query;
  }

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
              const std::vector<uint8_t>* taken) {
    from_ = &order;
    limit_ = limit;
    taken_ = taken;
    most_queries_ = queries;
    tokens_ = others_ = 0;
    clear();
    packs.num_nodes = count_of(from_->tree->nodes);
    packs.packs.resize(packs.num_nodes + count_of(from_->tree->query_node));
    cut_nodes(packs);
    cut_tails(packs);
    for (int32_t i = packs.num_nodes; i-- > 0;) {
      const int32_t parent = from_->tree->nodes[i].parent;
      if (parent != kNoNode) subtree_[parent] += subtree_[i];
    }
    group();
    return tokens_;
  }

  // Lists the branches of the last cut, with room for their tails to grow. Returns false, with no
  // branches, if one would have more than kBranchSegments segments or if they exceed the target's
  // max_segments or max_branch_tokens.
  bool build(const Target& target) {
    clear();
    const int32_t num_groups = count_of(ends_);
    branch_of_.assign(from_->tree->query_node.size(), kNoNode);
    seen_by_.assign(from_->tree->nodes.size(), kNoNode);
    rank_.assign(order_.size() + 1, 0);
    branches_.assign(num_groups, {});
    for (Branch& branch : branches_) branch.peer = kNoNode;
    pair(target);
    int64_t tokens = 0;  // of the snapshot's list
    for (int32_t g = 0; g < num_groups; ++g) {
      list_members(g);
      list_segments(g);
      const Branch& branch = branches_[g];
      branches_[g].list_start = static_cast<int32_t>(tokens);
      for (int32_t i = 0; i < branch.num_segments; ++i) {
        tokens += segments_[branch.first_segment + i].room;
      }
      tokens = (tokens + kBranchAlign - 1) / kBranchAlign * kBranchAlign;
      if (branch.num_segments > kBranchSegments || tokens > target.max_branch_tokens ||
          count_of(segments_) > target.max_segments) {
        clear();
        return false;
      }
    }
    list_tokens_ = static_cast<int32_t>(tokens);
    return true;
  }

  void clear() {
    branches_.clear();
    segments_.clear();
    members_.clear();
    list_tokens_ = 0;
  }

  const std::vector<Branch>& branches() const { return branches_; }
  // By branch, their nodes from the root on, then the tails, or the other way round.
  const std::vector<Segment>& segments() const { return segments_; }
  const std::vector<int32_t>& members() const { return members_; }  // queries, by branch
  int32_t list_tokens() const { return list_tokens_; }              // length of the snapshot's list
  // The branch that has a query as a member, or kNoNode.
  int32_t branch_of(int32_t query) const { return branches_.empty() ? kNoNode : branch_of_[query]; }

 private:
  // A branch to be.
  struct Group {
    int32_t parent = kNoNode;  // of its subtrees, or where its queries end
    int32_t queries = 0;
    int32_t most = 0;
    int64_t tokens = 0;  // below the parent
  };

  // Whether a node, or the tail of a query that ends there, stays an item of its own, which no
  // branch reads. `tokens`: its own.
  bool has_own_item(int32_t node, int32_t tokens) const {
    return taken_ == nullptr ? tokens > limit_ : tokens > 0 && !(*taken_)[node];
  }

  // Nearest such node from `node` upwards.
  int32_t own_item_from(int32_t node) const {
    if (node == kNoNode) return kNoNode;
    const int32_t tokens = from_->tree->nodes[node].end - from_->tree->nodes[node].start;
    return has_own_item(node, tokens) ? node : above_[node];
  }

  // Tokens of a query's tail that branches take.
  int32_t tail_tokens(int32_t query) const {
    const auto tokens =
        static_cast<int32_t>(from_->seq_lens[query] - from_->tree->query_prefix[query]);
    return has_own_item(from_->tree->query_node[query], tokens) ? 0 : tokens;
  }

  void cut_nodes(Packs& packs) {
    const int32_t num_nodes = packs.num_nodes;
    top_.resize(num_nodes);
    above_.resize(num_nodes);
    path_.resize(num_nodes);
    subtree_.resize(num_nodes);
    for (int32_t i = 0; i < num_nodes; ++i) {
      const PackNode& node = from_->tree->nodes[i];
      const int32_t tokens = node.end - node.start;
      const bool own_item = has_own_item(i, tokens);
      const bool root = node.parent == kNoNode;
      top_[i] = root ? kNoNode : top_[node.parent];
      if (top_[i] == kNoNode && node.num_queries <= most_queries_) top_[i] = i;
      above_[i] = own_item_from(node.parent);
      subtree_[i] = own_item ? 0 : tokens;
      others_ += own_item ? tokens : 0;
      path_[i] = (root ? 0 : path_[node.parent]) + subtree_[i];
      packs.packs[i] = {node.start, node.end, own_item ? node.num_queries : 0, above_[i], 1, 0};
    }
  }

  void cut_tails(Packs& packs) {
    for (int32_t query = 0; query < count_of(from_->tree->query_node); ++query) {
      const int32_t node = from_->tree->query_node[query];
      const int32_t start = node == kNoNode ? 0 : from_->tree->query_prefix[query];
      const auto end = static_cast<int32_t>(from_->seq_lens[query]);
      const int32_t for_branch = node == kNoNode ? 0 : tail_tokens(query);
      const bool own_item = end - start > for_branch;
      others_ += own_item ? end - start : 0;
      packs.packs[packs.num_nodes + query] = {start, end, own_item, own_item_from(node), 1, 0};
      if (node != kNoNode) subtree_[node] += for_branch;
    }
  }

  // Cuts order_ into groups: subtrees of few enough queries, and the queries that end at one larger
  // node, side by side under the same node as long as they are few enough.
  void group() {
    const PackTree& tree = *from_->tree;
    ends_.clear();
    order_ = from_->queries;
    Group group;
    int32_t dealt = 0;
    for (int32_t i = 0; i < count_of(order_);) {
      const int32_t node = tree.query_node[from_->queries[i]];
      const bool whole = top_[node] != kNoNode;  // a subtree
      const int32_t first = whole ? top_[node] : node;
      const int32_t step = whole ? tree.nodes[first].num_queries : 1;
      const int32_t under = whole ? tree.nodes[first].parent : node;
      if (group.queries == 0 || under != group.parent || under == kNoNode ||
          group.queries + step > group.most) {
        finish(group, i);
        group.parent = under;
        group.most = most_queries_;
        if (!whole) {  // the rest of the node's queries end there: groups of one size
          const int32_t rest = from_->position[first] + tree.nodes[first].num_queries - i;
          const int32_t groups = (rest + group.most - 1) / group.most;
          group.most = (rest + groups - 1) / groups;
          if (i >= dealt) deal(i, rest, group.most);
          dealt = std::max(dealt, i + rest);
        }
      }
      group.queries += step;
      group.tokens += whole ? subtree_[first] : tail_tokens(order_[i]);
      i += step;
    }
    finish(group, count_of(order_));
  }

  // Ends a group before position `end` of order_.
  void finish(Group& group, int32_t end) {
    if (group.queries == 0) return;
    if (group.parent != kNoNode) group.tokens += path_[group.parent];
    tokens_ += group.tokens;
    ends_.push_back(end);
    group.queries = 0;
    group.tokens = 0;
  }

  // Deals `queries` of the order from `first` on out to groups of `most`, so that each has long
  // ones and short ones.
  void deal(int32_t first, int32_t queries, int32_t most) {
    const int32_t groups = (queries + most - 1) / most;
    const int32_t* from = from_->queries.data() + first;
    int32_t* to = order_.data() + first;
    if (groups == 1 || from_->seq_lens[from[0]] == from_->seq_lens[from[queries - 1]]) return;
    for (int32_t group = 0; group < groups; ++group) {
      for (int32_t i = group; i < queries; i += groups) *to++ = from[i];
    }
  }

  int32_t begin_of(int32_t branch) const { return branch == 0 ? 0 : ends_[branch - 1]; }

  // Tokens that all queries of a branch and of the one before it attend to, as whole KV tiles.
  int32_t common_tokens(int32_t branch) const {
    int32_t node = from_->tree->query_node[order_[begin_of(branch - 1)]];
    while (node != kNoNode &&
           from_->position[node] + from_->tree->nodes[node].num_queries < ends_[branch]) {
      node = from_->tree->nodes[node].parent;
    }
    return node == kNoNode ? 0 : static_cast<int32_t>(path_[node] / kBranchAlign * kBranchAlign);
  }

  // Pairs neighbours so that all pairs together have the most tokens in common.
  void pair(const Target& target) {
    const int32_t num_branches = count_of(branches_);
    const int64_t pairs = int64_t{num_branches} / 2 * target.num_kv_heads;  // at most
    if (target.items_per_sm != 2 || !target.fills_sms(pairs) ||
        kBranchesToOthers * others_ > tokens_) {
      return;
    }
    common_.assign(num_branches, 0);
    most_common_.assign(num_branches + 1, 0);
    for (int32_t g = 1; g < num_branches; ++g) {
      const int32_t tokens = common_tokens(g);
      if (tokens >= kLeastCommonTokens) common_[g] = tokens;
      most_common_[g + 1] = std::max(most_common_[g], most_common_[g - 1] + common_[g]);
    }
    for (int32_t g = num_branches - 1; g > 0; --g) {
      if (most_common_[g + 1] == most_common_[g]) continue;
      branches_[g].common = branches_[g - 1].common = common_[g];
      branches_[g].peer = g - 1;
      branches_[g - 1].peer = g;
      --g;
    }
  }

  // Lists those queries of a branch that have tokens in it.
  void list_members(int32_t g) {
    branches_[g].first_member = count_of(members_);
    for (int32_t i = begin_of(g); i < ends_[g]; ++i) {
      const int32_t query = order_[i];
      if (path_[from_->tree->query_node[query]] + tail_tokens(query) > 0) {
        branch_of_[query] = g;
        members_.push_back(query);
      }
      rank_[i + 1] = count_of(members_);
    }
    branches_[g].num_queries = count_of(members_) - branches_[g].first_member;
  }

  // Lists the nodes of a branch from the root on, then its tails, or the other way round.
  void list_segments(int32_t g) {
    Branch& branch = branches_[g];
    branch.first_segment = count_of(segments_);
    branch.tails_first = g % 2 == 1 && branch.peer == kNoNode;
    nodes_.clear();
    for (int32_t i = begin_of(g); i < ends_[g]; ++i) {
      int32_t node = from_->tree->query_node[order_[i]];
      for (; node != kNoNode && seen_by_[node] != g; node = from_->tree->nodes[node].parent) {
        seen_by_[node] = g;
        const int32_t tokens = from_->tree->nodes[node].end - from_->tree->nodes[node].start;
        if (tokens > 0 && !has_own_item(node, tokens)) nodes_.push_back(node);
      }
    }
    std::sort(nodes_.begin(), nodes_.end());
    if (branch.tails_first) {
      list_tails(g);
      std::reverse(nodes_.begin(), nodes_.end());
    }
    for (const int32_t node : nodes_) list_node(g, node);
    if (!branch.tails_first) list_tails(g);
    branch.num_segments = count_of(segments_) - branch.first_segment;
  }

  void list_node(int32_t g, int32_t index) {
    Branch& branch = branches_[g];
    const PackNode& node = from_->tree->nodes[index];
    const int32_t begin = std::max(from_->position[index], begin_of(g));
    const int32_t end = std::min(from_->position[index] + node.num_queries, ends_[g]);
    const int32_t queries = rank_[end] - rank_[begin], tokens = node.end - node.start;
    segments_.push_back(
        {order_[begin], node.start, tokens, tokens, rank_[begin] - branch.first_member, queries});
    branch.tokens += tokens;
    if (queries == branch.num_queries) branch.unmasked += tokens;
  }

  void list_tails(int32_t g) {
    Branch& branch = branches_[g];
    for (int32_t i = begin_of(g); i < ends_[g]; ++i) {
      const int32_t query = order_[i], tail = tail_tokens(query);
      if (tail == 0) continue;
      segments_.push_back({query, from_->tree->query_prefix[query], kDynamic,
                           tail + kBranchHeadroom, rank_[i] - branch.first_member, 1});
      branch.tokens += tail;
    }
  }

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

// Ends: where each row tile takes as long as any other, the tails of a node's queries cost less as
// one branch than as an item each. A branch with all of a long node would take longer than other
// items, so it gets the node's last tokens alone: as many as make it as long as the node's pieces.
class Ends {
 public:
  // Lists what branches of `most` queries would have to read, as packs: nodes together with the
  // tails below them. The tree must live until cut().
  const Packs& list(const Target& target, const PackTree& tree, const int64_t* seq_lens,
                    int32_t num_queries, int32_t most) {
    tree_ = &tree;
    tails_.assign(tree.nodes.size(), {});
    packs_.num_nodes = count_of(tree.nodes);
    packs_.packs.clear();
    for (int32_t query = 0; query < num_queries; ++query) {
      const int32_t node = tree.query_node[query];
      if (node == kNoNode) continue;
      ++tails_[node].queries;
      tails_[node].tokens += seq_lens[query] - tree.query_prefix[query];
    }
    for (int32_t i = 0; i < packs_.num_nodes; ++i) {
      const PackNode& node = tree.nodes[i];
      Tails& tails = tails_[i];
      if (tails.queries < node.num_queries) tails = {};
      int64_t tokens = node.end - node.start;
      if (tails.queries > 0) {
        const int32_t together = std::min(tails.queries, most);
        const int32_t of_tile = std::min(tails.queries, target.max_tile_queries());
        tails.branches = (of_tile + most - 1) / most;
        tails.tokens = (tails.tokens * together + tails.queries - 1) / tails.queries;
        tokens += tails.branches * tails.tokens;
      }
      const auto end = static_cast<int32_t>(std::min<int64_t>(tokens, INT32_MAX));
      packs_.packs.push_back({0, end, node.num_queries, kNoNode, 1, 0});
    }
    for (int32_t query = 0; query < num_queries; ++query) {
      const int32_t node = tree.query_node[query];
      if (node != kNoNode && tails_[node].queries > 0) continue;
      const int64_t tail = seq_lens[query] - (node == kNoNode ? 0 : tree.query_prefix[query]);
      packs_.packs.push_back({0, static_cast<int32_t>(tail), 1, kNoNode, 1, 0});
    }
    return packs_;
  }

  // Cuts the nodes for branches and pieces of about `tokens` tokens. Returns whether there are
  // branches.
  bool cut(int32_t tokens) {
    cut_.nodes.clear();
    pieces_.clear();
    taken_.clear();
    mapped_.resize(tails_.size());
    bool any = false;
    for (int32_t i = 0; i < count_of(tails_); ++i) {
      PackNode node = tree_->nodes[i];
      if (node.parent != kNoNode) node.parent = mapped_[node.parent];
      // Tails of a branch that takes longer than a piece stay items of their own.
      const bool take = tails_[i].queries > 0 && tails_[i].tokens <= tokens;
      any |= take;
      if (const auto [first, each] = take ? pieces_of(i, tokens) : Pieces{}; first > 0) {
        add(node, node.start + static_cast<int32_t>(first), each);
        node.parent = count_of(cut_.nodes) - 1;
        node.start += static_cast<int32_t>(first);
      }
      add(node, node.end, tokens);
      taken_.back() = take;
      mapped_[i] = count_of(cut_.nodes) - 1;
    }
    pieces_.resize(pieces_.size() + tree_->query_node.size(), tokens);
    cut_.query_prefix = tree_->query_prefix;
    cut_.query_node = tree_->query_node;
    for (int32_t& node : cut_.query_node) {
      if (node != kNoNode) node = mapped_[node];
    }
    return any;
  }

  const PackTree& tree() const { return cut_; }  // with the nodes that were cut as two each
  // [nodes of tree()] whether a node and the tails below it are for branches.
  const std::vector<uint8_t>& taken() const { return taken_; }
  // Tokens of the pieces of a node of tree(), or of a tail behind these, at most.
  int32_t piece_tokens(int32_t pack) const { return pieces_[pack]; }

 private:
  struct Tails {
    int32_t queries = 0;   // that end at a node
    int64_t tokens = 0;    // of their tails; then of those of one branch
    int64_t branches = 0;  // for each row tile
  };
  struct Pieces {
    int64_t tokens = 0;  // of all
    int64_t each = 0;
  };

  // How a node is cut: pieces of whole tiles that are about as long as a branch with the tokens
  // behind them. There are so many that neither takes longer than `tokens` if that can be.
  Pieces pieces_of(int32_t node, int64_t tokens) const {
    const Tails& tails = tails_[node];
    const int64_t all = tree_->nodes[node].end - tree_->nodes[node].start;
    const int64_t work = all + tails.branches * tails.tokens;
    const int64_t count = (work + tokens - 1) / tokens - tails.branches;
    if (count <= 0) return {0, 0};
    const int64_t last = std::max<int64_t>((all - count * tails.tokens) / (count + 1), 0);
    const auto whole = [](int64_t n) { return n / kBranchAlign * kBranchAlign; };
    const int64_t each = whole((all - last) / count + kBranchAlign - 1);
    return {std::min(count * each, whole(all)), each};
  }

  void add(PackNode node, int32_t end, int64_t piece_tokens) {
    node.end = end;
    cut_.nodes.push_back(node);
    pieces_.push_back(static_cast<int32_t>(piece_tokens));
    taken_.push_back(0);
  }

  const PackTree* tree_ = nullptr;
  std::vector<Tails> tails_;     // [nodes], none where queries end further below, too
  std::vector<int32_t> mapped_;  // [nodes] to those of cut_
  Packs packs_;
  PackTree cut_;
  std::vector<uint8_t> taken_;
  std::vector<int32_t> pieces_;  // [nodes of cut_ + queries]
};

}  // namespace pat
