#include "bind_pieces.hpp"

#include <nanobind/stl/pair.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/vector.h>

#include <stdexcept>
#include <string_view>

#include "control.hpp"

namespace everystep {
namespace {

// Takes the interpreter for as long as this lives, on a thread that Python does not know.
class Borrowed {
 public:
  explicit Borrowed(std::atomic<bool>& flag) : flag_(flag) {
    flag_ = true;
    try {
      state_ = PyGILState_Ensure();
    } catch (...) {
      park_forever();
    }
  }
  ~Borrowed() {
    flag_ = false;
    PyGILState_Release(state_);
  }
  Borrowed(const Borrowed&) = delete;
  Borrowed& operator=(const Borrowed&) = delete;

 private:
  std::atomic<bool>& flag_;
  PyGILState_STATE state_;
};

// Device memory: the engine's thread borrows the interpreter for one window.
Callback python_callback(nb::object function, bool writable, std::shared_ptr<std::atomic<bool>> flag) {
  // Copies and the last release happen under the GIL: plans are built and destroyed by Python calls.
  return [function, writable, flag](char* window, uint64_t nbytes, uint64_t offset) {
    if (shutting_down()) throw Cancelled{};
    const Borrowed interpreter(*flag);
    nb::object view = nb::steal(
        PyMemoryView_FromMemory(window, static_cast<Py_ssize_t>(nbytes), writable ? PyBUF_WRITE : PyBUF_READ));
    if (!view.is_valid()) throw nb::python_error();
    nb::object result;
    try {
      result = nb::steal(PyObject_CallFunction(function.ptr(), "OK", view.ptr(), offset));
    } catch (...) {
      park_forever();
    }
    if (!result.is_valid()) {
      nb::python_error error;
      // The traceback keeps the view, but the window behind it goes with the job.
      if (!nb::steal(PyObject_CallMethod(view.ptr(), "release", nullptr)).is_valid()) PyErr_Clear();
      throw error;
    }
    view.attr("release")();
  };
}

void append_hex(std::string& out, uint64_t value) {
  constexpr char kDigits[] = "0123456789abcdef";
  for (int shift = 60; shift >= 0; shift -= 4) out.push_back(kDigits[(value >> shift) & 15]);
}

uint64_t parse_hex(const char* text) {
  uint64_t value = 0;
  for (int i = 0; i < 16; ++i) {
    const char c = text[i];
    const int digit = c >= '0' && c <= '9' ? c - '0' : c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
    if (digit < 0) throw std::invalid_argument("checksum is not hexadecimal");
    value = value << 4 | static_cast<uint64_t>(digit);
  }
  return value;
}

int traverse(PyObject* self, visitproc visit, void* arg) {
  Py_VISIT(Py_TYPE(self));
  if (!nb::inst_ready(self)) return 0;
  for (const nb::object& function : nb::inst_ptr<Pieces>(self)->functions()) Py_VISIT(function.ptr());
  return 0;
}

int clear(PyObject* self) {
  const auto dropped = std::move(nb::inst_ptr<Pieces>(self)->functions());
  return 0;
}

// A frame in a traceback may hold the pieces, and what their functions belong to may hold that.
PyType_Slot slots[] = {{Py_tp_traverse, reinterpret_cast<void*>(traverse)},
                       {Py_tp_clear, reinterpret_cast<void*>(clear)},
                       {0, nullptr}};

}  // namespace

void Pieces::add(Piece piece) {
  if ((!pieces_.empty() && piece.offset < pieces_.back().end()) || piece.nbytes > UINT64_MAX - piece.offset) {
    throw std::invalid_argument("pieces overlap or are out of order");
  }
  pieces_.push_back(piece);
}

void Pieces::add_strided(Piece piece, Strided strided) {
  piece.index = strided_.size();
  add(piece);
  strided_.push_back(std::move(strided));
}

void Pieces::add_callback(Piece piece, nb::object function) {
  piece.index = functions_.size();
  add(piece);
  functions_.push_back(std::move(function));
}

uint64_t Pieces::nbytes() const {
  uint64_t sum = 0;
  for (const Piece& piece : pieces_) sum += piece.nbytes;
  return sum;
}

std::pair<Pieces, std::vector<size_t>> Pieces::padded(uint64_t start, uint64_t stop) const {
  Pieces all;
  std::vector<size_t> numbers;
  size_t gaps = 0;
  const auto fill_up = [&](uint64_t to) {
    if (to <= start) return;
    all.pieces_.push_back({start, to - start, Place::zero});
    numbers.push_back(pieces_.size() + gaps++);
  };
  for (size_t i = 0; i < pieces_.size(); ++i) {
    fill_up(pieces_[i].offset);
    all.pieces_.push_back(pieces_[i]);
    numbers.push_back(i);
    start = pieces_[i].end();
  }
  fill_up(stop);
  all.strided_ = strided_;
  all.functions_ = functions_;
  all.checksums_ = checksums_;
  return {std::move(all), std::move(numbers)};
}

Plan Pieces::plan(bool writing) const {
  Plan plan{pieces_, strided_, {}, nullptr};
  if (!functions_.empty()) plan.in_callback = std::make_shared<std::atomic<bool>>(false);
  for (const nb::object& function : functions_) {
    plan.callbacks.push_back(python_callback(function, writing, plan.in_callback));
  }
  return plan;
}

std::vector<uint64_t> Pieces::expected(uint64_t chunk) const {
  std::vector<uint64_t> out;
  size_t number = 0;
  for (const Piece& piece : pieces_) {
    if (piece.place == Place::zero) continue;
    if (number == checksums_.size()) throw std::invalid_argument("checksums and pieces differ in number");
    const auto text = nb::cast<std::string_view>(checksums_[number++]);
    if (text.size() != 16 * checksum_count(piece, chunk)) {
      throw std::invalid_argument("a piece has the wrong number of checksums");
    }
    for (size_t at = 0; at < text.size(); at += 16) out.push_back(parse_hex(text.data() + at));
  }
  if (number != checksums_.size()) throw std::invalid_argument("checksums and pieces differ in number");
  return out;
}

nb::list checksum_texts(const Plan& plan, size_t first, const uint64_t* hashes, uint64_t chunk) {
  nb::list out;
  std::string text;
  for (size_t i = first; i < plan.pieces.size(); ++i) {
    text.clear();
    for (uint64_t count = chunk_count(plan.pieces[i].nbytes, chunk); count > 0; --count)
      append_hex(text, *hashes++);
    out.append(nb::str(text.data(), text.size()));
  }
  return out;
}

void bind_pieces(nb::module_& m) {
  using Numbers = std::vector<uint64_t>;
  const auto add = [](Place place) {
    return [place](Pieces& self, uint64_t offset, uint64_t nbytes) { self.add({offset, nbytes, place}); };
  };
  nb::class_<Pieces>(m, "Pieces", nb::type_slots(slots))
      .def(nb::init<>())
      .def("memory", [](Pieces& self, uint64_t offset, uint64_t nbytes,
                        uintptr_t address) { self.add({offset, nbytes, Place::memory, address}); })
      .def("strided",
           [](Pieces& self, uint64_t offset, uint64_t nbytes, uintptr_t address, int64_t itemsize,
              std::vector<int64_t> shape, std::vector<int64_t> strides) {
             self.add_strided({offset, nbytes, Place::strided},
                              {address, itemsize, std::move(shape), std::move(strides)});
           })
      .def("callback",
           [](Pieces& self, uint64_t offset, uint64_t nbytes, nb::object move) {
             self.add_callback({offset, nbytes, Place::callback}, std::move(move));
           })
      .def("discard", add(Place::discard))
      .def("zero", add(Place::zero))
      .def("expect", &Pieces::expect)
      // Many that each go to contiguous memory: an object for each would take longer than reading a small array.
      .def_static("to_memory",
                  [](const Numbers& offsets, const Numbers& nbytes, const Numbers& addresses, nb::list checksums) {
                    if (nbytes.size() != offsets.size() || addresses.size() != offsets.size()) {
                      throw std::invalid_argument("columns differ in length");
                    }
                    Pieces pieces;
                    for (size_t i = 0; i < offsets.size(); ++i) {
                      pieces.add({offsets[i], nbytes[i], Place::memory, addresses[i]});
                    }
                    pieces.expect(std::move(checksums));
                    return pieces;
                  })
      .def("padded", &Pieces::padded)
      .def("__len__", &Pieces::size)
      .def_prop_ro("nbytes", &Pieces::nbytes);
}

}  // namespace everystep
