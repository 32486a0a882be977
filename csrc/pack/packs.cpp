// SPDX-License-Identifier: Apache-2.0
#include "packs.h"

#include <algorithm>
#include <functional>
#include <utility>
#include <vector>

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

// The longest tails of a node, so that the choice does not depend on the order of the batch.
void take_over_longest(int32_t node, int32_t count, const Packs& packs, Below& below) {
  if (count == 0) return;
  std::vector<int32_t> tails;
  below.for_each(node, [&](int32_t child) {
    if (child >= packs.num_nodes) tails.push_back(child);
  });
  std::ranges::stable_sort(tails, std::greater{}, [&](int32_t i) { return packs.packs[i].end; });
  for (int32_t i = 0; i < count; ++i) below.takes_over[tails[i]] = 1;
}

// Greedy, largest child first, then all at once if that is better still: what one child alone does
// not pay for (the node's own read) can vanish only when the last query leaves.
void decide_by_bytes(const Target& target, int32_t node, const Packs& packs, Below& below) {
  const Pack& pack = packs.packs[node];
  const double tokens = pack.tokens();
  const int32_t all = pack.queries;
  // A tail that takes over the first pack of its sequence needs no partial at all: two are saved.
  const double tail_partials = pack.above == kNoNode ? 2.0 : 1.0;

  int32_t left = all;
  int32_t in_nodes = 0, num_tails = 0;
  double greedy = 0.0;
  double together = 0.0;  // gain if all take over, from the same formula summed up
  below.for_each(node, [&](int32_t child) {
    num_tails += child >= packs.num_nodes;
    if (child >= packs.num_nodes) return;
    const int32_t size = packs.packs[child].queries;
    const double bytes = take_over_gain_bytes(target, tokens, left, size, size);
    if (bytes >= 0.0) {
      below.takes_over[child] = 1;
      greedy += bytes;
      left -= size;
    }
    together += take_over_gain_bytes(target, tokens, all - in_nodes, size, size);
    in_nodes += size;
  });
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
      below.for_each(node, [&](int32_t child) { below.takes_over[child] = 1; });
      return;
    }
  }
  take_over_longest(node, tails_taking_over, packs, below);
}

}  // namespace

void Packer::choose(const Target& target, const PackTree& tree, const int64_t* seq_lens,
                    int32_t num_queries, Rule rule, Packs& out, const uint8_t* given) {
  const bool use_tree = rule != Rule::kNone;
  const int32_t num_nodes = use_tree ? count_of(tree.nodes) : 0;
  const int32_t num_packs = num_nodes + num_queries;
  out.num_nodes = num_nodes;
  out.packs.resize(num_packs);
  for (int32_t i = 0; i < num_nodes; ++i) {
    const PackNode& node = tree.nodes[i];
    out.packs[i] = {node.start, node.end, node.num_queries, node.parent, 1, 0};
  }
  for (int32_t query = 0; query < num_queries; ++query) {
    const int32_t node = use_tree ? tree.query_node[query] : kNoNode;
    const int32_t start = node == kNoNode ? 0 : tree.query_prefix[query];
    const auto end = static_cast<int32_t>(seq_lens[query]);
    out.packs[num_nodes + query] = {start, end, end > start ? 1 : 0, node, 1, 0};
  }
  below_.first.assign(num_nodes, kNoNode);
  below_.next.resize(num_packs);
  below_.takes_over.assign(num_packs, 0);
  if (rule == Rule::kGiven) below_.takes_over.assign(given, given + num_packs);
  for (int32_t i = num_packs; i-- > 0;) {
    const Pack& pack = out.packs[i];
    if (pack.above == kNoNode || pack.queries == 0) continue;
    below_.next[i] = std::exchange(below_.first[pack.above], i);
  }
  for (int32_t node = 0; node < num_nodes; ++node) {
    if (rule == Rule::kBytes) decide_by_bytes(target, node, out, below_);
    if (rule == Rule::kPaper) decide_by_paper(node, out, below_);
    Pack& pack = out.packs[node];
    below_.for_each(node, [&](int32_t i) {
      if (!below_.takes_over[i]) return;
      Pack& child = out.packs[i];
      child.start = pack.start;
      child.above = pack.above;
      pack.queries -= child.queries;
    });
  }
}

}  // namespace pat
