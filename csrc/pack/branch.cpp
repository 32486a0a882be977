// SPDX-License-Identifier: Apache-2.0
#include "branch.h"

#include <algorithm>
#include <utility>

#include "costs.h"

namespace pat {

void TreeOrder::read(const PackTree& of, const int64_t* lens, int32_t num_queries) {
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

void Brancher::clear() {
  branches_.clear();
  segments_.clear();
  members_.clear();
  list_tokens_ = 0;
}

int32_t Brancher::tail_tokens(int32_t query) const {
  const auto tokens =
      static_cast<int32_t>(from_->seq_lens[query] - from_->tree->query_prefix[query]);
  return has_own_item(from_->tree->query_node[query], tokens) ? 0 : tokens;
}

int32_t Brancher::own_item_from(int32_t node) const {
  if (node == kNoNode) return kNoNode;
  const int32_t tokens = from_->tree->nodes[node].end - from_->tree->nodes[node].start;
  return has_own_item(node, tokens) ? node : above_[node];
}

int64_t Brancher::cut(const TreeOrder& order, int32_t limit, int32_t queries, Packs& packs,
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

void Brancher::cut_nodes(Packs& packs) {
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

void Brancher::cut_tails(Packs& packs) {
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

// Deals `queries` of the order from `first` on out to groups of `most`, so that each has long ones
// and short ones.
void Brancher::deal(int32_t first, int32_t queries, int32_t most) {
  const int32_t groups = (queries + most - 1) / most;
  const int32_t* from = from_->queries.data() + first;
  int32_t* to = order_.data() + first;
  if (groups == 1 || from_->seq_lens[from[0]] == from_->seq_lens[from[queries - 1]]) return;
  for (int32_t group = 0; group < groups; ++group) {
    for (int32_t i = group; i < queries; i += groups) *to++ = from[i];
  }
}

struct Brancher::Group {
  int32_t parent = kNoNode;  // of its subtrees, or where its queries end
  int32_t queries = 0;
  int32_t most = 0;
  int64_t tokens = 0;  // below the parent
};

// Ends a group before position `end` of order_.
void Brancher::finish(Group& group, int32_t end) {
  if (group.queries == 0) return;
  if (group.parent != kNoNode) group.tokens += path_[group.parent];
  tokens_ += group.tokens;
  ends_.push_back(end);
  group.queries = 0;
  group.tokens = 0;
}

// Cuts order_ into groups: subtrees of few enough queries, and the queries that end at one larger
// node, side by side under the same node as long as they are few enough.
void Brancher::group() {
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

bool Brancher::build(const Target& target) {
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

// Lists those queries of a branch that have tokens in it.
void Brancher::list_members(int32_t g) {
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
void Brancher::list_segments(int32_t g) {
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

void Brancher::list_node(int32_t g, int32_t index) {
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

void Brancher::list_tails(int32_t g) {
  Branch& branch = branches_[g];
  for (int32_t i = begin_of(g); i < ends_[g]; ++i) {
    const int32_t query = order_[i], tail = tail_tokens(query);
    if (tail == 0) continue;
    segments_.push_back({query, from_->tree->query_prefix[query], kDynamic, tail + kBranchHeadroom,
                         rank_[i] - branch.first_member, 1});
    branch.tokens += tail;
  }
}

// Tokens that all queries of a branch and of the one before it attend to, as whole KV tiles.
int32_t Brancher::common_tokens(int32_t branch) const {
  int32_t node = from_->tree->query_node[order_[begin_of(branch - 1)]];
  while (node != kNoNode &&
         from_->position[node] + from_->tree->nodes[node].num_queries < ends_[branch]) {
    node = from_->tree->nodes[node].parent;
  }
  return node == kNoNode ? 0 : static_cast<int32_t>(path_[node] / kBranchAlign * kBranchAlign);
}

// Pairs neighbours so that all pairs together have the most tokens in common.
void Brancher::pair(const Target& target) {
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

}  // namespace pat
