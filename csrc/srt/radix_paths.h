// SPDX-License-Identifier: Apache-2.0
// The nodes of SGLang's radix tree that a batch stands on, kept from one batch to the next, and
// what is asked of a tree for them: of single nodes the parent and the tokens of the key.
#pragma once

#include <pybind11/pybind11.h>

#include <algorithm>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "check.h"
#include "handles.h"
#include "pack/tree.h"

namespace pat {

// What stands above a node. `root`: the node's parent is the root, which is on no path.
struct NodeAbove {
  int64_t parent = 0;
  int64_t length = 0;  // tokens of the node's own key
  bool root = false;
  size_t num_read = 1;  // nodes that the tree was asked for
  py::object object;    // the parent, of a tree of Python nodes
};

// A node that is known, with what was last read of it. `object`: the node itself where the tree has
// Python nodes, nullptr where it has ids alone.
struct KnownNode {
  int64_t id;
  PyObject* object;
  int64_t length;
  const PyObject* parent;
};

class NodeSource {
 public:
  virtual ~NodeSource() = default;
  // Of a node as KnownNode has it. Throws what the look-up of a node that is gone raises.
  virtual NodeAbove above(int64_t id, PyObject* object) const = 0;
  // The indices of those that were split since they were read: the lower part of a split keeps the
  // node's id and gets a new parent.
  virtual std::vector<size_t> find_split(const std::vector<KnownNode>& nodes) const = 0;
};

// SGLang's compiled tree core, by three of its calls, which take node ids: the lengths of the keys
// of nodes; the parent of a node, given the length of its key; and paths from the root.
class TreeCoreNodes final : public NodeSource {
 public:
  explicit TreeCoreNodes(const py::object& core)
      : key_lengths_(core.attr("get_node_key_lengths")),
        parent_(core.attr("validate_buffer_backup")),
        paths_(core.attr("collect_path_info")),
        parent_id_(attr_name("parent_node_id")),
        is_root_(attr_name("parent_is_root")) {}

  NodeAbove above(int64_t id, PyObject*) const override {
    const py::int_ number(id);
    py::list ids(1);
    ids[0] = number;
    const int64_t tokens = lengths_of(ids)[0];
    const py::int_ length(tokens);
    PyObject* arguments[] = {number.ptr(), length.ptr()};
    const auto state = py::reinterpret_steal<py::object>(
        PyObject_Vectorcall(parent_.ptr(), arguments, 2, nullptr));
    if (!state) throw py::error_already_set();
    if (state.is_none()) return above_by_path(id);
    return {.parent = to_int64(py::getattr(state, parent_id_).ptr(), "parent_node_id"),
            .length = tokens,
            .root = py::getattr(state, is_root_).is(py::bool_(true)),
            .object = {}};
  }

  std::vector<size_t> find_split(const std::vector<KnownNode>& nodes) const override {
    py::list ids(nodes.size());
    for (size_t i = 0; i < nodes.size(); ++i) ids[i] = py::int_(nodes[i].id);
    const std::vector<int64_t> lengths = lengths_of(ids);
    std::vector<size_t> split;
    for (size_t i = 0; i < nodes.size(); ++i) {
      if (lengths[i] != nodes[i].length) split.push_back(i);
    }
    return split;
  }

 private:
  // What the core says of the lengths of nodes' keys.
  std::vector<int64_t> lengths_of(const py::list& ids) const {
    const py::object found =
        fast_sequence(key_lengths_(ids).ptr(), "key lengths must be a sequence");
    PAT_CHECK(PySequence_Fast_GET_SIZE(found.ptr()) == static_cast<py::ssize_t>(ids.size()),
              PySequence_Fast_GET_SIZE(found.ptr()), " key lengths of ", ids.size(), " nodes");
    std::vector<int64_t> lengths(ids.size());
    for (size_t i = 0; i < lengths.size(); ++i) {
      PyObject* length = PySequence_Fast_GET_ITEM(found.ptr(), static_cast<py::ssize_t>(i));
      lengths[i] = to_int64(length, "key length");
    }
    return lengths;
  }

