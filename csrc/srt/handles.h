// SPDX-License-Identifier: Apache-2.0
// Reads of requests what a plan depends on, at C speed, and remembers it, so that a decode step
// looks only at those that may have changed.
#pragma once

#include <pybind11/pybind11.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

namespace pat {

// Node, tokens safe to share, row of req_to_token.
using Handle = std::array<int64_t, 3>;

// The handles of one prefix cache's requests, by row. A handle is taken as remembered if this very
// request has been in the batch of every call for more than `settle` steps without a change, and it
// was last read less than `recheck` steps ago, and its row has not been given out since. A running
// request gets another node only when its own prefill is processed, a step or two after it ran. One
// that is retracted loses its row with its node, and a pause may give it the same row again without
// missing a step; but SGLang counts how often it gives each row out, the row's generation.
//
// A request is known by a weak reference. A strong one would make this the place where finished
// requests are freed, in the middle of a step; an address, like a row, is soon another's.
class HandleMemory {
 public:
  HandleMemory(int64_t settle, int64_t recheck) : settle_(settle), recheck_(recheck) {}

  // A new call, in decode step `step`, which never falls; `anew`: one that reads everything.
  void begin(int64_t step, bool anew) {
    ++call_;
    step_ = step;
    anew_ = anew;
  }

  // The handle to be taken for a request of this call's batch, or nullptr if it must be read.
  const Handle* find(const PyObject* request, int64_t row, int64_t generation) {
    if (!knows(row)) return nullptr;
    Entry& entry = entries_[static_cast<size_t>(row)];
    if (!entry.is_of(request)) return nullptr;
    const bool stayed = entry.seen == call_ - 1 && entry.generation == generation;
    entry.seen = call_;
    if (!stayed) entry.first = step_;
    if (stayed && step_ - entry.first > settle_ && step_ < entry.until && !anew_) {
      return &entry.handle;
    }
    entry.until = step_;  // should an error come before `keep`
    return nullptr;
  }

  // Remembers what was read of a request that `find` did not have.
  void keep(PyObject* request, const Handle& handle, int64_t generation) {
    const int64_t row = handle[2];
    if (row < 0 || row >= kMaxRows) return;
    if (!knows(row)) entries_.resize(static_cast<size_t>(row) + 1);
    Entry& entry = entries_[static_cast<size_t>(row)];
    if (!entry.is_of(request)) {
      entry.owner =
          pybind11::reinterpret_steal<pybind11::object>(PyWeakref_NewRef(request, nullptr));
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

 private:
  static constexpr int64_t kMaxRows = int64_t{1} << 20;

  struct alignas(64) Entry {
    pybind11::object owner;  // weak reference to the request, or nullptr
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

  int64_t settle_;
  int64_t recheck_;
  int64_t call_ = 0;
  int64_t step_ = 0;
  bool anew_ = false;
  std::vector<Entry> entries_;
};

// Reads what a plan depends on out of requests: three dotted integer attributes, such as
// "lock.node": node, tokens safe to share, row of req_to_token. Remembers them: see HandleMemory.
class HandleReader {
 public:
  HandleReader(const std::array<std::string, 3>& paths, int64_t settle, int64_t recheck);

  // int64 [requests, 3]; a None on the way reads as -1, and a request whose row is not the one at
  // `rows_ptr` (int64 [requests]) as (-1, 0, that row). `generations_ptr` (int64
  // [num_generations]): of all rows; without any, where nobody counts them, everything is read.
  // `step` and `anew` as in HandleMemory. Throws AttributeError, and TypeError for anything that is
  // not an integer.
  pybind11::bytes read(const pybind11::sequence& requests, uintptr_t rows_ptr,
                       uintptr_t generations_ptr, int64_t num_generations, int64_t step, bool anew);

 private:
  Handle read_one(PyObject* request) const;

  HandleMemory memory_;
  const std::array<std::string, 3> paths_;
  std::array<std::vector<pybind11::str>, 3> names_;  // of each path
};

}  // namespace pat
