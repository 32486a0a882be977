// SPDX-License-Identifier: Apache-2.0
#include "paper.h"

#include <algorithm>
namespace pat {
namespace {

// Profits of the two schemes of PAT section 5.1, in elements of K or V over the head dim: what
// packing saves in K/V reads less what its partials cost. `left`: queries that u, the node, still
// has; `tokens`: KV length of its pack; `size` and `child_tokens`: of the child. The terms of the
// other children, which both equations share, are left out.
struct Profits {
  int64_t left;
  int64_t tokens;

  // Equation 1: u and the child are packs of their own.
  int64_t split(int64_t size, int64_t child_tokens) const {
    return (left - 1) * tokens - 4 * left + (size - 1) * child_tokens;
  }
  // Equation 2: the child's queries leave u and read its tokens along with the child's. The paper
  // calls merging what taking over is here.
  int64_t merge(int64_t size, int64_t child_tokens) const {
    return (left - size - 1) * tokens - 4 * (left - size) + (size - 1) * (tokens + child_tokens);
  }
};

}  // namespace

// The length of u is that of its pack, which counts the tokens that it took over from above (the
// `blocks` of the algorithm): its CTA reads them. Where both profits are equal the child takes
// over. Equation 2 charges u's read even if no query is left that reads it: evaluated as written.
void decide_by_paper(const PackTree& tree, int32_t node, const Packs& packs, Below& below) {
  Profits u{tree.nodes[node].num_queries, packs.packs[node].tokens()};
  const auto visit = [&](int32_t child, int64_t size) {
    const int64_t tokens = packs.packs[child].tokens();
    below.takes_over[child] = u.merge(size, tokens) >= u.split(size, tokens);
    if (below.takes_over[child]) u.left -= size;
  };
  for (const int32_t child : below.children_of(node)) visit(child, tree.nodes[child].num_queries);
  for (const int32_t query : below.tails_of(node)) visit(packs.num_nodes + query, 1);
}

std::vector<int32_t> split_by_mean(const Target& target, const Packs& packs) {
  int64_t tokens = 0, items = 0;
  for (const Pack& pack : packs.packs) {
    if (pack.queries == 0) continue;
    const int64_t tiles = target.num_row_tiles(pack.queries);
    tokens += tiles * pack.tokens();
    items += tiles;
  }
  const int64_t mean = std::max<int64_t>(tokens / std::max<int64_t>(items, 1), 1);
  std::vector<int32_t> pieces;
  for (const Pack& pack : packs.packs) {
    const int64_t length = std::max(pack.tokens(), 1), count = (length + mean - 1) / mean;
    pieces.push_back(static_cast<int32_t>((length + count - 1) / count));
  }
  return pieces;
}

}  // namespace pat
