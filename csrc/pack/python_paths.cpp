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

py::bytes read_handles(const py::sequence& requests, const std::array<std::string, 3>& paths,
                       uintptr_t rows_ptr) {
  std::array<std::vector<py::str>, 3> names;
  for (size_t i = 0; i < paths.size(); ++i) {
    for (size_t begin = 0; begin <= paths[i].size();) {
      const size_t end = std::min(paths[i].find('.', begin), paths[i].size());
      names[i].push_back(attr_name(paths[i].substr(begin, end - begin)));
      begin = end + 1;
    }
  }
  const py::object list = fast_sequence(requests.ptr(), "requests must be a sequence");
  const py::ssize_t count = PySequence_Fast_GET_SIZE(list.ptr());
  PyObject** items = PySequence_Fast_ITEMS(list.ptr());
  const auto at = [&](py::ssize_t i) { return items[std::min(i, count - 1)]; };
  // First the first name of every path (once where neighbouring paths share it), then the rest.
  std::array<size_t, 3> first_of{};  // where a path's first value is
  size_t num_firsts = 0;
  for (size_t j = 0; j < paths.size(); ++j) {
    num_firsts += j == 0 || !names[j][0].is(names[j - 1][0]);
    first_of[j] = num_firsts - 1;
  }
  constexpr py::ssize_t kAhead = 6;  // requests between one hint and the next
  std::vector<py::object> firsts;
  firsts.reserve(static_cast<size_t>(count) * num_firsts);
  for (py::ssize_t i = 0; i < count; ++i) {
    prefetch_object(at(i + 3 * kAhead));
    prefetch_attributes(at(i + 2 * kAhead));
    prefetch_keys(at(i + kAhead));
    for (size_t j = 0; j < paths.size(); ++j) {
      if (j > 0 && first_of[j] == first_of[j - 1]) continue;
      firsts.push_back(get_attr(items[i], names[j][0].ptr()));
      prefetch_object(firsts.back().ptr());
    }
  }
  for (const py::object& first : firsts) prefetch_attributes(first.ptr());
  const auto* rows = reinterpret_cast<const int64_t*>(rows_ptr);
  std::vector<std::array<int64_t, 3>> handles(static_cast<size_t>(count));
  for (size_t i = 0; i < handles.size(); ++i) {
    for (size_t j = 0; j < paths.size(); ++j) {
      py::object value = firsts[i * num_firsts + first_of[j]];
      for (size_t k = 1; k < names[j].size() && !value.is_none(); ++k) {
        value = get_attr(value.ptr(), names[j][k].ptr());
      }
      handles[i][j] = value.is_none() ? -1 : to_int64(value.ptr(), paths[j].c_str());
    }
    if (handles[i][2] != rows[i]) handles[i] = {-1, 0, rows[i]};
  }
  return {reinterpret_cast<const char*>(handles.data()), handles.size() * sizeof(handles[0])};
}

}  // namespace pat
