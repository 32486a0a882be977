// SPDX-License-Identifier: Apache-2.0
// Reads paths out of a tree of Python nodes by climbing from the queries' nodes to the root.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <string>
#include <vector>

#include "pack/node_table.h"
#include "python_paths.h"

namespace pat {

// Reader of one tree, whose nodes have an id, a parent (None of the root, which is on no path) and
// a key with a length in tokens, under the attribute names given. Not thread-safe.
//
// Relies on what a radix tree does: an id is never given out twice, and a node that is split keeps
// id and end and gets a new node above. So ends are remembered from one batch to the next, and only
// nodes new to the batch are asked for the length of their key, a call into Python that costs more
// than the rest of a node. Starts do change: they are the ends of the parents, read every time.
class NodeReader {
 public:
  NodeReader(const std::string& id, const std::string& parent, const std::string& key);

  // leaves: per query the last node of its path, or None for no path; limits as in PathTable::read.
  // Of nodes that one query alone goes through only the parent is read, and they are on no path:
  // they share nothing. Throws what a failed look-up raises, TypeError for an id that is not an
  // integer, and std::invalid_argument for a node that is its own ancestor.
  void read(const pybind11::sequence& leaves, const int64_t* limits, PathTable& out);

 private:
  static constexpr int64_t kUnknown = -1;

  struct Node {
    int64_t id;
    int64_t start;
    int64_t end;     // kUnknown until measured, 0 of the root
    int32_t parent;  // index, or kNoNode of the root
    int32_t uses;    // queries that end here and nodes below

    bool is_measured() const { return end != kUnknown; }
  };

  // The nodes of a batch, found by address: a node of a past batch may be gone.
  class Nodes {
   public:
    void clear();
    size_t size() const { return nodes_.size(); }
    Node& operator[](int32_t index) { return nodes_[static_cast<size_t>(index)]; }
    const Node* find(const PyObject* object) const;  // or nullptr
    int32_t find_or_add(const PyObject* object);     // the index; a new node's is the last

   private:
    std::vector<Node> nodes_;
    NodeTable table_;
  };

  // The nodes' objects during a read: a key's length may run any Python, and what is compared by
  // its address must stay alive.
  using Held = std::vector<pybind11::object>;

  int32_t climb(PyObject* leaf, Held& held);
  void measure(int32_t index, const Held& held);
  int64_t id_of(PyObject* object) const;
  int64_t end_of(const Node& node, PyObject* object) const;

  const std::string what_id_;
  const pybind11::str id_, parent_, key_;
  Nodes nodes_;
  Nodes before_;                     // those of the batch before
  std::vector<int32_t> leaves_;      // of the queries
  std::vector<int32_t> unmeasured_;  // from a node up
  std::vector<const Node*> path_;
};

}  // namespace pat
