// SPDX-License-Identifier: Apache-2.0
// Python objects at C speed: owning look-ups that raise as Python does.
#pragma once

#include <pybind11/pybind11.h>

#include <cstdint>
#include <string>

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

}  // namespace pat
