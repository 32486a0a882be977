// SPDX-License-Identifier: Apache-2.0
#include "node_source.h"

#include "../check.h"
#include "python_objects.h"

namespace py = pybind11;

namespace pat {
namespace {

// What the core says of the lengths of nodes' keys.
std::vector<int64_t> lengths_of(const py::object& key_lengths, const py::list& ids) {
  const py::object found = fast_sequence(key_lengths(ids).ptr(), "key lengths must be a sequence");
  PAT_CHECK(PySequence_Fast_GET_SIZE(found.ptr()) == static_cast<py::ssize_t>(ids.size()),
            PySequence_Fast_GET_SIZE(found.ptr()), " key lengths of ", ids.size(), " nodes");
  std::vector<int64_t> lengths(ids.size());
  for (size_t i = 0; i < lengths.size(); ++i) {
    PyObject* length = PySequence_Fast_GET_ITEM(found.ptr(), static_cast<py::ssize_t>(i));
    lengths[i] = to_int64(length, "key length");
  }
  return lengths;
}

}  // namespace

TreeCoreNodes::TreeCoreNodes(const py::object& core)
    : key_lengths_(core.attr("get_node_key_lengths")),
      parent_(core.attr("validate_buffer_backup")),
      paths_(core.attr("collect_path_info")),
      parent_id_(attr_name("parent_node_id")),
      is_root_(attr_name("parent_is_root")) {}

NodeAbove TreeCoreNodes::above(const NodeRef& node) const {
  const py::int_ id(node.id);
  py::list ids(1);
  ids[0] = id;
  const int64_t tokens = lengths_of(key_lengths_, ids)[0];
  const py::int_ length(tokens);
  PyObject* arguments[] = {id.ptr(), length.ptr()};
  const auto state =
      py::reinterpret_steal<py::object>(PyObject_Vectorcall(parent_.ptr(), arguments, 2, nullptr));
  if (!state) throw py::error_already_set();
  if (state.is_none()) return above_by_path(node.id);
  return {.parent = to_int64(py::getattr(state, parent_id_).ptr(), "parent_node_id"),
          .length = tokens,
          .root = py::getattr(state, is_root_).is(py::bool_(true)),
          .object = {}};
}

// Of a root, and of a node whose K/V are not on the device, about which the core tells nothing
// else. Paths are tuples that begin with id, parent, start and end (SGLang's TreePathNodeInfo).
NodeAbove TreeCoreNodes::above_by_path(int64_t id) const {
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

std::vector<size_t> TreeCoreNodes::find_split(const std::vector<KnownNode>& nodes) const {
  py::list ids(nodes.size());
  for (size_t i = 0; i < nodes.size(); ++i) ids[i] = py::int_(nodes[i].node.id);
  const std::vector<int64_t> lengths = lengths_of(key_lengths_, ids);
  std::vector<size_t> split;
  for (size_t i = 0; i < nodes.size(); ++i) {
    if (lengths[i] != nodes[i].length) split.push_back(i);
  }
  return split;
}

PythonNodes::PythonNodes(const std::string& id, const std::string& parent, const std::string& key)
    : what_id_("node attribute " + id),
      id_(attr_name(id)),
      parent_(attr_name(parent)),
      key_(attr_name(key)) {}

NodeAbove PythonNodes::above(const NodeRef& node) const {
  py::object parent = py::getattr(node.object, parent_);
  if (parent.is_none()) return {.root = true, .object = {}};  // the root itself, of an empty key
  const auto length = static_cast<int64_t>(py::len(py::getattr(node.object, key_)));
  const int64_t id = to_int64(py::getattr(parent, id_).ptr(), what_id_.c_str());
  return {.parent = id, .length = length, .object = std::move(parent)};
}

std::vector<size_t> PythonNodes::find_split(const std::vector<KnownNode>& nodes) const {
  std::vector<size_t> split;
  for (size_t i = 0; i < nodes.size(); ++i) {
    if (py::getattr(nodes[i].node.object, parent_).ptr() != nodes[i].parent) split.push_back(i);
  }
  return split;
}

}  // namespace pat