  // Of a root, and of a node whose K/V are not on the device, about which the core tells nothing
  // else. Paths are tuples that begin with id, parent, start and end (SGLang's TreePathNodeInfo).
  NodeAbove above_by_path(int64_t id) const {
    py::list ids(1);
    ids[0] = py::int_(id);
    const py::sequence paths = paths_(ids);
    const py::sequence path = paths[0];
    if (path.size() == 0) return {.root = true, .object = {}};
    const py::object last = path[path.size() - 1];
    return {.parent = path_field(last.ptr(), 1, "parent id"),
            .length = path_field(last.ptr(), 3, "end") - path_field(last.ptr(), 2, "start"),
            .root = path.size() == 1,
            .num_read = path.size(),
            .object = {}};
  }

  const py::object key_lengths_, parent_, paths_;
  const py::str parent_id_, is_root_;
};

// A tree of Python nodes, which have an id, a parent (None of the root) and a key with a length,
// under the attribute names given.
class PythonNodes final : public NodeSource {
 public:
  PythonNodes(const std::string& id, const std::string& parent, const std::string& key)
      : what_id_("node attribute " + id),
        id_(attr_name(id)),
        parent_(attr_name(parent)),
        key_(attr_name(key)) {}

  NodeAbove above(int64_t, PyObject* object) const override {
    py::object parent = py::getattr(object, parent_);
    if (parent.is_none()) return {.root = true, .object = {}};  // the root itself, of an empty key
    const auto length = static_cast<int64_t>(py::len(py::getattr(object, key_)));
    const int64_t above = to_int64(py::getattr(parent, id_).ptr(), what_id_.c_str());
    return {.parent = above, .length = length, .object = std::move(parent)};
  }

  std::vector<size_t> find_split(const std::vector<KnownNode>& nodes) const override {
    std::vector<size_t> split;
    for (size_t i = 0; i < nodes.size(); ++i) {
      if (py::getattr(nodes[i].object, parent_).ptr() != nodes[i].parent) split.push_back(i);
    }
    return split;
  }

 private:
  const std::string what_id_;
  const py::str id_, parent_, key_;
};

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
  using Leaf = std::function<py::object(size_t query, int64_t id)>;

  // A read() that has asked for `most_read` nodes begins no other path, so that no plan stalls a
  // server whose clients have built deep trees. Requests that are left share nothing until a later
  // read() comes to them. A request whose own path has so many unknown nodes shares nothing.
  RadixPaths(std::unique_ptr<NodeSource> source, size_t most_read)
      : source_(std::move(source)), most_read_(most_read) {
    forget();
  }

  // Writes the path of each query as far as another query shares it and its request's tokens are
  // safe to share: nodes with the same queries are one element, under the id of the lowest. Queries
  // beyond `count` have no request. On what the source throws everything is forgotten.
  void read(const Handle* handles, size_t count, size_t num_queries, const Leaf& leaf, Paths& out) {
    PAT_CHECK(num_queries >= count, count, " requests in a batch of ", num_queries, " rows");
    try {
      try_read(handles, count, leaf);
    } catch (...) {
      forget();
      throw;
    }
    out.clear();
    for (size_t query = 0; query < count; ++query) {
      if (query_leaf_[query] != kNoNode) write(query_leaf_[query], handles[query][1], out);
      out.end_query();
    }
    for (size_t query = count; query < num_queries; ++query) out.end_query();
  }

  // Requests that share nothing, by the last read: without a node, with one but no tokens that are
  // safe to share, those whose paths are left to the next, and those whose paths are too long.
  int64_t num_missing = 0, num_uncached = 0, num_unread = 0, num_too_long = 0;

 private:
  static constexpr int32_t kRoot = 0;
  static constexpr int32_t kUnknown = -1;

  // `..._read`: a value of read_, compared for equality alone.
  struct Node {
    int64_t id = 0;
    py::object object;  // of a tree of Python nodes
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

  void forget() {
    nodes_.clear();
    free_.clear();
    table_.clear();
    leaves_.clear();
    nodes_.emplace_back();
    nodes_[kRoot].end = 0;
  }

