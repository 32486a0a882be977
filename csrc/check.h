// SPDX-License-Identifier: Apache-2.0
// One check macro: throws std::invalid_argument with the parts, file and line. pybind11 turns it
// into a ValueError.
#pragma once

#include <sstream>
#include <stdexcept>

namespace pat {

template <typename... Parts>
[[noreturn]] void fail_check(const char* file, int line, const Parts&... parts) {
  std::ostringstream message;
  (message << ... << parts);
  message << " (" << file << ":" << line << ")";
  throw std::invalid_argument(message.str());
}

}  // namespace pat

// PAT_CHECK(cond, parts...): `parts` are streamed and evaluated only on failure.
#define PAT_CHECK(cond, ...)                                   \
  do {                                                         \
    if (!(cond)) [[unlikely]] {                                \
      ::pat::fail_check(__FILE_NAME__, __LINE__, __VA_ARGS__); \
    }                                                          \
  } while (false)
