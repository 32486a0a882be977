// SPDX-License-Identifier: Apache-2.0
#include "handles.h"

#include <algorithm>
#include <utility>

#include "python_objects.h"

namespace py = pybind11;

namespace pat {

HandleReader::HandleReader(const std::array<std::string, 3>& paths, int64_t settle, int64_t recheck)
    : paths_(paths), settle_(settle), recheck_(recheck) {
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
  ++call_;
  step_ = step;
  anew |= num_generations == 0;
  for (size_t i = 0; i < count; ++i) {
    const int64_t row = rows[i];
    const int64_t generation = row >= 0 && row < num_generations ? generations[row] : -1;
    PyObject* request = PySequence_Fast_GET_ITEM(list.ptr(), static_cast<py::ssize_t>(i));
    if (const Handle* known = find(request, row, generation, anew)) {
      handles[i] = *known;
      continue;
    }
    handles[i] = read_one(request);
    if (handles[i][2] != row) handles[i] = {-1, 0, row};
    keep(request, handles[i], generation);
  }
  return {reinterpret_cast<const char*>(handles.data()), handles.size() * sizeof(handles[0])};
}

// The handle to be taken for a request of this call's batch, or nullptr if it must be read.
const Handle* HandleReader::find(const PyObject* request, int64_t row, int64_t generation,
                                 bool anew) {
  if (!knows(row)) return nullptr;
  Entry& entry = entries_[static_cast<size_t>(row)];
  if (!entry.is_of(request)) return nullptr;
  const bool stayed = entry.seen == call_ - 1 && entry.generation == generation;
  entry.seen = call_;
  if (!stayed) entry.first = step_;
  if (stayed && step_ - entry.first > settle_ && step_ < entry.until && !anew) {
    return &entry.handle;
  }
  entry.until = step_;  // should an error come before `keep`
  return nullptr;
}

// Remembers what was read of a request that `find` did not have.
void HandleReader::keep(PyObject* request, const Handle& handle, int64_t generation) {
  const int64_t row = handle[2];
  if (row < 0 || row >= kMaxRows) return;
  if (!knows(row)) entries_.resize(static_cast<size_t>(row) + 1);
  Entry& entry = entries_[static_cast<size_t>(row)];
  if (!entry.is_of(request)) {
    entry.owner = py::reinterpret_steal<py::object>(PyWeakref_NewRef(request, nullptr));
    if (!entry.owner) PyErr_Clear();  // such objects are read every time
    entry.first = step_;
    entry.seen = call_;
  }
  if (entry.handle != handle) entry.first = step_;
  entry.handle = handle;
  entry.generation = generation;
  // Requests that were read together are not all read again in one step.
  entry.until = step_ + recheck_ - row % (recheck_ / 2 + 1);
}

Handle HandleReader::read_one(PyObject* request) const {
  Handle handle;
  for (size_t i = 0; i < names_.size(); ++i) {
    auto value = py::reinterpret_borrow<py::object>(request);
    for (const py::str& name : names_[i]) {
      if (!value.is_none()) value = py::getattr(value, name);
    }
    handle[i] = value.is_none() ? -1 : to_int64(value.ptr(), paths_[i].c_str());
  }
  return handle;
}

}  // namespace pat
