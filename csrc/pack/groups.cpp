// SPDX-License-Identifier: Apache-2.0
#include "groups.h"

#include <algorithm>

namespace pat {

void put_below_root(const PackTree& tree, int32_t num_queries, PackTree& rooted) {
  rooted.nodes.assign(1, {-1, kNoNode, 0, 0, num_queries});
  for (PackNode node : tree.nodes) {
    ++node.parent;  // kNoNode becomes the root
    rooted.nodes.push_back(node);
  }
  rooted.query_node.resize(num_queries);
  rooted.query_prefix.resize(num_queries);
  for (int32_t query = 0; query < num_queries; ++query) {
    const int32_t node = tree.query_node[query];
    rooted.query_node[query] = node + 1;
    rooted.query_prefix[query] = node == kNoNode ? 0 : tree.query_prefix[query];
  }
}

BranchCut cut_of_groups(const Target& target, int32_t tokens) {
  int32_t rows = 0;
  for (const int32_t each : target.branch_rows) rows = std::max(rows, each);
  return {tokens, rows / target.group(), tokens};
}

}  // namespace pat
