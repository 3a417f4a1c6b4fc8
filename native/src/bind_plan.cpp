#include "bind_plan.hpp"

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

}  // namespace

Plan make_plan(const Numbers& offsets, const Numbers& nbytes, const std::vector<uint8_t>& places,
               const Numbers& addresses, const std::vector<StridedTuple>& strided, nb::list callbacks,
               bool writing) {
  const size_t count = offsets.size();
  if (nbytes.size() != count || places.size() != count || addresses.size() != count) {
    throw std::invalid_argument("piece columns differ in length");
  }
  Plan plan;
  plan.pieces.reserve(count);
  for (const auto& [address, itemsize, shape, strides] : strided) {
    plan.strided.emplace_back(address, itemsize, shape, strides);
  }
  if (callbacks.size() > 0) plan.in_callback = std::make_shared<std::atomic<bool>>(false);
  for (nb::handle function : callbacks) {
    plan.callbacks.push_back(python_callback(nb::borrow(function), writing, plan.in_callback));
  }
  size_t next_strided = 0, next_callback = 0;
  uint64_t end = 0;
  for (size_t i = 0; i < count; ++i) {
    if (places[i] > static_cast<uint8_t>(Place::zero)) throw std::invalid_argument("unknown place");
    Piece piece{offsets[i], nbytes[i], static_cast<Place>(places[i]), addresses[i], 0};
    if (piece.offset < end || piece.nbytes > UINT64_MAX - piece.offset) {
      throw std::invalid_argument("pieces overlap or are out of order");
    }
    if (piece.place == Place::strided) piece.index = next_strided++;
    if (piece.place == Place::callback) piece.index = next_callback++;
    end = piece.end();
    plan.pieces.push_back(piece);
  }
  if (next_strided != plan.strided.size() || next_callback != plan.callbacks.size()) {
    throw std::invalid_argument("places and descriptions do not match");
  }
  return plan;
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

}  // namespace everystep
