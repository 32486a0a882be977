// SPDX-License-Identifier: Apache-2.0
// The pack tree: the forest of all queries' radix paths, reduced to the nodes that several queries
// share. Built from node ids and spans alone; no token and no slot is compared.
#pragma once

#include <cstdint>
#include <vector>

#include "node_table.h"

namespace pat {

// Consecutive tokens of a query's sequence that stand under one radix node.
struct PathElement {
  int64_t node_id;     // any distinct values
  int64_t start, end;  // token positions: [start, end)
};

// Root-to-node paths of a batch: query q owns the elements [offsets[q], offsets[q + 1]).
struct Paths {
  std::vector<int64_t> offsets{0};
  std::vector<PathElement> elements;

  int64_t num_queries() const { return static_cast<int64_t>(offsets.size()) - 1; }
  void clear() {
    offsets.assign(1, 0);
    elements.clear();
  }
  // What was added since the last query is the next query's path.
  void end_query() { offsets.push_back(static_cast<int64_t>(elements.size())); }
};

// A node that at least two queries share. Chains of nodes with equal query sets are one node.
struct PackNode {
  int64_t id;      // radix node id of the deepest node of the chain
  int32_t parent;  // index into PackTree::nodes, or kNoNode
  int32_t start;   // token positions
  int32_t end;
  int32_t num_queries;  // queries of the whole subtree
};

struct PackTree {
  std::vector<PackNode> nodes;        // parents before children
  std::vector<int32_t> query_node;    // [num_queries] deepest shared node of a query, or kNoNode
  std::vector<int32_t> query_prefix;  // [num_queries] tokens up to the end of that node
};

// Builds the tree in time linear in the number of path elements, but for sorting the shared nodes.
//
// Paths that name the same node agree on its parent and start; they may end inside it (a clipped
// path), which splits the node. Lengths of sequences count the draft tokens (plan.h), which no path
// holds. Throws std::invalid_argument naming query, node and positions for a
// gap, an overlap, an empty or negative span, a path longer than its sequence, or a node with two
// parents or two starts (which is what a cycle comes down to).
class TreeBuilder {
 public:
  const PackTree& build(const Paths& paths, const int64_t* seq_lens, int32_t draft_tokens);

 private:
  struct RawNode {
    int64_t id;
    int32_t parent;
    int32_t start;
    int32_t end;
    int32_t next;  // continuation of the same id beyond a clip, or kNoNode
    int32_t num_queries;
    int32_t num_ending;  // queries whose path ends here
  };
  void reset(int64_t num_queries);
  int32_t enter(int64_t query, int32_t parent, int64_t id, int32_t start, int32_t end);
  int32_t add(int64_t id, int32_t parent, int32_t start, int32_t end);
  void cut(int64_t query, int32_t node, int32_t position);
  void count_queries();
  void reduce();
  void sort_nodes();

  std::vector<RawNode> raw_;
  std::vector<int32_t> raw_query_node_;
  std::vector<int32_t>
      last_path_;    // nodes of the previous query's path: the next one often shares it
  NodeTable table_;  // of raw_, by id
  std::vector<int32_t> order_;
  std::vector<int32_t> mapped_;
  PackTree tree_;
};

}  // namespace pat
