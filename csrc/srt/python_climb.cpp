// SPDX-License-Identifier: Apache-2.0
#include "python_climb.h"

#include <algorithm>
#include <utility>

#include "../check.h"
#include "python_objects.h"

namespace py = pybind11;

namespace pat {
namespace {

int64_t key_of(const PyObject* object) {
  return static_cast<int64_t>(reinterpret_cast<intptr_t>(object));
}

}  // namespace

void NodeReader::Nodes::clear() {
  nodes_.clear();
  table_.clear();
}

const NodeReader::Node* NodeReader::Nodes::find(const PyObject* object) const {
  const int32_t index = table_.find(key_of(object));
  return index == kNoNode ? nullptr : &nodes_[static_cast<size_t>(index)];
}

int32_t NodeReader::Nodes::find_or_add(const PyObject* object) {
  const auto next = static_cast<int32_t>(nodes_.size());
  const int32_t index = table_.find_or_add(key_of(object), next);
  if (index != kNoNode) return index;
  nodes_.push_back({0, 0, kUnknown, kNoNode, 0});
  return next;
}

NodeReader::NodeReader(const std::string& id, const std::string& parent, const std::string& key)
    : what_id_("node attribute " + id),
      id_(attr_name(id)),
      parent_(attr_name(parent)),
      key_(attr_name(key)) {
  nodes_.clear();
  before_.clear();
}

void NodeReader::read(const py::sequence& leaves, const int64_t* limits, PathTable& out) {
  const py::object queries = fast_sequence(leaves.ptr(), "leaves must be a sequence");
  const py::ssize_t num_queries = PySequence_Fast_GET_SIZE(queries.ptr());
  std::swap(nodes_, before_);
  nodes_.clear();
  leaves_.clear();
  unmeasured_.clear();
  Held held;
  held.reserve(before_.size());
  PyObject** items = PySequence_Fast_ITEMS(queries.ptr());
  const auto ahead = [&](py::ssize_t query) { return items[std::min(query, num_queries - 1)]; };
  for (py::ssize_t query = 0; query < num_queries; ++query) {
    prefetch_object(ahead(query + 16));
    prefetch_attributes(ahead(query + 8));
    PyObject* leaf = items[query];
    int32_t index = kNoNode;
    if (leaf != Py_None) {
      index = climb(leaf, held);
      ++nodes_[index].uses;
    }
    leaves_.push_back(index);
  }
  for (int32_t index = 0; index < static_cast<int32_t>(nodes_.size()); ++index) {
    if (nodes_[index].uses > 1) measure(index, held);
  }
  out.clear();
  for (py::ssize_t query = 0; query < num_queries; ++query) {
    int32_t index = leaves_[static_cast<size_t>(query)];
    path_.clear();
    for (; index != kNoNode; index = nodes_[index].parent) {
      const Node& node = nodes_[index];
      if (node.is_measured() && node.parent != kNoNode && node.start < limits[query]) {
        path_.push_back(&node);
      }
    }
    for (size_t level = path_.size(); level-- > 0;) {
      const Node& node = *path_[level];
      out.add(node.id, node.start, std::min(node.end, limits[query]));
    }
    out.end_query();
  }
}

// The index of a node: climbs as far as no query has been before.
int32_t NodeReader::climb(PyObject* leaf, Held& held) {
  const auto first = static_cast<int32_t>(nodes_.size());
  int32_t index = nodes_.find_or_add(leaf);
  if (index < first) return index;
  py::object object = py::reinterpret_borrow<py::object>(leaf);
  for (;;) {  // nodes_[first ...] become the leaf, its parent and so on
    held.push_back(std::move(object));
    object = get_attr(held.back().ptr(), parent_.ptr());
    if (object.is_none()) {
      nodes_[index].end = 0;
      break;
    }
    const int32_t parent = nodes_.find_or_add(object.ptr());
    PAT_CHECK(parent < first || parent > index, "node ", id_of(held.back().ptr()),
              " is among its own ancestors: the nodes are no tree");
    nodes_[index].parent = parent;
    ++nodes_[parent].uses;
    if (parent < first) break;
    index = parent;
  }
  return first;
}

// Reads id, start and end of a node that is shared, and so of all above it.
void NodeReader::measure(int32_t index, const Held& held) {
  for (; !nodes_[index].is_measured(); index = nodes_[index].parent) unmeasured_.push_back(index);
  for (int64_t start = nodes_[index].end; !unmeasured_.empty(); unmeasured_.pop_back()) {
    Node& node = nodes_[unmeasured_.back()];
    PyObject* object = held[static_cast<size_t>(unmeasured_.back())].ptr();
    node.id = id_of(object);
    node.start = start;
    start = node.end = end_of(node, object);
  }
}

int64_t NodeReader::id_of(PyObject* object) const {
  return to_int64(get_attr(object, id_.ptr()).ptr(), what_id_.c_str());
}

int64_t NodeReader::end_of(const Node& node, PyObject* object) const {
  const Node* known = before_.find(object);
  if (known != nullptr && known->id == node.id && known->is_measured()) return known->end;
  const Py_ssize_t length = PyObject_Size(get_attr(object, key_.ptr()).ptr());
  if (length < 0) throw py::error_already_set();
  return node.start + length;
}

}  // namespace pat
