// SPDX-License-Identifier: Apache-2.0
// Packs: which queries share an item. Like the paper's TreeHeuristic (PAT section 5.1) it goes down
// the tree and decides for each child whether it takes the tokens above it over. What pays is
// compared in bytes, or by the paper's equations 1 and 2.
#pragma once

#include <algorithm>
#include <cstdint>
#include <functional>
#include <utility>
#include <vector>

#include "target.h"
#include "tree.h"

namespace pat {

// A pack: consecutive tokens of one query's sequence that a set of queries attends to.
struct Pack {
  int32_t start;    // token position
  int32_t end;      // scheduled end; a tail really ends at its sequence length
  int32_t queries;  // members, without those that took its tokens over; 0: it gets no item
  int32_t above;    // pack that holds the tokens before `start`, or kNoNode
  int32_t pieces;   // into which its tokens are cut
  int32_t chunk;    // tokens of each piece but the last

  int32_t tokens() const { return end - start; }
};

// Packs of a batch: one per tree node, then one per query (its private tail).
struct Packs {
  std::vector<Pack> packs;  // [num_nodes + num_queries]
  int32_t num_nodes = 0;

  const Pack& tail(int32_t query) const { return packs[num_nodes + query]; }
};

// Decides which nodes and tails take over the tokens of the packs above them. Keeps its working
// memory between calls.
class Packer {
 public:
  // What says which children of a node take its tokens over.
  enum class Rule {
    kBytes,  // the bytes that each way reads and writes
    kPaper,  // equations 1 and 2
    kNone,   // no tree: every query by itself
    kGiven,  // `given`
  };

  // Writes the packs of a batch, each in one piece. `given`: [nodes + queries], with kGiven.
  void choose(const Target& target, const PackTree& tree, const int64_t* seq_lens,
              int32_t num_queries, Rule rule, Packs& out, const uint8_t* given = nullptr) {
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
    first_.assign(num_nodes, kNoNode);
    next_.resize(num_packs);
    takes_over_.assign(num_packs, 0);
    if (rule == Rule::kGiven) takes_over_.assign(given, given + num_packs);
    for (int32_t i = num_packs; i-- > 0;) {
      const Pack& pack = out.packs[i];
      if (pack.above == kNoNode || pack.queries == 0) continue;
      next_[i] = std::exchange(first_[pack.above], i);
    }
    for (int32_t node = 0; node < num_nodes; ++node) {
      if (rule == Rule::kBytes) decide_by_bytes(target, node, out);
      if (rule == Rule::kPaper) decide_by_paper(node, out);
      Pack& pack = out.packs[node];
      for_each_below(node, [&](int32_t i) {
        if (!takes_over_[i]) return;
        Pack& child = out.packs[i];
        child.start = pack.start;
        child.above = pack.above;
        pack.queries -= child.queries;
      });
    }
  }

 private:
  // What stands below a node, as packs: its child nodes, the largest first, then the tails of the
  // queries that end there.
  template <typename Visit>
  void for_each_below(int32_t node, const Visit& visit) const {
    for (int32_t i = first_[node]; i != kNoNode; i = next_[i]) visit(i);
  }

  // A child's queries leave u, the node, if that has the greater profit. Profits are in elements of
  // K or V over the head dim: what packing saves in K/V reads less what its partials cost. The
  // terms of the other children, which both equations share, are left out. The length of u is that
  // of its pack, which counts the tokens that it took over from above (the `blocks` of the
  // algorithm): its CTA reads them. Where both profits are equal the child takes over. Equation 2
  // charges u's read even if no query is left that reads it: evaluated as written.
  void decide_by_paper(int32_t node, const Packs& packs) {
    const int64_t tokens = packs.packs[node].tokens();
    int64_t left = packs.packs[node].queries;  // that u still has
    for_each_below(node, [&](int32_t child) {
      const int64_t size = packs.packs[child].queries, own = packs.packs[child].tokens();
      // Equation 1: u and the child are packs of their own.
      const int64_t split = (left - 1) * tokens - 4 * left + (size - 1) * own;
      // Equation 2: the child's queries leave u and read its tokens along with the child's. The
      // paper calls merging what taking over is here.
      const int64_t merge =
          (left - size - 1) * tokens - 4 * (left - size) + (size - 1) * (tokens + own);
      takes_over_[child] = merge >= split;
      if (merge >= split) left -= size;
    });
  }

