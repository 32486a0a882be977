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
  HandleReader(const std::array<std::string, 3>& paths, int64_t settle, int64_t recheck);

  // int64 [requests, 3]; a None on the way reads as -1, and a request whose row is not the one at
  // `rows_ptr` (int64 [requests]) as (-1, 0, that row). `generations_ptr` (int64
  // [num_generations]): of all rows; without any, where nobody counts them, everything is read, as
  // it is with `anew`. `step`: of decoding, which never falls. Throws AttributeError, and TypeError
  // for anything that is not an integer.
  pybind11::bytes read(const pybind11::sequence& requests, uintptr_t rows_ptr,
                       uintptr_t generations_ptr, int64_t num_generations, int64_t step, bool anew);

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
  const Handle* find(const PyObject* request, int64_t row, int64_t generation, bool anew);
  Handle read_one(PyObject* request) const;
  void keep(PyObject* request, const Handle& handle, int64_t generation);

  const std::array<std::string, 3> paths_;
  std::array<std::vector<pybind11::str>, 3> names_;  // of each path
  const int64_t settle_, recheck_;
  int64_t call_ = 0, step_ = 0;
  std::vector<Entry> entries_;  // by row
};

}  // namespace pat
