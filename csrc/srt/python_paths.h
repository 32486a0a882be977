// SPDX-License-Identifier: Apache-2.0
// Reads paths and attributes out of Python objects at C speed: at 256 requests a loop in Python
// would cost more than the whole schedule.
#pragma once

#include <pybind11/pybind11.h>

#include <array>
#include <string>
#include <vector>

#include "handle_memory.h"
#include "pack/tree.h"

namespace pat {

// Positions of the fields in a path element's tuple.
struct PathFields {
  pybind11::ssize_t node_id;
  pybind11::ssize_t start;
  pybind11::ssize_t end;
};

// Paths of a batch, flattened.
class PathTable {
 public:
  // Fill it query by query: the elements of a path from the root on, then end_query.
  void clear();
  void add(int64_t node_id, int64_t start, int64_t end);
  void end_query() { offsets_.push_back(static_cast<int64_t>(node_ids_.size())); }

  // infos: per query a sequence (list or tuple) of tuples, or None for a query without a path.
  // limits: [queries]; an element that starts at or beyond its query's limit is dropped, one that
  // crosses it is clipped.
  void read(const pybind11::sequence& infos, const int64_t* limits, const PathFields& fields);
  PathView view() const;

 private:
  std::vector<int64_t> offsets_{0};
  std::vector<int64_t> node_ids_, starts_, ends_;
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
  struct Path {
    std::string what;
    std::vector<pybind11::str> names;
    size_t first;  // of the distinct first names, which one is this path's
  };

  std::vector<Path> paths_;
  std::vector<pybind11::str> firsts_;  // distinct among neighbouring paths
  HandleMemory memory_;
};

}  // namespace pat
