// SPDX-License-Identifier: Apache-2.0
#include "python_paths.h"

#include <algorithm>
#include <utility>

#include "python_objects.h"

namespace py = pybind11;

namespace pat {
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
        const int64_t start = path_field(element, fields.start, "start");
        if (start >= limits[query]) break;
        add(path_field(element, fields.node_id, "node id"), start,
            std::min(path_field(element, fields.end, "end"), limits[query]));
      }
    }
    end_query();
  }
}

PathView PathTable::view() const {
  return {static_cast<int64_t>(offsets_.size()) - 1, offsets_.data(), node_ids_.data(),
          starts_.data(), ends_.data()};
}

HandleReader::HandleReader(const std::array<std::string, 3>& paths, int64_t settle, int64_t recheck)
    : memory_(settle, recheck) {
  for (const std::string& path : paths) {
    std::vector<py::str> names;
    for (size_t begin = 0; begin <= path.size();) {
      const size_t end = std::min(path.find('.', begin), path.size());
      names.push_back(attr_name(path.substr(begin, end - begin)));
      begin = end + 1;
    }
    if (firsts_.empty() || !names[0].is(firsts_.back())) firsts_.push_back(names[0]);
    paths_.push_back({path, std::move(names), firsts_.size() - 1});
  }
}

py::bytes HandleReader::read(const py::sequence& requests, uintptr_t rows_ptr,
                             uintptr_t generations_ptr, int64_t num_generations, int64_t step,
                             bool anew) {
  const py::object list = fast_sequence(requests.ptr(), "requests must be a sequence");
  const auto count = static_cast<size_t>(PySequence_Fast_GET_SIZE(list.ptr()));
  PyObject** items = PySequence_Fast_ITEMS(list.ptr());
  const auto* rows = reinterpret_cast<const int64_t*>(rows_ptr);
  const auto* generations = reinterpret_cast<const int64_t*>(generations_ptr);
  const auto generation = [&](size_t i) {
    return rows[i] >= 0 && rows[i] < num_generations ? generations[rows[i]] : -1;
  };
  constexpr size_t kAhead = 6;  // requests between one hint and the next
  std::vector<Handle> handles(count);
  std::vector<size_t> unread;
  memory_.begin(step, anew || num_generations == 0);
  for (size_t i = 0; i < count; ++i) {
    memory_.prefetch(rows[std::min(i + 32, count - 1)]);
    memory_.prefetch_owner(rows[std::min(i + 16, count - 1)]);
    const Handle* known = memory_.find(items[i], rows[i], generation(i));
    if (known == nullptr) {
      unread.push_back(i);
    } else {
      handles[i] = *known;
    }
  }
  // First the first name of every path, then the rest, then their numbers: what one found has time
  // to come before the next looks at it.
  const auto at = [&](size_t i) { return items[unread[std::min(i, unread.size() - 1)]]; };
  std::vector<py::object> found, values;
  found.reserve(unread.size() * firsts_.size());
  values.reserve(unread.size() * paths_.size());
  for (size_t i = 0; i < unread.size(); ++i) {
    prefetch_object(at(i + 3 * kAhead));
    prefetch_attributes(at(i + 2 * kAhead));
    prefetch_keys(at(i + kAhead));
    for (const py::str& name : firsts_) {
      found.push_back(get_attr(at(i), name.ptr()));
      prefetch_object(found.back().ptr());
    }
  }
  for (const py::object& object : found) prefetch_attributes(object.ptr());
  for (size_t i = 0; i < unread.size(); ++i) {
    for (const Path& path : paths_) {
      py::object value = found[i * firsts_.size() + path.first];
      for (size_t k = 1; k < path.names.size() && !value.is_none(); ++k) {
        value = get_attr(value.ptr(), path.names[k].ptr());
      }
      prefetch_object(value.ptr());
      values.push_back(std::move(value));
    }
  }
  for (size_t i = 0; i < unread.size(); ++i) {
    Handle& handle = handles[unread[i]];
    for (size_t j = 0; j < paths_.size(); ++j) {
      const py::object& value = values[i * paths_.size() + j];
      handle[j] = value.is_none() ? -1 : to_int64(value.ptr(), paths_[j].what.c_str());
    }
    const int64_t row = rows[unread[i]];
    if (handle[2] != row) handle = {-1, 0, row};
    memory_.keep(at(i), handle, generation(unread[i]));
  }
  return {reinterpret_cast<const char*>(handles.data()), handles.size() * sizeof(handles[0])};
}

}  // namespace pat
