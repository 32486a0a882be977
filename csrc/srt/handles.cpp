// SPDX-License-Identifier: Apache-2.0
#include "handles.h"

#include <algorithm>
#include <utility>

#include "python_objects.h"

namespace py = pybind11;

namespace pat {

HandleReader::HandleReader(const std::array<std::string, 3>& paths, int64_t settle, int64_t recheck)
    : memory_(settle, recheck), paths_(paths) {
  for (size_t i = 0; i < paths.size(); ++i) {
    for (size_t begin = 0; begin <= paths[i].size();) {
      const size_t end = std::min(paths[i].find('.', begin), paths[i].size());
      names_[i].push_back(attr_name(paths[i].substr(begin, end - begin)));
      begin = end + 1;
    }
  }
}

py::bytes HandleReader::read(const py::sequence& requests, uintptr_t rows_ptr,
                             uintptr_t generations_ptr, int64_t num_generations, int64_t step,
                             bool anew) {
  const py::object list = fast_sequence(requests.ptr(), "requests must be a sequence");
  const auto count = static_cast<size_t>(PySequence_Fast_GET_SIZE(list.ptr()));
  const auto* rows = reinterpret_cast<const int64_t*>(rows_ptr);
  const auto* generations = reinterpret_cast<const int64_t*>(generations_ptr);
  std::vector<Handle> handles(count);
  memory_.begin(step, anew || num_generations == 0);
  for (size_t i = 0; i < count; ++i) {
    const int64_t row = rows[i];
    const int64_t generation = row >= 0 && row < num_generations ? generations[row] : -1;
    PyObject* request = PySequence_Fast_GET_ITEM(list.ptr(), static_cast<py::ssize_t>(i));
    if (const Handle* known = memory_.find(request, row, generation)) {
      handles[i] = *known;
      continue;
    }
    handles[i] = read_one(request);
    if (handles[i][2] != row) handles[i] = {-1, 0, row};
    memory_.keep(request, handles[i], generation);
  }
  return {reinterpret_cast<const char*>(handles.data()), handles.size() * sizeof(handles[0])};
}

Handle HandleReader::read_one(PyObject* request) const {
  Handle handle;
  for (size_t i = 0; i < names_.size(); ++i) {
    auto value = py::reinterpret_borrow<py::object>(request);
    for (const py::str& name : names_[i]) {
      if (!value.is_none()) value = get_attr(value.ptr(), name.ptr());
    }
    handle[i] = value.is_none() ? -1 : to_int64(value.ptr(), paths_[i].c_str());
  }
  return handle;
}

}  // namespace pat
