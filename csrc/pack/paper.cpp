// SPDX-License-Identifier: Apache-2.0
#include "paper.h"

#include <algorithm>

namespace pat {

// A child's queries leave u, the node, if that has the greater profit. Profits are in elements of K
// or V over the head dim: what packing saves in K/V reads less what its partials cost. The terms of
// the other children, which both equations share, are left out. The length of u is that of its
// pack, which counts the tokens that it took over from above (the `blocks` of the algorithm): its
// CTA reads them. Where both profits are equal the child takes over. Equation 2 charges u's read
// even if no query is left that reads it: evaluated as written.
void decide_by_paper(int32_t node, const Packs& packs, Below& below) {
  const int64_t tokens = packs.packs[node].tokens();
  int64_t left = packs.packs[node].queries;  // that u still has
  below.for_each(node, [&](int32_t child) {
    const int64_t size = packs.packs[child].queries, own = packs.packs[child].tokens();
    // Equation 1: u and the child are packs of their own.
    const int64_t split = (left - 1) * tokens - 4 * left + (size - 1) * own;
    // Equation 2: the child's queries leave u and read its tokens along with the child's. The paper
    // calls merging what taking over is here.
    const int64_t merge =
        (left - size - 1) * tokens - 4 * (left - size) + (size - 1) * (tokens + own);
    below.takes_over[child] = merge >= split;
    if (merge >= split) left -= size;
  });
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
