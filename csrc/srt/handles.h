// SPDX-License-Identifier: Apache-2.0
// Reads of requests what a plan depends on, at C speed, and remembers it, so that a decode step
// looks only at those that may have changed; and Python objects at C speed, by owning look-ups that
// raise as Python does.
#pragma once

#include <pybind11/pybind11.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace pat {

namespace py = pybind11;

// Throws TypeError naming `what` for anything that is not an integer of 64 bits.
inline int64_t to_int64(PyObject* value, const char* what) {
  const long long number = PyLong_AsLongLong(value);
  if (number == -1 && PyErr_Occurred()) {
    PyErr_Clear();
    throw py::type_error(std::string(what) +
                         " is not an integer: " + std::string(py::repr(py::handle(value))));
  }
  return number;
}

// A number in an element of a path. Throws TypeError naming the field.
inline int64_t path_field(PyObject* tuple, py::ssize_t index, const char* what) {
  if (!PyTuple_Check(tuple) || index < 0 || index >= PyTuple_GET_SIZE(tuple)) {
    throw py::type_error(std::string("a path element must be a tuple with field ") +
                         std::to_string(index) + " (" + what +
                         "), got: " + std::string(py::repr(py::handle(tuple))));
  }
  return to_int64(PyTuple_GET_ITEM(tuple, index), what);
}

// Interned: a look-up compares such a name by its address.
inline py::str attr_name(const std::string& name) {
  PyObject* interned = PyUnicode_InternFromString(name.c_str());
  if (interned == nullptr) throw py::error_already_set();
  return py::reinterpret_steal<py::str>(interned);
}

// Owning view of a sequence, with borrowed items. Throws TypeError saying `what`.
inline py::object fast_sequence(PyObject* sequence, const char* what) {
  PyObject* fast = PySequence_Fast(sequence, what);
  if (fast == nullptr) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(fast);
}

// Node, tokens safe to share, row of req_to_token.
using Handle = std::array<int64_t, 3>;

// Reads the handles of one prefix cache's requests, three dotted integer attributes, such as
// "lock.node", and remembers them by row. A handle is taken as remembered if this very request has
// been in the batch of every call for more than `settle` steps without a change, and it was last
// read less than `recheck` steps ago, and its row has not been given out since. A running request
// gets another node only when its own prefill is processed, a step or two after it ran. One that is
// retracted loses its row with its node, and a pause may give it the same row again without missing
// a step; but SGLang counts how often it gives each row out, the row's generation.
//
// A request is known by a weak reference. A strong one would make this the place where finished
// requests are freed, in the middle of a step; an address, like a row, is soon another's.
class HandleReader {
 public:
  HandleReader(const std::array<std::string, 3>& paths, int64_t settle, int64_t recheck)
      : paths_(paths), settle_(settle), recheck_(recheck) {
    for (size_t i = 0; i < paths.size(); ++i) {
      for (size_t begin = 0; begin <= paths[i].size();) {
        const size_t end = std::min(paths[i].find('.', begin), paths[i].size());
        names_[i].push_back(attr_name(paths[i].substr(begin, end - begin)));
        begin = end + 1;
      }
    }
  }

  // int64 [requests, 3]; a None on the way reads as -1, and a request whose row is not the one at
  // `rows_ptr` (int64 [requests]) as (-1, 0, that row). `generations_ptr` (int64
  // [num_generations]): of all rows; without any, where nobody counts them, everything is read, as
  // it is with `anew`. `step`: of decoding, which never falls. Throws AttributeError, and TypeError
  // for anything that is not an integer.
  py::bytes read(const py::sequence& requests, uintptr_t rows_ptr, uintptr_t generations_ptr,
                 int64_t num_generations, int64_t step, bool anew) {
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

 private:
  static constexpr int64_t kMaxRows = int64_t{1} << 20;

  struct alignas(64) Entry {
    py::object owner;  // weak reference to the request, or nullptr
    Handle handle{};
    int64_t generation = 0;  // of its row
    int64_t first = 0;       // the step since which it has been here unchanged
    int64_t until = 0;       // the step from which on it is read again
    int64_t seen = 0;        // the last call with it

    // PyWeakref_GetObject would touch the object too, which is as cold as the rest of it, to tell
    // whether it is still alive: `request` is.
    bool is_of(const PyObject* request) const {
      return owner && reinterpret_cast<const PyWeakReference*>(owner.ptr())->wr_object == request;
    }
  };

  bool knows(int64_t row) const { return row >= 0 && static_cast<uint64_t>(row) < entries_.size(); }
  // The handle to be taken for a request of this call's batch, or nullptr if it must be read.
  const Handle* find(const PyObject* request, int64_t row, int64_t generation, bool anew) {
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

  Handle read_one(PyObject* request) const {
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

  // Remembers what was read of a request that `find` did not have.
  void keep(PyObject* request, const Handle& handle, int64_t generation) {
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

  const std::array<std::string, 3> paths_;
  std::array<std::vector<py::str>, 3> names_;  // of each path
  const int64_t settle_, recheck_;
  int64_t call_ = 0, step_ = 0;
  std::vector<Entry> entries_;  // by row
};

}  // namespace pat
