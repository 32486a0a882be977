// SPDX-License-Identifier: Apache-2.0
// What SGLang's radix trees say of single nodes: the parent and the tokens of the key.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <string>
#include <vector>

namespace pat {

// A node as a source is asked for it. `object`: the node itself where the tree has Python nodes,
// nullptr where it has ids alone.
struct NodeRef {
  int64_t id;
  PyObject* object;
};

// What stands above a node. `root`: the node's parent is the root, which is on no path.
struct NodeAbove {
  int64_t parent = 0;
  int64_t length = 0;  // tokens of the node's own key
  bool root = false;
  size_t num_read = 1;      // nodes that the tree was asked for
  pybind11::object object;  // the parent, of a tree of Python nodes
};

// A node that is known, with what was last read of it.
struct KnownNode {
  NodeRef node;
  int64_t length;
  const PyObject* parent;
};

class NodeSource {
 public:
  virtual ~NodeSource() = default;
  // Throws what the look-up of a node that is gone raises.
  virtual NodeAbove above(const NodeRef& node) const = 0;
  // The indices of those that were split since they were read: the lower part of a split keeps the
  // node's id and gets a new parent.
  virtual std::vector<size_t> find_split(const std::vector<KnownNode>& nodes) const = 0;
};

// SGLang's compiled tree core, by three of its calls, which take node ids: the lengths of the keys
// of nodes; the parent of a node, given the length of its key; and paths from the root.
class TreeCoreNodes final : public NodeSource {
 public:
  explicit TreeCoreNodes(const pybind11::object& core);
  NodeAbove above(const NodeRef& node) const override;
  std::vector<size_t> find_split(const std::vector<KnownNode>& nodes) const override;

 private:
  NodeAbove above_by_path(int64_t id) const;

  const pybind11::object key_lengths_, parent_, paths_;
  const pybind11::str parent_id_, is_root_;
};

// A tree of Python nodes, which have an id, a parent (None of the root) and a key with a length,
// under the attribute names given.
class PythonNodes final : public NodeSource {
 public:
  PythonNodes(const std::string& id, const std::string& parent, const std::string& key);
  NodeAbove above(const NodeRef& node) const override;
  std::vector<size_t> find_split(const std::vector<KnownNode>& nodes) const override;

 private:
  const std::string what_id_;
  const pybind11::str id_, parent_, key_;
};

}  // namespace pat
