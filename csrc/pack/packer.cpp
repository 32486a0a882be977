// SPDX-License-Identifier: Apache-2.0
// Which queries share an item: PAT section 5.1, TreeHeuristic with three profit rules.
#include <algorithm>
#include <numeric>

#include "schedule.h"

namespace pat {

void Packer::choose(const PackTree& tree, const int64_t* seq_lens, size_t num_queries,
                    bool use_tree, Packs& out) {
  const size_t num_nodes = use_tree ? tree.nodes.size() : 0;
  out.num_nodes = num_nodes;
  out.packs.resize(num_nodes + num_queries);
  merged_.assign(num_nodes + num_queries, 0);

  child_offsets_.assign(num_nodes + 2, 0);
  tail_offsets_.assign(num_nodes + 2, 0);
  for (size_t i = 0; i < num_nodes; ++i) {
    const PackNode& node = tree.nodes[i];
    out.packs[i] = {node.start, node.end, node.num_queries, node.parent, 1, 0};
    if (node.parent != kNoNode) ++child_offsets_[static_cast<size_t>(node.parent) + 2];
  }
  for (size_t query = 0; query < num_queries; ++query) {
    const int32_t node = use_tree ? tree.query_node[query] : kNoNode;
    const int32_t start = node == kNoNode ? 0 : tree.query_prefix[query];
    const int32_t end = static_cast<int32_t>(seq_lens[query]);
    out.packs[num_nodes + query] = {start, end, end > start ? 1 : 0, node, 1, 0};
    if (node != kNoNode && end > start) ++tail_offsets_[static_cast<size_t>(node) + 2];
  }
  std::partial_sum(child_offsets_.begin(), child_offsets_.end(), child_offsets_.begin());
  std::partial_sum(tail_offsets_.begin(), tail_offsets_.end(), tail_offsets_.begin());
  children_.resize(num_nodes);
  tails_.resize(num_queries);
  for (size_t i = 0; i < num_nodes; ++i) {
    const int32_t parent = tree.nodes[i].parent;
    if (parent == kNoNode) continue;
    const size_t slot = static_cast<size_t>(child_offsets_[static_cast<size_t>(parent) + 1]++);
    children_[slot] = static_cast<int32_t>(i);
  }
  for (size_t query = 0; query < num_queries; ++query) {
    const Pack& tail = out.tail(query);
    if (tail.above == kNoNode || tail.queries == 0) continue;
    const size_t slot = static_cast<size_t>(tail_offsets_[static_cast<size_t>(tail.above) + 1]++);
    tails_[slot] = static_cast<int32_t>(query);
  }
  child_offsets_.pop_back();  // the fill above moved entry i + 1 to the end of row i
  tail_offsets_.pop_back();

  for (size_t node = 0; node < num_nodes; ++node) merge_below(tree, node, out);
}

// Decides for every child and tail of `node` and gives those that merge the node's tokens as well.
void Packer::merge_below(const PackTree& tree, size_t node, Packs& out) {
  const int32_t own_tokens = tree.nodes[node].end - tree.nodes[node].start;
  switch (target_.policy) {
    case Policy::kNaive:
      break;
    case Policy::kPaper:  // Algorithm 1, line 6: split iff 4 * size < len
      for (int32_t i = child_offsets_[node]; i < child_offsets_[node + 1]; ++i) {
        const size_t child = static_cast<size_t>(children_[static_cast<size_t>(i)]);
        merged_[child] = 4 * int64_t{tree.nodes[child].num_queries} >= own_tokens;
      }
      for (int32_t i = tail_offsets_[node]; i < tail_offsets_[node + 1]; ++i) {
        merged_[out.num_nodes + static_cast<size_t>(tails_[static_cast<size_t>(i)])] =
            own_tokens <= 4;
      }
      break;
    case Policy::kBytes:
      merge_by_bytes(tree, node, out);
      break;
  }

  Pack& pack = out.packs[node];
  const auto attach = [&](size_t below) {
    if (!merged_[below]) return;
    Pack& child = out.packs[below];
    child.start = pack.start;
    child.above = pack.above;
    pack.queries -= child.queries;
  };
  for (int32_t i = child_offsets_[node]; i < child_offsets_[node + 1]; ++i) {
    attach(static_cast<size_t>(children_[static_cast<size_t>(i)]));
  }
  for (int32_t i = tail_offsets_[node]; i < tail_offsets_[node + 1]; ++i) {
    attach(out.num_nodes + static_cast<size_t>(tails_[static_cast<size_t>(i)]));
  }
}

// Bytes saved (> 0) or lost when `merged` of a pack's `queries` leave it and read its `tokens`
// themselves. Equations 1 and 2 of the paper compare the same two schemes; here a query's partial
// counts with its GQA group and dtype, K/V is read once per row tile, and an item that goes away
// saves its overhead.
double Packer::gain(double tokens, int64_t queries, int64_t merged, double partials) const {
  const double overhead_bytes =
      target_.item_overhead_s * target_.bytes_per_s / static_cast<double>(target_.units);
  const auto before = static_cast<double>(num_row_tiles(target_, queries));
  const auto left = static_cast<double>(num_row_tiles(target_, queries - merged));
  const auto moved = static_cast<double>(num_row_tiles(target_, merged));
  return partials * target_.partial_cost_bytes() + (before - left) * overhead_bytes -
         (left + moved - before) * tokens * target_.token_bytes() * target_.reread_weight;
}

// Greedy, largest child first, then all at once if that is better still: what one child alone does
// not pay for (the node's own read) can vanish only when the last query leaves.
void Packer::merge_by_bytes(const PackTree& tree, size_t node, Packs& out) {
  const Pack& pack = out.packs[node];
  const double tokens = pack.tokens();
  const int64_t all = tree.nodes[node].num_queries;
  const int64_t num_tails = tails_of(node);
  // A tail that merges into the first pack of its row needs no partial at all: two are saved.
  const double tail_partials = pack.above == kNoNode ? 2.0 : 1.0;

  int64_t left = all;
  int64_t in_nodes = 0;
  double greedy = 0.0;
  double together = 0.0;  // gain of merging everything, from the same formula summed up
  for (int32_t i = child_offsets_[node]; i < child_offsets_[node + 1]; ++i) {
    const size_t child = static_cast<size_t>(children_[static_cast<size_t>(i)]);
    const int64_t size = tree.nodes[child].num_queries;
    const double bytes = gain(tokens, left, size, static_cast<double>(size));
    if (bytes >= 0.0) {
      merged_[child] = 1;
      greedy += bytes;
      left -= size;
    }
    together += gain(tokens, all - in_nodes, size, static_cast<double>(size));
    in_nodes += size;
  }
  int64_t merged_tails = 0;
  while (merged_tails < num_tails) {
    const double bytes = gain(tokens, left, 1, tail_partials);
    if (bytes < 0.0) break;
    greedy += bytes;
    --left;
    ++merged_tails;
  }
  if (left > 0 && in_nodes + num_tails == all) {
    for (int64_t i = 0; i < num_tails; ++i) {
      together += gain(tokens, all - in_nodes - i, 1, tail_partials);
    }
    if (together > greedy) {
      merged_tails = num_tails;
      for (int32_t i = child_offsets_[node]; i < child_offsets_[node + 1]; ++i) {
        merged_[static_cast<size_t>(children_[static_cast<size_t>(i)])] = 1;
      }
    }
  }

  // Which tails: the longest, so that the choice does not depend on the order of the batch.
  const auto first = tails_.begin() + tail_offsets_[node];
  const auto last = tails_.begin() + tail_offsets_[node + 1];
  if (merged_tails > 0 && merged_tails < num_tails) {
    std::sort(first, last, [&](int32_t a, int32_t b) {
      const int32_t end_a = out.tail(static_cast<size_t>(a)).end;
      const int32_t end_b = out.tail(static_cast<size_t>(b)).end;
      return end_a != end_b ? end_a > end_b : a < b;
    });
  }
  for (auto it = first; it != first + merged_tails; ++it) {
    merged_[out.num_nodes + static_cast<size_t>(*it)] = 1;
  }
}

}  // namespace pat
