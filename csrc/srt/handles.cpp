// SPDX-License-Identifier: Apache-2.0
#include "handles.h"

#include <algorithm>
#include <utility>

#include "python_objects.h"

namespace py = pybind11;

namespace pat {

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
