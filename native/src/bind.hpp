// What the binding's files share. They turn Python's descriptions into plans and have no logic of their own.
#pragma once

#include <nanobind/nanobind.h>

#include <string>

namespace holdfast {

namespace nb = nanobind;

// Any path-like object, in the file system's encoding.
std::string fs_path(nb::handle path);

// A bytes-like object's memory, for as long as this lives.
struct View {
  Py_buffer buffer{};
  explicit View(nb::handle object, int request = PyBUF_SIMPLE) {
    if (PyObject_GetBuffer(object.ptr(), &buffer, request) != 0) throw nb::python_error();
  }
  ~View() { PyBuffer_Release(&buffer); }
  View(const View&) = delete;
  View& operator=(const View&) = delete;
};

void bind_jobs(nb::module_& m);    // bind_jobs.cpp: transfers, and syncing what they wrote
void bind_system(nb::module_& m);  // bind_system.cpp: directories, probing, the fault seam

}  // namespace holdfast
