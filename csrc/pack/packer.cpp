// SPDX-License-Identifier: Apache-2.0
#include "packer.h"

#include <algorithm>
#include <numeric>

#include "../count_of.h"
#include "cost_model.h"

namespace pat {
namespace {

// Profits of the two schemes of PAT section 5.1, in elements of K or V over the head dim: what
// packing saves in K/V reads less what its partials cost. `left`: queries that u, the node, still
// has; `tokens`: KV length of its pack; `size` and `child_tokens`: of the child. The terms of the
// other children, which both equations share, are left out.
struct PaperProfits {
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

// Weights of FastTree's model as its authors published them (FastTree-Artifact,
// kernel_bench/fasttree.py): of a padded query, for each token and query head; of a padded token,
// for each query and query head; of a partial result.
constexpr double kPaddedQuery = 0.66;
constexpr double kPaddedToken = 0.33;
constexpr double kPartialResult = 0.1;

// What that model charges an item of `queries` queries over `tokens` tokens: what its tiles compute
// in vain. An item of up to 16 queries has tiles of 16 queries and 128 tokens, a larger one of 64
// and 32.
double padding_cost(int64_t queries, int64_t tokens, int32_t group) {
  if (queries == 0) return 0.0;
  const bool small = queries <= 16;
  const int64_t tile = small ? 16 : 64;
  const auto padded_queries = static_cast<double>((tile - queries % tile) % tile);
  const auto padded_tokens = static_cast<double>(std::max<int64_t>(0, (small ? 128 : 32) - tokens));
  return group * (kPaddedQuery * padded_queries * static_cast<double>(tokens) +
                  kPaddedToken * padded_tokens * static_cast<double>(queries));
}

}  // namespace

void Packer::choose(const PackTree& tree, const int64_t* seq_lens, int32_t num_queries,
                    bool use_tree, Packs& out) {
  use_tree &= target_.policy != Policy::kQueries;
  const int32_t num_nodes = use_tree ? count_of(tree.nodes) : 0;
  out.num_nodes = num_nodes;
  out.packs.resize(num_nodes + num_queries);
  takes_over_.assign(num_nodes + num_queries, 0);
  child_offsets_.assign(num_nodes + 2, 0);
  tail_offsets_.assign(num_nodes + 2, 0);
  for (int32_t i = 0; i < num_nodes; ++i) {
    const PackNode& node = tree.nodes[i];
    out.packs[i] = {node.start, node.end, node.num_queries, node.parent, 1, 0};
    if (node.parent != kNoNode) ++child_offsets_[node.parent + 2];
  }
  for (int32_t query = 0; query < num_queries; ++query) {
    const int32_t node = use_tree ? tree.query_node[query] : kNoNode;
    const int32_t start = node == kNoNode ? 0 : tree.query_prefix[query];
    const auto end = static_cast<int32_t>(seq_lens[query]);
    out.packs[num_nodes + query] = {start, end, end > start ? 1 : 0, node, 1, 0};
    if (node != kNoNode && end > start) ++tail_offsets_[node + 2];
  }
  list_children(tree, num_queries, out);
  for (int32_t node = 0; node < num_nodes; ++node) decide_below(tree, node, out);
}

// Lists the child nodes and the tails of every node, of which choose() has counted how many stand
// before them: the offsets of node i are entries i + 1 until all are listed.
void Packer::list_children(const PackTree& tree, int32_t num_queries, const Packs& packs) {
  std::partial_sum(child_offsets_.begin(), child_offsets_.end(), child_offsets_.begin());
  std::partial_sum(tail_offsets_.begin(), tail_offsets_.end(), tail_offsets_.begin());
  children_.resize(packs.num_nodes);
  tails_.resize(num_queries);
  for (int32_t i = 0; i < packs.num_nodes; ++i) {
    const int32_t parent = tree.nodes[i].parent;
    if (parent != kNoNode) children_[child_offsets_[parent + 1]++] = i;
  }
  for (int32_t query = 0; query < num_queries; ++query) {
    const Pack& tail = packs.tail(query);
    if (tail.above == kNoNode || tail.queries == 0) continue;
    tails_[tail_offsets_[tail.above + 1]++] = query;
  }
  child_offsets_.pop_back();  // the loops above moved entry i + 1 to the end of node i
  tail_offsets_.pop_back();
}

// Decides which children and tails of `node` take its tokens over, and gives them these tokens.
void Packer::decide_below(const PackTree& tree, int32_t node, Packs& out) {
  switch (target_.policy) {
    case Policy::kNaive:
    case Policy::kQueries:
      break;
    case Policy::kRoot:
      if (tree.nodes[node].parent != kNoNode) take_over_all(node, out);
      break;
    case Policy::kPaper:
      decide_by_paper(tree, node, out);
      break;
    case Policy::kPadding:
      decide_by_padding(tree, node, out);
      break;
    case Policy::kBytes:
      decide_by_bytes(tree, node, out);
      break;
  }
  Pack& pack = out.packs[node];
  const auto attach = [&](int32_t below) {
    if (!takes_over_[below]) return;
    Pack& child = out.packs[below];
    child.start = pack.start;
    child.above = pack.above;
    pack.queries -= child.queries;
  };
  for (int32_t i = child_offsets_[node]; i < child_offsets_[node + 1]; ++i) attach(children_[i]);
  for (int32_t i = tail_offsets_[node]; i < tail_offsets_[node + 1]; ++i) {
    attach(out.num_nodes + tails_[i]);
  }
}

// Everything below takes the node's tokens over.
void Packer::take_over_all(int32_t node, const Packs& packs) {
  for (int32_t i = child_offsets_[node]; i < child_offsets_[node + 1]; ++i) {
    takes_over_[children_[i]] = 1;
  }
  for (int32_t i = tail_offsets_[node]; i < tail_offsets_[node + 1]; ++i) {
    takes_over_[packs.num_nodes + tails_[i]] = 1;
  }
}

// Asks for every child of `node`, a tail being one of one query, whether it takes over:
// takes_over(queries that the node's pack still has, those of the child, its tokens).
template <typename TakesOver>
void Packer::decide_one_by_one(const PackTree& tree, int32_t node, const Packs& packs,
                               TakesOver takes_over) {
  int64_t left = tree.nodes[node].num_queries;
  const auto visit = [&](int32_t child, int64_t size) {
    takes_over_[child] = takes_over(left, size, int64_t{packs.packs[child].tokens()});
    if (takes_over_[child]) left -= size;
  };
  for (int32_t i = child_offsets_[node]; i < child_offsets_[node + 1]; ++i) {
    visit(children_[i], tree.nodes[children_[i]].num_queries);
  }
  for (int32_t i = tail_offsets_[node]; i < tail_offsets_[node + 1]; ++i) {
    visit(packs.num_nodes + tails_[i], 1);
  }
}

// Algorithm 1 of the paper. The length of u is that of its pack, which counts the tokens that it
// took over from above (the `blocks` of the algorithm): its CTA reads them. Where both profits are
// equal the child takes over. Equation 2 charges u's read even if no query is left that reads it:
// evaluated as written.
void Packer::decide_by_paper(const PackTree& tree, int32_t node, const Packs& packs) {
  const int64_t tokens = packs.packs[node].tokens();
  decide_one_by_one(tree, node, packs, [&](int64_t left, int64_t size, int64_t child_tokens) {
    const PaperProfits u{left, tokens};
    return u.merge(size, child_tokens) >= u.split(size, child_tokens);
  });
}

// FastTree's rule: the child takes over if both packs then have the smaller cost, its partials
// included.
void Packer::decide_by_padding(const PackTree& tree, int32_t node, const Packs& packs) {
  const int64_t tokens = packs.packs[node].tokens();
  const auto cost = [&](int64_t queries, int64_t length) {
    return padding_cost(queries, length, target_.group());
  };
  decide_one_by_one(tree, node, packs, [&](int64_t left, int64_t size, int64_t child_tokens) {
    const double apart =
        cost(left, tokens) + cost(size, child_tokens) + kPartialResult * static_cast<double>(size);
    return apart > cost(left - size, tokens) + cost(size, tokens + child_tokens);
  });
}

// Greedy, largest child first, then all at once if that is better still: what one child alone does
// not pay for (the node's own read) can vanish only when the last query leaves.
void Packer::decide_by_bytes(const PackTree& tree, int32_t node, const Packs& packs) {
  const Pack& pack = packs.packs[node];
  const double tokens = pack.tokens();
  const int32_t all = tree.nodes[node].num_queries;
  const int32_t num_tails = tails_of(node);
  // A tail that takes over the first pack of its sequence needs no partial at all: two are saved.
  const double tail_partials = pack.above == kNoNode ? 2.0 : 1.0;

  int32_t left = all;
  int32_t in_nodes = 0;
  double greedy = 0.0;
  double together = 0.0;  // gain if all take over, from the same formula summed up
  for (int32_t i = child_offsets_[node]; i < child_offsets_[node + 1]; ++i) {
    const int32_t size = tree.nodes[children_[i]].num_queries;
    const double bytes = take_over_gain_bytes(target_, tokens, left, size, size);
    if (bytes >= 0.0) {
      takes_over_[children_[i]] = 1;
      greedy += bytes;
      left -= size;
    }
    together += take_over_gain_bytes(target_, tokens, all - in_nodes, size, size);
    in_nodes += size;
  }
  int32_t tails_taking_over = 0;
  while (tails_taking_over < num_tails) {
    const double bytes = take_over_gain_bytes(target_, tokens, left, 1, tail_partials);
    if (bytes < 0.0) break;
    greedy += bytes;
    --left;
    ++tails_taking_over;
  }
  if (left > 0 && in_nodes + num_tails == all) {
    for (int32_t i = 0; i < num_tails; ++i) {
      together += take_over_gain_bytes(target_, tokens, all - in_nodes - i, 1, tail_partials);
    }
    if (together > greedy) {
      tails_taking_over = num_tails;
      for (int32_t i = child_offsets_[node]; i < child_offsets_[node + 1]; ++i) {
        takes_over_[children_[i]] = 1;
      }
    }
  }
  take_over_longest_tails(node, tails_taking_over, packs);
}

// The longest, so that the choice does not depend on the order of the batch.
void Packer::take_over_longest_tails(int32_t node, int32_t count, const Packs& packs) {
  const auto first = tails_.begin() + tail_offsets_[node];
  const auto last = tails_.begin() + tail_offsets_[node + 1];
  if (count > 0 && count < tails_of(node)) {
    std::sort(first, last, [&](int32_t a, int32_t b) {
      const int32_t end_a = packs.tail(a).end;
      const int32_t end_b = packs.tail(b).end;
      return end_a != end_b ? end_a > end_b : a < b;
    });
  }
  for (auto it = first; it != first + count; ++it) takes_over_[packs.num_nodes + *it] = 1;
}

}  // namespace pat
