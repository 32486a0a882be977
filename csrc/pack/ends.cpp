// SPDX-License-Identifier: Apache-2.0
#include "ends.h"

#include <algorithm>

#include "../plan.h"

namespace pat {

const Packs& Ends::list(const Target& target, const PackTree& tree, const int64_t* seq_lens,
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

// How a node is cut: pieces of whole tiles that are about as long as a branch with the tokens
// behind them. There are so many that neither takes longer than `tokens` if that can be.
Ends::Pieces Ends::pieces_of(int32_t node, int64_t tokens) const {
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

void Ends::add(PackNode node, int32_t end, int64_t piece_tokens) {
  node.end = end;
  cut_.nodes.push_back(node);
  pieces_.push_back(static_cast<int32_t>(piece_tokens));
  taken_.push_back(0);
}

bool Ends::cut(int32_t tokens) {
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

}  // namespace pat
