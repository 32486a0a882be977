// SPDX-License-Identifier: Apache-2.0
#include "packs.h"

#include <algorithm>
#include <numeric>

#include "paper.h"

namespace pat {
namespace {

// Bytes saved (> 0) or lost when `leaving` of a pack's `queries` take its `tokens` over, so that
// they read them themselves, which saves `partials` partials. Equations 1 and 2 of the paper
// compare the same two schemes; here a query's partial counts with its GQA group and dtype, K/V is
// read once per row tile, and an item that goes away saves its overhead.
double take_over_gain_bytes(const Target& target, double tokens, int64_t queries, int64_t leaving,
                            double partials) {
  const double overhead_bytes = target.item_overhead_s * target.bytes_per_s / target.num_sms;
  const auto before = static_cast<double>(target.num_row_tiles(queries));
  const auto left = static_cast<double>(target.num_row_tiles(queries - leaving));
  const auto moved = static_cast<double>(target.num_row_tiles(leaving));
  return partials * target.partial_cost_bytes() + (before - left) * overhead_bytes -
         (left + moved - before) * tokens * target.token_bytes() * target.reread_weight;
}

// The longest, so that the choice does not depend on the order of the batch.
void take_over_longest(std::span<int32_t> tails, int32_t count, const Packs& packs, Below& below) {
  if (count > 0 && count < count_of(tails)) {
    std::sort(tails.begin(), tails.end(), [&](int32_t a, int32_t b) {
      const int32_t end_a = packs.tail(a).end, end_b = packs.tail(b).end;
      return end_a != end_b ? end_a > end_b : a < b;
    });
  }
  for (const int32_t query : tails.first(count)) below.takes_over[packs.num_nodes + query] = 1;
}

// Greedy, largest child first, then all at once if that is better still: what one child alone does
// not pay for (the node's own read) can vanish only when the last query leaves.
void decide_by_bytes(const Target& target, const PackTree& tree, int32_t node, const Packs& packs,
                     Below& below) {
  const Pack& pack = packs.packs[node];
  const double tokens = pack.tokens();
  const int32_t all = tree.nodes[node].num_queries;
  const std::span<int32_t> tails = below.tails_of(node);
  const int32_t num_tails = count_of(tails);
  // A tail that takes over the first pack of its sequence needs no partial at all: two are saved.
  const double tail_partials = pack.above == kNoNode ? 2.0 : 1.0;

  int32_t left = all;
  int32_t in_nodes = 0;
  double greedy = 0.0;
  double together = 0.0;  // gain if all take over, from the same formula summed up
  for (const int32_t child : below.children_of(node)) {
    const int32_t size = tree.nodes[child].num_queries;
    const double bytes = take_over_gain_bytes(target, tokens, left, size, size);
    if (bytes >= 0.0) {
      below.takes_over[child] = 1;
      greedy += bytes;
      left -= size;
    }
    together += take_over_gain_bytes(target, tokens, all - in_nodes, size, size);
    in_nodes += size;
  }
  int32_t tails_taking_over = 0;
  while (tails_taking_over < num_tails) {
    const double bytes = take_over_gain_bytes(target, tokens, left, 1, tail_partials);
    if (bytes < 0.0) break;
    greedy += bytes;
    --left;
    ++tails_taking_over;
  }
  if (left > 0 && in_nodes + num_tails == all) {
    for (int32_t i = 0; i < num_tails; ++i) {
      together += take_over_gain_bytes(target, tokens, all - in_nodes - i, 1, tail_partials);
    }
    if (together > greedy) {
      tails_taking_over = num_tails;
      for (const int32_t child : below.children_of(node)) below.takes_over[child] = 1;
    }
  }
  take_over_longest(tails, tails_taking_over, packs, below);
}

}  // namespace

void Packer::choose(const Target& target, const PackTree& tree, const int64_t* seq_lens,
                    int32_t num_queries, Rule rule, Packs& out, const uint8_t* given) {
  const bool use_tree = rule != Rule::kNone;
  const int32_t num_nodes = use_tree ? count_of(tree.nodes) : 0;
  out.num_nodes = num_nodes;
  out.packs.resize(num_nodes + num_queries);
  below_.takes_over.assign(num_nodes + num_queries, 0);
  if (rule == Rule::kGiven) below_.takes_over.assign(given, given + num_nodes + num_queries);
  below_.child_offsets.assign(num_nodes + 2, 0);
  below_.tail_offsets.assign(num_nodes + 2, 0);
  for (int32_t i = 0; i < num_nodes; ++i) {
    const PackNode& node = tree.nodes[i];
    out.packs[i] = {node.start, node.end, node.num_queries, node.parent, 1, 0};
    if (node.parent != kNoNode) ++below_.child_offsets[node.parent + 2];
  }
  for (int32_t query = 0; query < num_queries; ++query) {
    const int32_t node = use_tree ? tree.query_node[query] : kNoNode;
    const int32_t start = node == kNoNode ? 0 : tree.query_prefix[query];
    const auto end = static_cast<int32_t>(seq_lens[query]);
    out.packs[num_nodes + query] = {start, end, end > start ? 1 : 0, node, 1, 0};
    if (node != kNoNode && end > start) ++below_.tail_offsets[node + 2];
  }
  list_children(tree, num_queries, out);
  for (int32_t node = 0; node < num_nodes; ++node) {
    if (rule == Rule::kBytes) decide_by_bytes(target, tree, node, out, below_);
    if (rule == Rule::kPaper) decide_by_paper(tree, node, out, below_);
    attach_below(node, out);
  }
}

// Lists the child nodes and the tails of every node, of which choose() has counted how many stand
// before them: the offsets of node i are entries i + 1 until all are listed.
void Packer::list_children(const PackTree& tree, int32_t num_queries, const Packs& packs) {
  auto& [child_offsets, children, tail_offsets, tails, takes_over] = below_;
  std::partial_sum(child_offsets.begin(), child_offsets.end(), child_offsets.begin());
  std::partial_sum(tail_offsets.begin(), tail_offsets.end(), tail_offsets.begin());
  children.resize(packs.num_nodes);
  tails.resize(num_queries);
  for (int32_t i = 0; i < packs.num_nodes; ++i) {
    const int32_t parent = tree.nodes[i].parent;
    if (parent != kNoNode) children[child_offsets[parent + 1]++] = i;
  }
  for (int32_t query = 0; query < num_queries; ++query) {
    const Pack& tail = packs.tail(query);
    if (tail.above == kNoNode || tail.queries == 0) continue;
    tails[tail_offsets[tail.above + 1]++] = query;
  }
  child_offsets.pop_back();  // the loops above moved entry i + 1 to the end of node i
  tail_offsets.pop_back();
}

// Gives the children and tails of `node` that take over its tokens.
void Packer::attach_below(int32_t node, Packs& out) {
  Pack& pack = out.packs[node];
  const auto attach = [&](int32_t below) {
    if (!below_.takes_over[below]) return;
    Pack& child = out.packs[below];
    child.start = pack.start;
    child.above = pack.above;
    pack.queries -= child.queries;
  };
  for (const int32_t child : below_.children_of(node)) attach(child);
  for (const int32_t query : below_.tails_of(node)) attach(out.num_nodes + query);
}

}  // namespace pat