  // Brings the tree up to date for a batch.
  void try_read(const Handle* handles, size_t count, const Leaf& leaf) {
    ++read_;
    num_missing = num_uncached = num_unread = num_too_long = 0;
    num_read_ = 0;
    named_.clear();
    parents_of_new_.clear();
    query_leaf_.assign(count, kNoNode);
    std::vector<size_t> unknown;
    for (size_t query = 0; query < count; ++query) {
      const auto [id, tokens, row] = handles[query];
      if (id < 0) {
        ++num_missing;
      } else if (tokens <= 0) {
        ++num_uncached;
      } else if (const int32_t index = table_.find(id); index != kNoNode) {
        name(query, index);
      } else {
        unknown.push_back(query);
      }
    }
    // Nodes of requests that have left may be gone, so they are forgotten before the tree is read.
    count_leaves();
    const std::vector<int64_t> too_long = std::exchange(too_long_, {});
    for (const size_t query : unknown) {
      const int64_t id = handles[query][0];
      int32_t index = table_.find(id);
      if (index == kNoNode && std::find(too_long.begin(), too_long.end(), id) == too_long.end()) {
        if (num_read_ >= most_read_) {
          ++num_unread;
          continue;
        }
        index = add(id, leaf(query, id));
        if (!climb(index, most_read_)) index = kNoNode;
      }
      if (index == kNoNode) {
        ++num_too_long;
        too_long_.push_back(id);
      } else {
        name(query, index);
      }
    }
    count_leaves();
    find_split();
  }

  // A query of this read stands on a node.
  void name(size_t query, int32_t index) {
    Node& node = at(index);
    if (node.named_read != read_) {
      node.named_read = read_;
      node.named = 0;
      named_.push_back(index);
    }
    ++node.named;
    query_leaf_[query] = index;
  }

  // Counts the queries on the nodes that this read has named so far, and releases the leaves that
  // it has not named. Those that gain come first: what stays is not freed in between.
  void count_leaves() {
    for (const int32_t index : named_) {
      Node& node = at(index);
      if (node.named <= node.ends) continue;
      if (node.ends == 0) leaves_.push_back(index);
      add_count(index, node.named - std::exchange(node.ends, node.named));
    }
    size_t kept = 0;
    for (size_t i = 0; i < leaves_.size(); ++i) {
      const int32_t index = leaves_[i];
      const int32_t wanted = at(index).named_read == read_ ? at(index).named : 0;
      if (wanted > 0) leaves_[kept++] = index;
      if (wanted < at(index).ends) release(index, at(index).ends - wanted);
    }
    leaves_.resize(kept);
  }

  int32_t add(int64_t id, py::object object) {
    int32_t index = count_of(nodes_);
    if (free_.empty()) {
      nodes_.emplace_back();
    } else {
      index = free_.back();
      free_.pop_back();
      at(index) = Node{};
    }
    at(index).id = id;
    at(index).object = std::move(object);
    at(index).born_read = read_;
    table_.find_or_add(id, index);
    return index;
  }

  void add_count(int32_t index, int32_t delta) {
    for (; index >= 0; index = at(index).parent) at(index).count += delta;
  }

  // Takes queries off a leaf and frees the nodes that no query stands on any more.
  void release(int32_t leaf, int32_t queries) {
    at(leaf).ends -= queries;
    for (int32_t index = leaf, parent; index >= 0; index = parent) {
      Node& node = at(index);
      parent = node.parent;
      node.count -= queries;
      if (node.count > 0 || index == kRoot) continue;
      detach(index);
      drop(index);
    }
  }

  void drop(int32_t index) {
    table_.erase(at(index).id);
    at(index).object = py::object();
    free_.push_back(index);
  }

