// SPDX-License-Identifier: Apache-2.0
// The nodes of SGLang's radix tree that a batch stands on, kept from one batch to the next.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "handle_memory.h"
#include "node_source.h"
#include "pack/node_table.h"
#include "python_paths.h"

namespace pat {

// Keeps the nodes on the paths of one batch as a tree of its own, and changes it with the batch: a
// request that leaves takes away what no other request stands on, and of a new one only the nodes
// that are not known are read, from its own upwards. So a plan costs what has changed, however
// deep the tree is. Not thread-safe.
//
// Relies on three properties of a radix tree. An id is never given out twice. A node that a request
// of the batch holds, and all above it, are not evicted. And a split only puts a new node between a
// node and its parent: the node keeps its id and its end. A split matters to a batch only if a new
// request stands on the new node; then that node is new below a known one, whose other children
// are looked at. At most one of them was split.
class RadixPaths {
 public:
  // Gives the Python node of query i, for a source that needs it.
  using Leaf = std::function<pybind11::object(size_t query, int64_t id)>;

  // A read asks for at most `most_read` nodes that it does not know, and at most `most_nodes` are
  // kept. Paths beyond that share nothing until the reads that follow have reached the root.
  RadixPaths(std::unique_ptr<NodeSource> source, int64_t most_read, int64_t most_nodes);

  // Writes the path of each query as far as another query shares it and its request's tokens are
  // safe to share: nodes with the same queries are one element, under the id of the lowest. Queries
  // beyond `count` have no request. On what the source throws everything is forgotten.
  void read(const Handle* handles, size_t count, size_t num_queries, const Leaf& leaf,
            PathTable& out);
  void forget();

  // Of the last read: requests without a node, with one but no tokens that are safe to share, and
  // with a path that is not read to the root yet.
  int64_t num_missing() const { return num_missing_; }
  int64_t num_uncached() const { return num_uncached_; }
  int64_t num_unread() const { return num_unread_; }
  size_t num_nodes() const { return nodes_.size() - free_.size(); }

 private:
  // In place of a parent: it has not been read; the entry is free.
  static constexpr int32_t kUnread = -2;
  static constexpr int32_t kFree = -3;
  static constexpr int32_t kRoot = 0;
  static constexpr int32_t kUnknown = -1;
  static constexpr int32_t kClimbed = 4;  // levels that are climbed before whole paths are read

  // `..._read`: a value of read_, compared for equality alone.
  struct Node {
    int64_t id = 0;
    pybind11::object object;  // of a tree of Python nodes
    int32_t parent = kUnread;
    int32_t count = 0;       // queries that stand on it or below
    int32_t end = kUnknown;  // tokens, until the path is read to the root
    // Of a node with one query: one above it that had the same query alone.
    int32_t top = kNoNode;
    int32_t ends = 0;  // queries that stand on it, as counted
    int32_t next_ends = 0;
    uint32_t named_read = 0;   // the last with a query that stands on it
    uint32_t unread_read = 0;  // the last that did not find its path to the root
    // Of the lowest of a chain of nodes with the same queries: the highest, as of a read.
    uint32_t chain_read = 0;
    int32_t chain_top = kNoNode;
    uint32_t born = 0;
    int32_t length = 0;
    int32_t depth = 0;  // nodes from the root
    // Children form a list.
    int32_t child = kNoNode;
    int32_t previous = kNoNode;
    int32_t next = kNoNode;
  };

  Node& at(int32_t index) { return nodes_[static_cast<size_t>(index)]; }
  void try_read(const Handle* handles, size_t count, const Leaf& leaf);
  void count_leaves();
  int32_t add(int64_t id, pybind11::object object);
  void add_count(int32_t index, int32_t delta);
  void release(int32_t leaf, int32_t queries);
  void link(int32_t index, int32_t parent);
  void unlink(int32_t index);
  void detach(int32_t index);
  void read_upwards(size_t most);
  int32_t place(int32_t index, NodeAbove& above);
  void find_split();
  void measure();
  int32_t chain_top(int32_t index);
  int32_t lowest_shared(int32_t leaf);
  void write(int32_t leaf, int64_t limit, PathTable& out);

  std::unique_ptr<NodeSource> source_;
  const size_t most_read_, most_nodes_;
  std::vector<Node> nodes_;  // [0]: the root of all
  std::vector<int32_t> free_;
  NodeTable table_;
  uint32_t read_ = 0;
  int32_t deepest_ = 0;              // nodes of the longest path since all was forgotten
  bool short_paths_ = true;          // of the requests that are new to this read
  std::vector<int32_t> leaves_;      // nodes that queries stand on
  std::vector<int32_t> named_;       // those of this read
  std::vector<int32_t> query_leaf_;  // [queries]
  std::vector<int32_t> frontier_;    // nodes whose parent is to be read
  std::vector<int32_t> unmeasured_;  // nodes whose end is not known
  std::vector<int32_t> climbed_;
  std::vector<int32_t> parents_of_new_;
  struct Element {
    int64_t id, start, end;
  };
  std::vector<Element> path_;
  int64_t num_missing_ = 0, num_uncached_ = 0, num_unread_ = 0;
};

}  // namespace pat
