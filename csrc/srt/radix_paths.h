// SPDX-License-Identifier: Apache-2.0
// The nodes of SGLang's radix tree that a batch stands on, kept from one batch to the next.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <vector>

#include "handles.h"
#include "node_source.h"
#include "pack/tree.h"

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

  // A read() that has asked for `most_read` nodes begins no other path, so that no plan stalls a
  // server whose clients have built deep trees. Requests that are left share nothing until a later
  // read() comes to them. A request whose own path has so many unknown nodes shares nothing.
  RadixPaths(std::unique_ptr<NodeSource> source, size_t most_read);

  // Writes the path of each query as far as another query shares it and its request's tokens are
  // safe to share: nodes with the same queries are one element, under the id of the lowest. Queries
  // beyond `count` have no request. On what the source throws everything is forgotten.
  void read(const Handle* handles, size_t count, size_t num_queries, const Leaf& leaf, Paths& out);

  // Requests that share nothing, by the last read: without a node, with one but no tokens that are
  // safe to share, those whose paths are left to the next, and those whose paths are too long.
  int64_t num_missing = 0, num_uncached = 0, num_unread = 0, num_too_long = 0;
  size_t num_nodes() const { return nodes_.size() - free_.size(); }

 private:
  static constexpr int32_t kRoot = 0;
  static constexpr int32_t kUnknown = -1;

  // `..._read`: a value of read_, compared for equality alone.
  struct Node {
    int64_t id = 0;
    pybind11::object object;  // of a tree of Python nodes
    int32_t parent = kNoNode;
    int32_t count = 0;       // queries that stand on it or below
    int32_t end = kUnknown;  // tokens, unless it is being read
    int32_t length = 0;
    uint32_t born_read = 0;
    // Queries that stand on it, as counted and as this read has named them; the last such read.
    int32_t ends = 0;
    int32_t named = 0;
    uint32_t named_read = 0;
    // Of a node with one query: one above it that had the same query alone.
    int32_t top = kNoNode;
    // Of the lowest of a chain of nodes with the same queries: the highest, as of a read.
    int32_t chain_top = kNoNode;
    uint32_t chain_read = 0;
    // Children form a list.
    int32_t child = kNoNode;
    int32_t previous = kNoNode;
    int32_t next = kNoNode;
  };

  Node& at(int32_t index) { return nodes_[static_cast<size_t>(index)]; }
  void forget();
  void try_read(const Handle* handles, size_t count, const Leaf& leaf);
  void name(size_t query, int32_t index);
  void count_leaves();
  int32_t add(int64_t id, pybind11::object object);
  void add_count(int32_t index, int32_t delta);
  void release(int32_t leaf, int32_t queries);
  void drop(int32_t index);
  bool climb(int32_t index, size_t most);
  void link(int32_t index, int32_t parent);
  void detach(int32_t index);
  void find_split();
  int32_t chain_top(int32_t index);
  int32_t lowest_shared(int32_t leaf);
  void write(int32_t leaf, int64_t limit, Paths& out);

  std::unique_ptr<NodeSource> source_;
  size_t most_read_;
  size_t num_read_ = 0;            // nodes, by this read
  std::vector<int64_t> too_long_;  // nodes of this batch whose paths are too long to be read
  std::vector<Node> nodes_;        // [0]: the root of all
  std::vector<int32_t> free_;
  NodeTable table_;
  uint32_t read_ = 0;
  std::vector<int32_t> leaves_;          // nodes that queries stand on
  std::vector<int32_t> named_;           // those of this read
  std::vector<int32_t> query_leaf_;      // [queries]
  std::vector<int32_t> climbed_;         // nodes that wait for the end of the one above them
  std::vector<int32_t> parents_of_new_;  // known ones
  std::vector<PathElement> path_;
};

}  // namespace pat
