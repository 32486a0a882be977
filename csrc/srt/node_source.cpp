// SPDX-License-Identifier: Apache-2.0
#include "node_source.h"

#include "../check.h"
#include "python_objects.h"

namespace py = pybind11;

namespace pat {

TreeCoreNodes::TreeCoreNodes(const py::object& core)
    : key_lengths_(core.attr("get_node_key_lengths")),
      parent_(core.attr("validate_buffer_backup")),
      paths_(core.attr("collect_path_info")),
      parent_id_(attr_name("parent_node_id")),
      is_root_(attr_name("parent_is_root")) {}

// Lengths of the keys of the nodes id(0), id(1), ... in one call.
template <typename Id>
std::vector<int64_t> TreeCoreNodes::lengths(size_t count, const Id& id) const {
  py::list ids(count);
  for (size_t i = 0; i < count; ++i) ids[i] = py::int_(id(i));
  const py::object found = fast_sequence(key_lengths_(ids).ptr(), "key lengths must be a sequence");
  PAT_CHECK(PySequence_Fast_GET_SIZE(found.ptr()) == static_cast<py::ssize_t>(count),
            PySequence_Fast_GET_SIZE(found.ptr()), " key lengths of ", count, " nodes");
  std::vector<int64_t> lengths(count);
  for (size_t i = 0; i < count; ++i) {
    PyObject* length = PySequence_Fast_GET_ITEM(found.ptr(), static_cast<py::ssize_t>(i));
    lengths[i] = to_int64(length, "key length");
  }
  return lengths;
}

void TreeCoreNodes::read(const std::vector<NodeRef>& nodes, std::vector<NodeAbove>& above) const {
  above.assign(nodes.size(), {});
  const std::vector<int64_t> lens = lengths(nodes.size(), [&](size_t i) { return nodes[i].id; });
  for (size_t i = 0; i < nodes.size(); ++i) {
    const py::int_ id(nodes[i].id);
    const py::int_ length(lens[i]);
    PyObject* arguments[] = {id.ptr(), length.ptr()};
    const auto state = py::reinterpret_steal<py::object>(
        PyObject_Vectorcall(parent_.ptr(), arguments, 2, nullptr));
    if (!state) throw py::error_already_set();
    // The core says nothing of a root, and of a node whose K/V are not on the device.
    if (state.is_none()) {
      std::vector<NodeAbove> path;
      read_path(nodes[i], path);
      above[i].root = path.empty();
      if (!path.empty()) above[i] = std::move(path.front());
      continue;
    }
    above[i].length = lens[i];
    above[i].root = get_attr(state.ptr(), is_root_.ptr()).is(py::bool_(true));
    above[i].parent = to_int64(get_attr(state.ptr(), parent_id_.ptr()).ptr(), "parent_node_id");
  }
}

// The core gives it from the root on, as tuples that begin with id, parent, start and end
// (SGLang's TreePathNodeInfo).
void TreeCoreNodes::read_path(const NodeRef& node, std::vector<NodeAbove>& path) const {
  py::list ids(1);
  ids[0] = py::int_(node.id);
  const py::object paths = fast_sequence(paths_(ids).ptr(), "paths must be a sequence");
  PAT_CHECK(PySequence_Fast_GET_SIZE(paths.ptr()) == 1, "not one path to one node");
  const py::object found =
      fast_sequence(PySequence_Fast_GET_ITEM(paths.ptr(), 0), "a path must be a sequence");
  path.clear();
  for (py::ssize_t level = PySequence_Fast_GET_SIZE(found.ptr()); level-- > 0;) {
    PyObject* element = PySequence_Fast_GET_ITEM(found.ptr(), level);
    NodeAbove& above = path.emplace_back();
    above.root = level == 0;
    above.parent = path_field(element, 1, "parent id");
    above.length = path_field(element, 3, "end") - path_field(element, 2, "start");
  }
}

void TreeCoreNodes::find_split(const std::vector<KnownNode>& nodes,
                               std::vector<size_t>& split) const {
  const std::vector<int64_t> lens =
      lengths(nodes.size(), [&](size_t i) { return nodes[i].node.id; });
  for (size_t i = 0; i < nodes.size(); ++i) {
    if (lens[i] != nodes[i].length) split.push_back(i);
  }
}

PythonNodes::PythonNodes(const std::string& id, const std::string& parent, const std::string& key)
    : what_id_("node attribute " + id),
      id_(attr_name(id)),
      parent_(attr_name(parent)),
      key_(attr_name(key)) {}

void PythonNodes::read(const std::vector<NodeRef>& nodes, std::vector<NodeAbove>& above) const {
  above.assign(nodes.size(), {});
  for (size_t i = 0; i < nodes.size(); ++i) {
    PyObject* node = nodes[i].object;
    py::object parent = get_attr(node, parent_.ptr());
    if (parent.is_none()) {  // the root itself, whose key is empty
      above[i].root = true;
      continue;
    }
    const Py_ssize_t length = PyObject_Size(get_attr(node, key_.ptr()).ptr());
    if (length < 0) throw py::error_already_set();
    above[i].length = length;
    above[i].parent = to_int64(get_attr(parent.ptr(), id_.ptr()).ptr(), what_id_.c_str());
    above[i].object = std::move(parent);
  }
}

void PythonNodes::find_split(const std::vector<KnownNode>& nodes,
                             std::vector<size_t>& split) const {
  constexpr size_t kAhead = 8;  // nodes between a hint and the look-up of the parent
  for (size_t i = 0; i < nodes.size(); ++i) {
    if (i + kAhead < nodes.size()) prefetch_attributes(nodes[i + kAhead].node.object);
    if (get_attr(nodes[i].node.object, parent_.ptr()).ptr() != nodes[i].parent) split.push_back(i);
  }
}

}  // namespace pat
