// What the binding's files share. They turn Python's descriptions into plans and have no logic of their own.
#pragma once

#include <dlfcn.h>
#include <nanobind/nanobind.h>
#include <unistd.h>

#include <string>

namespace everystep {

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

inline bool shutting_down() {
#ifdef Py_LIMITED_API
  // The stable ABI has it from 3.13 on only, but every interpreter exports it under one of two names.
  static const auto finalizing = [] {
    void* found = ::dlsym(RTLD_DEFAULT, "Py_IsFinalizing");
    if (found == nullptr) found = ::dlsym(RTLD_DEFAULT, "_Py_IsFinalizing");
    return reinterpret_cast<int (*)()>(found);
  }();
  return (finalizing != nullptr && finalizing() != 0) || Py_IsInitialized() == 0;
#elif PY_VERSION_HEX >= 0x030D0000
  return Py_IsFinalizing() != 0 || Py_IsInitialized() == 0;
#else
  return _Py_IsFinalizing() != 0 || Py_IsInitialized() == 0;
#endif
}
// Once the interpreter shuts down, Python ends each thread that asks for it: up to 3.13 by unwinding its stack,
// which no destructor lets pass. The handler that catches the unwinding parks the thread until the process ends,
// as Python does from 3.14 on. Any other exception is rethrown.
[[noreturn]] inline void park_forever() {
  if (!shutting_down()) throw;
  for (;;) ::pause();
}

// Lets go of the interpreter for as long as this lives.
class Released {
 public:
  Released() : state_(PyEval_SaveThread()) {}
  ~Released() {
    try {
      PyEval_RestoreThread(state_);
    } catch (...) {
      park_forever();
    }
  }
  Released(const Released&) = delete;
  Released& operator=(const Released&) = delete;

 private:
  PyThreadState* const state_;
};

void bind_pieces(nb::module_& m);  // bind_pieces.cpp: what jobs move
void bind_jobs(nb::module_& m);    // bind_jobs.cpp: transfers, and syncing what they wrote
void bind_system(nb::module_& m);  // bind_system.cpp: directories, probing, the fault seam
void bind_shelf(nb::module_& m);   // bind_shelf.cpp: shelves

}  // namespace everystep
