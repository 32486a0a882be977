// SPDX-License-Identifier: Apache-2.0
#include "python_paths.h"

#include <algorithm>

#include "python_objects.h"

namespace py = pybind11;

namespace pat {
namespace {

int64_t field_of(PyObject* tuple, py::ssize_t index, const char* what) {
  if (!PyTuple_Check(tuple) || index < 0 || index >= PyTuple_GET_SIZE(tuple)) {
    throw py::type_error(std::string("a path element must be a tuple with field ") +
                         std::to_string(index) + " (" + what +
                         "), got: " + std::string(py::repr(py::handle(tuple))));
  }
  return to_int64(PyTuple_GET_ITEM(tuple, index), what);
}

}  // namespace

void PathTable::clear() {
  offsets_.assign(1, 0);
  node_ids_.clear();
  starts_.clear();
  ends_.clear();
}

void PathTable::add(int64_t node_id, int64_t start, int64_t end) {
  node_ids_.push_back(node_id);
  starts_.push_back(start);
  ends_.push_back(end);
}

void PathTable::read(const py::sequence& infos, const int64_t* limits, const PathFields& fields) {
  const py::object queries = fast_sequence(infos.ptr(), "paths must be a sequence");
  const py::ssize_t num_queries = PySequence_Fast_GET_SIZE(queries.ptr());
  clear();
  for (py::ssize_t query = 0; query < num_queries; ++query) {
    PyObject* info = PySequence_Fast_GET_ITEM(queries.ptr(), query);
    if (info != Py_None) {
      const py::object path = fast_sequence(info, "a path must be a sequence of tuples or None");
      const py::ssize_t depth = PySequence_Fast_GET_SIZE(path.ptr());
      for (py::ssize_t level = 0; level < depth; ++level) {
        PyObject* element = PySequence_Fast_GET_ITEM(path.ptr(), level);
        const int64_t start = field_of(element, fields.start, "start");
        if (start >= limits[query]) break;
        add(field_of(element, fields.node_id, "node id"), start,
            std::min(field_of(element, fields.end, "end"), limits[query]));
      }
    }
    end_query();
  }
}

PathView PathTable::view() const {
  return {static_cast<int64_t>(offsets_.size()) - 1, offsets_.data(), node_ids_.data(),
          starts_.data(), ends_.data()};
}

void read_attrs(const py::sequence& objects, const std::vector<std::string>& paths,
                uintptr_t out_ptr) {
  std::vector<std::vector<py::str>> names(paths.size());
  for (size_t i = 0; i < paths.size(); ++i) {
    for (size_t begin = 0; begin <= paths[i].size();) {
      const size_t end = std::min(paths[i].find('.', begin), paths[i].size());
      names[i].push_back(attr_name(paths[i].substr(begin, end - begin)));
      begin = end + 1;
    }
  }
  const py::object list = fast_sequence(objects.ptr(), "objects must be a sequence");
  const py::ssize_t count = PySequence_Fast_GET_SIZE(list.ptr());
  auto* out = reinterpret_cast<int64_t*>(out_ptr);
  // Each look-up takes about 20 ns: neighbouring paths share that of an equal first name.
  std::vector<bool> same_head(paths.size(), false);
  for (size_t j = 1; j < paths.size(); ++j) same_head[j] = names[j][0].is(names[j - 1][0]);
  for (py::ssize_t i = 0; i < count; ++i) {
    PyObject* object = PySequence_Fast_GET_ITEM(list.ptr(), i);
    py::object head;
    for (size_t j = 0; j < paths.size(); ++j) {
      if (!same_head[j]) head = get_attr(object, names[j][0].ptr());
      py::object value = head;
      for (size_t k = 1; k < names[j].size() && !value.is_none(); ++k) {
        value = get_attr(value.ptr(), names[j][k].ptr());
      }
      *out++ = value.is_none() ? -1 : to_int64(value.ptr(), paths[j].c_str());
    }
  }
}

}  // namespace pat