  // Reads what stands above a node, up to one that is known, and puts each below its parent.
  // Forgets the node and returns false if that takes more than `most` nodes.
  bool climb(int32_t index, size_t most) {
    climbed_.clear();
    size_t read = 0;
    int32_t parent = kNoNode;
    while (parent == kNoNode) {
      NodeAbove above = source_->above(at(index).id, at(index).object.ptr());
      at(index).length = static_cast<int32_t>(above.length);
      climbed_.push_back(index);
      read += above.num_read;
      parent = above.root ? kRoot : table_.find(above.parent);
      if (parent == kNoNode && read >= most) break;
      if (parent == kNoNode) index = add(above.parent, std::move(above.object));
    }
    num_read_ += read;
    if (parent == kNoNode) {
      for (const int32_t dropped : climbed_) drop(dropped);
      return false;
    }
    PAT_CHECK(at(parent).end != kUnknown, "node ", at(parent).id,
              " is among its own ancestors: the nodes are no tree");
    if (at(parent).born_read != read_) parents_of_new_.push_back(parent);
    for (size_t i = climbed_.size(); i-- > 0; parent = climbed_[i]) {
      link(climbed_[i], parent);
      at(climbed_[i]).end = at(parent).end + at(climbed_[i]).length;
    }
    return true;
  }

  // Puts a node, and what stands below it, under a parent.
  void link(int32_t index, int32_t parent) {
    Node& node = at(index);
    for (int32_t above = parent; node.count > 0 && above >= 0; above = at(above).parent) {
      PAT_CHECK(above != index, "node ", node.id,
                " is among its own ancestors: the nodes are no tree");
      at(above).count += node.count;
    }
    node.parent = parent;
    node.previous = kNoNode;
    node.next = at(parent).child;
    if (node.next != kNoNode) at(node.next).previous = index;
    at(parent).child = index;
  }

  // Takes a node out of its parent's list of children.
  void detach(int32_t index) {
    const Node& node = at(index);
    if (node.previous != kNoNode) at(node.previous).next = node.next;
    if (node.next != kNoNode) at(node.next).previous = node.previous;
    if (at(node.parent).child == index) at(node.parent).child = node.next;
  }

  // Under known parents that have got a new child: finds the child that was split for it, if any,
  // and puts it under the new node.
  void find_split() {
    std::sort(parents_of_new_.begin(), parents_of_new_.end());
    parents_of_new_.erase(std::unique(parents_of_new_.begin(), parents_of_new_.end()),
                          parents_of_new_.end());
    std::vector<KnownNode> known;
    std::vector<int32_t> indices;
    for (const int32_t parent : parents_of_new_) {
      for (int32_t child = at(parent).child; child != kNoNode; child = at(child).next) {
        const Node& node = at(child);
        if (node.born_read == read_) continue;
        known.push_back({node.id, node.object.ptr(), node.length, at(parent).object.ptr()});
        indices.push_back(child);
      }
    }
    if (known.empty()) return;
    for (const size_t i : source_->find_split(known)) {
      Node& node = at(indices[i]);
      add_count(node.parent, -node.count);
      detach(indices[i]);
      node.end = kUnknown;
      climb(indices[i], SIZE_MAX);
    }
  }

  // The highest node with the same queries as a node.
  int32_t chain_top(int32_t index) {
    Node& lowest = at(index);
    if (lowest.chain_read != read_) {
      int32_t top = index;
      while (at(top).parent != kRoot && at(at(top).parent).count == lowest.count) {
        top = at(top).parent;
      }
      lowest.chain_read = read_;
      lowest.chain_top = top;
    }
    return lowest.chain_top;
  }

  // The lowest node on a leaf's path on which several queries stand, or kRoot.
  int32_t lowest_shared(int32_t leaf) {
    int32_t index = leaf;
    if (at(leaf).count > 1) return leaf;
    // Counts grow upwards, so that with `top` all below it have one query still.
    if (const int32_t top = at(leaf).top; top != kNoNode && at(top).count == 1) index = top;
    while (at(index).parent != kRoot && at(at(index).parent).count == 1) index = at(index).parent;
    at(leaf).top = index;
    return at(index).parent;
  }

  // Writes a query's path, from the root on, as far as it is shared and below `limit` tokens.
  void write(int32_t leaf, int64_t limit, Paths& out) {
    path_.clear();
    for (int32_t index = lowest_shared(leaf); index != kRoot;) {
      const int32_t above = at(chain_top(index)).parent;
      const int64_t start = at(above).end;
      const int64_t end = std::min<int64_t>(at(index).end, limit);
      if (start < end) path_.push_back({at(index).id, start, end});
      index = above;
    }
    out.elements.insert(out.elements.end(), path_.rbegin(), path_.rend());
  }

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