  // Greedy, largest child first, then all at once if that is better still: what one child alone
  // does not pay for (the node's own read) can vanish only when the last query leaves.
  void decide_by_bytes(const Target& target, int32_t node, const Packs& packs) {
    const Pack& pack = packs.packs[node];
    const double tokens = pack.tokens();
    const int32_t all = pack.queries;
    // A tail that takes over the first pack of its sequence needs no partial at all: two are saved.
    const double tail_partials = pack.above == kNoNode ? 2.0 : 1.0;

    int32_t left = all;
    int32_t in_nodes = 0, num_tails = 0;
    double greedy = 0.0;
    double together = 0.0;  // gain if all take over, from the same formula summed up
    for_each_below(node, [&](int32_t child) {
      num_tails += child >= packs.num_nodes;
      if (child >= packs.num_nodes) return;
      const int32_t size = packs.packs[child].queries;
      const double bytes = gain_bytes(target, tokens, left, size, size);
      if (bytes >= 0.0) {
        takes_over_[child] = 1;
        greedy += bytes;
        left -= size;
      }
      together += gain_bytes(target, tokens, all - in_nodes, size, size);
      in_nodes += size;
    });
    int32_t tails_taking_over = 0;
    while (tails_taking_over < num_tails) {
      const double bytes = gain_bytes(target, tokens, left, 1, tail_partials);
      if (bytes < 0.0) break;
      greedy += bytes;
      --left;
      ++tails_taking_over;
    }
    if (left > 0 && in_nodes + num_tails == all) {
      for (int32_t i = 0; i < num_tails; ++i) {
        together += gain_bytes(target, tokens, all - in_nodes - i, 1, tail_partials);
      }
      if (together > greedy) {
        for_each_below(node, [&](int32_t child) { takes_over_[child] = 1; });
        return;
      }
    }
    take_over_longest(node, tails_taking_over, packs);
  }

  // Bytes saved (> 0) or lost when `leaving` of a pack's `queries` take its `tokens` over, so that
  // they read them themselves, which saves `partials` partials. Equations 1 and 2 of the paper
  // compare the same two schemes; here a query's partial counts with its GQA group and dtype, K/V
  // is read once per row tile, and an item that goes away saves its overhead.
  static double gain_bytes(const Target& target, double tokens, int64_t queries, int64_t leaving,
                           double partials) {
    const double overhead_bytes = target.item_overhead_s * target.bytes_per_s / target.num_sms;
    const auto before = static_cast<double>(target.num_row_tiles(queries));
    const auto left = static_cast<double>(target.num_row_tiles(queries - leaving));
    const auto moved = static_cast<double>(target.num_row_tiles(leaving));
    return partials * target.partial_cost_bytes() + (before - left) * overhead_bytes -
           (left + moved - before) * tokens * target.token_bytes() * target.reread_weight;
  }

  // The longest tails of a node, so that the choice does not depend on the order of the batch.
  void take_over_longest(int32_t node, int32_t count, const Packs& packs) {
    if (count == 0) return;
    std::vector<int32_t> tails;
    for_each_below(node, [&](int32_t child) {
      if (child >= packs.num_nodes) tails.push_back(child);
    });
    std::ranges::stable_sort(tails, std::greater{}, [&](int32_t i) { return packs.packs[i].end; });
    for (int32_t i = 0; i < count; ++i) takes_over_[tails[i]] = 1;
  }

  std::vector<int32_t> first_;       // [nodes] the first pack below, or kNoNode
  std::vector<int32_t> next_;        // [nodes + queries] the sibling behind a pack, or kNoNode
  std::vector<uint8_t> takes_over_;  // [nodes + queries] the tokens of the pack above
};

}  // namespace pat
