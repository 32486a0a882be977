// SPDX-License-Identifier: Apache-2.0
#include "branch.h"

#include <algorithm>

#include "schedule.h"

namespace pat {

void Brancher::read(const PackTree& tree, const int64_t* seq_lens, size_t num_queries) {
  tree_ = &tree;
  seq_lens_ = seq_lens;
  const size_t num_nodes = tree.nodes.size();
  position_.resize(num_nodes);
  cursor_.resize(num_nodes);
  int32_t end = 0;
  for (size_t i = 0; i < num_nodes; ++i) {  // parents come before their children
    const PackNode& node = tree.nodes[i];
    int32_t& next = node.parent == kNoNode ? end : cursor_[static_cast<size_t>(node.parent)];
    position_[i] = cursor_[i] = next;
    next += node.num_queries;
  }
  sorted_.resize(static_cast<size_t>(end));
  by_length_.clear();
  for (size_t query = 0; query < num_queries; ++query) {
    if (tree.query_node[query] != kNoNode) by_length_.push_back(static_cast<int32_t>(query));
  }
  // So that what a branch holds does not depend on the order of the batch.
  const auto longer = [&](int32_t a, int32_t b) { return seq_lens[a] > seq_lens[b]; };
  if (!std::is_sorted(by_length_.begin(), by_length_.end(), longer)) {
    std::stable_sort(by_length_.begin(), by_length_.end(), longer);
  }
  for (const int32_t query : by_length_) {
    const auto node = static_cast<size_t>(tree.query_node[static_cast<size_t>(query)]);
    sorted_[static_cast<size_t>(cursor_[node]++)] = query;
  }
  clear();
}

void Brancher::clear() {
  branches_.clear();
  segments_.clear();
  members_.clear();
}

int32_t Brancher::tail_tokens(size_t query) const {
  const auto tokens = static_cast<int32_t>(seq_lens_[query] - tree_->query_prefix[query]);
  return kept(tokens) ? 0 : tokens;
}

Load Brancher::cut(const Target& target, const BranchCut& cut, Packs& packs) {
  cut_ = cut;
  const size_t num_nodes = tree_->nodes.size();
  const size_t num_queries = tree_->query_node.size();
  top_.resize(num_nodes);
  above_.resize(num_nodes);
  path_.resize(num_nodes);
  subtree_.resize(num_nodes);
  packs.num_nodes = num_nodes;
  packs.packs.resize(num_nodes + num_queries);
  const auto kept_from = [&](int32_t i) {  // nearest kept node from node i upwards
    if (i == kNoNode) return kNoNode;
    const PackNode& node = tree_->nodes[static_cast<size_t>(i)];
    return kept(node.end - node.start) ? i : above_[static_cast<size_t>(i)];
  };

  for (size_t i = 0; i < num_nodes; ++i) {
    const PackNode& node = tree_->nodes[i];
    const int32_t tokens = node.end - node.start;
    const bool own_item = kept(tokens);
    const bool root = node.parent == kNoNode;
    const auto parent = static_cast<size_t>(node.parent);
    above_[i] = kept_from(node.parent);
    top_[i] = root ? kNoNode : top_[parent];
    if (top_[i] == kNoNode && node.num_queries <= cut.queries) top_[i] = static_cast<int32_t>(i);
    subtree_[i] = own_item ? 0 : tokens;
    path_[i] = (root ? 0 : path_[parent]) + subtree_[i];
    packs.packs[i] = {node.start, node.end, own_item ? node.num_queries : 0, above_[i], 1, 0};
  }
  Load load;
  for (size_t query = 0; query < num_queries; ++query) {
    const int32_t node = tree_->query_node[query];
    const int32_t start = node == kNoNode ? 0 : tree_->query_prefix[query];
    const auto end = static_cast<int32_t>(seq_lens_[query]);
    const int32_t for_branch = node == kNoNode ? 0 : tail_tokens(query);
    const bool own_item = end - start > for_branch;
    const int32_t above = kept_from(node);
    packs.packs[num_nodes + query] = {start, end, own_item ? 1 : 0, above, 1, 0};
    if (node == kNoNode) continue;
    subtree_[static_cast<size_t>(node)] += for_branch;
    const bool member = path_[static_cast<size_t>(node)] + for_branch > 0;
    load.partials += member && (own_item || above != kNoNode);
  }
  for (size_t i = num_nodes; i-- > 0;) {
    const int32_t parent = tree_->nodes[i].parent;
    if (parent != kNoNode) subtree_[static_cast<size_t>(parent)] += subtree_[i];
  }
  group(target, load);
  return load;
}

// Deals `queries` of sorted_ from `first` on out to groups of `most`, so that each has long ones
// and short ones.
void Brancher::deal(int32_t first, int32_t queries, int32_t most) {
  const int32_t groups = (queries + most - 1) / most;
  const int32_t* from = sorted_.data() + first;
  int32_t* to = order_.data() + first;
  if (groups == 1 || seq_lens_[from[0]] == seq_lens_[from[queries - 1]]) return;
  for (int32_t group = 0; group < groups; ++group) {
    for (int32_t i = group; i < queries; i += groups) *to++ = from[i];
  }
}

// Cuts order_ into groups: subtrees of few enough queries, and the queries that end at one larger
// node, side by side under the same node as long as they are few enough.
void Brancher::group(const Target& target, Load& load) {
  ends_.clear();
  order_ = sorted_;
  int32_t parent = kNoNode;  // of the group at hand
  int32_t queries = 0;
  int32_t most = 0;
  int64_t tokens = 0;
  const auto finish = [&](int32_t end) {
    if (queries == 0) return;
    if (parent != kNoNode) tokens += path_[static_cast<size_t>(parent)];
    if (tokens > 0) {
      const double seconds = item_seconds(target, kBranchRows, static_cast<double>(tokens));
      load.seconds += seconds;
      load.longest = std::max(load.longest, seconds);
      load.items += 1.0;
      load.tokens += tokens;
      load.longest_tokens = std::max(load.longest_tokens, tokens);
    }
    ends_.push_back(end);
    queries = 0;
    tokens = 0;
  };
  int32_t dealt = 0;
  for (int32_t i = 0; i < static_cast<int32_t>(order_.size());) {
    const int32_t node = tree_->query_node[static_cast<size_t>(sorted_[static_cast<size_t>(i)])];
    const int32_t top = top_[static_cast<size_t>(node)];
    const bool whole = top != kNoNode;
    const auto first = static_cast<size_t>(whole ? top : node);
    const int32_t step = whole ? tree_->nodes[first].num_queries : 1;
    const int32_t under = whole ? tree_->nodes[first].parent : node;
    if (queries == 0 || under != parent || under == kNoNode || queries + step > most) {
      finish(i);
      parent = under;
      most = cut_.queries;
      if (!whole) {  // the rest of the node's queries end there: groups of one size
        const int32_t rest = position_[first] + tree_->nodes[first].num_queries - i;
        const int32_t groups = (rest + most - 1) / most;
        most = (rest + groups - 1) / groups;
        if (i >= dealt) deal(i, rest, most);
        dealt = std::max(dealt, i + rest);
      }
    }
    queries += step;
    tokens +=
        whole ? subtree_[first] : tail_tokens(static_cast<size_t>(order_[static_cast<size_t>(i)]));
    i += step;
  }
  finish(static_cast<int32_t>(order_.size()));
}

bool Brancher::build() {
  clear();
  const auto& nodes = tree_->nodes;
  const size_t num_groups = ends_.size();
  group_of_.resize(order_.size());
  rank_.resize(order_.size() + 1);
  branch_of_.assign(tree_->query_node.size(), kNoNode);
  branches_.assign(num_groups, {});
  tail_counts_.assign(num_groups, 0);
  rank_[0] = 0;
  for (size_t g = 0, i = 0; g < num_groups; ++g) {
    Branch& branch = branches_[g];
    branch.first_member = static_cast<int32_t>(members_.size());
    for (; i < static_cast<size_t>(ends_[g]); ++i) {
      const auto query = static_cast<size_t>(order_[i]);
      const int32_t tail = tail_tokens(query);
      group_of_[i] = static_cast<int32_t>(g);
      if (path_[static_cast<size_t>(tree_->query_node[query])] + tail > 0) {
        branch_of_[query] = static_cast<int32_t>(g);
        members_.push_back(order_[i]);
      }
      tail_counts_[g] += tail > 0;
      rank_[i + 1] = static_cast<int32_t>(members_.size());
    }
    branch.num_queries = static_cast<int32_t>(members_.size()) - branch.first_member;
  }
  // Calls visit(branch, first position, end) for the branches that a node reaches into.
  const auto for_each_branch = [&](size_t node, const auto& visit) {
    if (kept(nodes[node].end - nodes[node].start)) return;
    const int32_t begin = position_[node];
    const int32_t end = begin + nodes[node].num_queries;
    for (int32_t at = begin; at < end;) {
      const auto g = static_cast<size_t>(group_of_[static_cast<size_t>(at)]);
      const int32_t to = std::min(end, ends_[g]);
      visit(branches_[g], at, to);
      at = to;
    }
  };
  for (size_t i = 0; i < nodes.size(); ++i) {
    for_each_branch(i, [](Branch& branch, int32_t, int32_t) { ++branch.num_segments; });
  }
  int32_t total = 0;
  next_node_.resize(num_groups);
  next_tail_.resize(num_groups);
  for (size_t g = 0; g < num_groups; ++g) {
    Branch& branch = branches_[g];
    const int32_t num_nodes = branch.num_segments;
    branch.num_segments += tail_counts_[g];
    if (branch.num_segments > kBranchSegments) {
      clear();
      return false;
    }
    branch.first_segment = total;
    total += branch.num_segments;
    branch.tails_first = g % 2 == 1;
    next_node_[g] = branch.tails_first ? total - 1 : branch.first_segment;
    next_tail_[g] = branch.first_segment + (branch.tails_first ? 0 : num_nodes);
  }
  segments_.resize(static_cast<size_t>(total));
  for (size_t i = 0; i < nodes.size(); ++i) {
    for_each_branch(i, [&](Branch& branch, int32_t begin, int32_t end) {
      const int32_t first = rank_[static_cast<size_t>(begin)];
      const int32_t queries = rank_[static_cast<size_t>(end)] - first;
      const int32_t tokens = nodes[i].end - nodes[i].start;
      int32_t& at = next_node_[static_cast<size_t>(group_of_[static_cast<size_t>(begin)])];
      segments_[static_cast<size_t>(at)] = {
          order_[static_cast<size_t>(begin)], nodes[i].start, tokens, tokens,
          first - branch.first_member,        queries};
      at += branch.tails_first ? -1 : 1;
      branch.tokens += tokens;
      if (queries == branch.num_queries) branch.seen_by_all += tokens;
    });
  }
  for (size_t i = 0; i < order_.size(); ++i) {
    const auto query = static_cast<size_t>(order_[i]);
    const int32_t tail = tail_tokens(query);
    if (tail == 0) continue;
    const auto g = static_cast<size_t>(group_of_[i]);
    segments_[static_cast<size_t>(next_tail_[g]++)] = {
        order_[i], tree_->query_prefix[query], tail, 0, rank_[i] - branches_[g].first_member, 1};
    branches_[g].tokens += tail;
  }
  return true;
}

}  // namespace pat
