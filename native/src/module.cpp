// The Python module: errors, checksums, and the parts bound elsewhere.
#include <nanobind/stl/vector.h>

#include <cstring>
#include <memory>
#include <system_error>
#include <vector>

#include "bind.hpp"
#include "control.hpp"
#include "hash.hpp"
#include "sys.hpp"

namespace everystep {

std::string fs_path(nb::handle path) {
  nb::object bytes;
  PyObject* raw = nullptr;
  if (PyUnicode_FSConverter(path.ptr(), &raw) == 0) throw nb::python_error();
  bytes = nb::steal(raw);
  return {PyBytes_AsString(raw), static_cast<size_t>(PyBytes_Size(raw))};
}

namespace {

// An instance, not a class and its arguments: before Python 3.11 `except FileNotFoundError` looks at what is set
// here, and OSError becomes one of its subclasses only when it is made.
void raise_os_error(const nb::tuple& arguments) {
  const nb::object raised = nb::steal(PyObject_CallObject(PyExc_OSError, arguments.ptr()));
  if (raised.is_valid()) PyErr_SetObject(raised.type().ptr(), raised.ptr());
}

// Native errors become what Python's own file functions raise: OSError with errno and filename.
void translate(const std::exception_ptr& pointer, void*) {
  try {
    std::rethrow_exception(pointer);
  } catch (const sys::Error& error) {
    const std::string text =
        std::string(std::strerror(error.code)) + " (" + std::string(sys::name(error.call)) + ")";
    raise_os_error(nb::make_tuple(error.code, nb::str(text.c_str()),
                                  nb::steal(PyUnicode_DecodeFSDefault(error.path.c_str()))));
  } catch (const std::system_error& error) {  // no thread can be started
    const bool thread = error.code() == std::errc::resource_unavailable_try_again;
    const std::string text = std::string(thread ? "no thread can be started: " : "") + error.what();
    raise_os_error(nb::make_tuple(error.code().value(), nb::str(text.c_str())));
  } catch (const Cancelled& cancelled) {
    PyErr_SetString(PyExc_InterruptedError, cancelled.what());
  }
}

// `common`: with the instructions that every processor of this kind has, as on the oldest of them. `copies`: the
// address for a copy of each block, 0 for none; or nothing.
nb::list xxh3_64_each(nb::list blocks, bool common, const std::vector<uintptr_t>& copies) {
  std::vector<std::unique_ptr<View>> views;
  std::vector<Hashing> hashing;
  for (nb::handle block : blocks) {
    const Py_buffer& buffer = views.emplace_back(std::make_unique<View>(block))->buffer;
    hashing.push_back({static_cast<const char*>(buffer.buf), static_cast<size_t>(buffer.len)});
    if (hashing.size() <= copies.size()) hashing.back().copy = reinterpret_cast<char*>(copies[hashing.size() - 1]);
  }
  xxh3_each(hashing, common ? Instructions::common : Instructions::best);
  nb::list values;
  for (const Hashing& done : hashing) values.append(done.value);
  return values;
}

}  // namespace
}  // namespace everystep

NB_MODULE(_native, m) {
  using namespace everystep;
  nb::register_exception_translator(translate);
  nb::set_leak_warnings(false);  // threads may outlive the interpreter, and keep their objects

  m.def("xxh3_64", [](nb::handle data) {
    const View view(data);
    return xxh3(view.buffer.buf, static_cast<size_t>(view.buffer.len));
  });
  m.def("xxh3_64_each", &xxh3_64_each);
  bind_pieces(m);
  bind_jobs(m);
  bind_system(m);
  bind_shelf(m);
}
