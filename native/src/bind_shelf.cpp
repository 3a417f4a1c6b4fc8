#include <nanobind/ndarray.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/unique_ptr.h>

#include <cstring>
#include <functional>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "bind.hpp"
#include "persist.hpp"
#include "shelf.hpp"

namespace everystep {

using namespace nb::literals;

namespace {

std::optional<Medium> to_medium(const std::string& name) {
  if (name.empty()) return std::nullopt;
  if (name == "page cache") return Medium::page_cache;
  if (name == "memory") return Medium::memory;
  if (name == "persistent memory") return Medium::persistent;
  throw std::invalid_argument("unknown medium " + name);
}

const char* name_of(Medium medium) {
  switch (medium) {
    case Medium::memory:
      return "memory";
    case Medium::persistent:
      return "persistent memory";
    default:
      return "page cache";
  }
}

std::string text(const nb::bytes& bytes) { return {bytes.c_str(), bytes.size()}; }
nb::bytes bytes_of(const std::string& data) { return nb::bytes(data.data(), data.size()); }

struct ShelfGone : std::runtime_error {
  using std::runtime_error::runtime_error;
};

// Tells threads apart, even if one reuses the id of another. Python's state of the thread holds the object,
// because it is gone by the time `join` returns. A thread_local of C++ is destroyed later.
std::shared_ptr<char> this_thread() {
  thread_local std::weak_ptr<char> known;
  auto found = known.lock();
  if (!found) {
    found = std::make_shared<char>();
    auto held = std::make_unique<std::shared_ptr<char>>(found);
    const nb::capsule holder(held.release(),
                             [](void* pointer) noexcept { delete static_cast<std::shared_ptr<char>*>(pointer); });
    PyObject* const state = PyThreadState_GetDict();
    if (state == nullptr) throw std::logic_error("this thread has no state of Python's");
    nb::borrow<nb::dict>(state)["everystep.shelf"] = holder;
    known = found;
  }
  return found;
}

struct Block;

// What Python calls a NativeShelf.
struct OpenShelf : Shelf {
  using Shelf::Shelf;
  Block* current = nullptr;  // the transaction under way, which clears this when it goes away
  std::weak_ptr<char> owner;
  bool changing = false;  // `owner` is in a call that lets other threads run
  bool closed = false;

  [[nodiscard]] bool mine() const { return current != nullptr && owner.lock() == this_thread(); }
  // Its own thread has ended, so another one may end it.
  [[nodiscard]] bool ownerless() const { return current != nullptr && owner.expired(); }
  void end() noexcept {
    current = nullptr;
    owner.reset();
    rollback();
  }
  void require_open() const {
    if (closed) throw ShelfGone("closed");
  }
};

// `with shelf.transaction():`. This is native because of signals. Their handlers can run, and raise, between any
// two steps of Python code, also at the first step of an `__exit__`. Here nothing comes between the steps, so
// leaving or dropping the block always ends it.
struct Block {
  nb::object core;   // keeps `shelf` alive
  nb::object outer;  // everystep.Shelf, for what Python does: `_commit`, and `_refuse`, which raises
  OpenShelf& shelf;
  nb::dict shadows;

  Block(nb::object core_, nb::object outer_)
      : core(std::move(core_)), outer(std::move(outer_)), shelf(nb::cast<OpenShelf&>(core)) {}
  ~Block() {
    if (is_current()) shelf.end();
  }
  Block(const Block&) = delete;
  Block& operator=(const Block&) = delete;

  [[nodiscard]] bool is_current() const { return shelf.current == this; }
  void refuse(const char* reason) const {
    outer.attr("_refuse")(reason);
    throw std::logic_error(reason);
  }

  void begin() {
    if (shelf.ownerless()) shelf.end();
    if (shelf.closed) return refuse("closed");
    if (!shelf.is_writable()) return refuse("for reading");
    if (shelf.current != nullptr) return refuse(shelf.mine() ? "in this thread" : "in another thread");
    if (!shelf.failure().empty()) return refuse("failed");
    shadows.clear();
    shelf.owner = this_thread();
    shelf.current = this;
  }

  void leave(bool committing) {
    if (!is_current()) return committing ? refuse(shelf.closed ? "closed inside" : "ended") : void();
    if (!shelf.mine()) {
      if (shelf.changing) return refuse("in another thread");
      shelf.end();
      return committing ? refuse("left elsewhere") : void();
    }
    struct Ending {
      Block& block;
      ~Ending() {
        if (block.is_current()) block.shelf.end();
        block.shadows.clear();
      }
    } ending{*this};
    if (committing) outer.attr("_commit")();
  }
};

// A call that changes the transaction under way.
class Change {
 public:
  explicit Change(OpenShelf& shelf) : shelf_(shelf) {
    shelf.require_open();
    if (!shelf.mine()) throw std::logic_error("this thread has no transaction under way");
    shelf.changing = true;
  }
  ~Change() { shelf_.changing = false; }
  Change(const Change&) = delete;
  Change& operator=(const Change&) = delete;

  // What was assigned or removed replaces the shadow copy.
  void drop_shadow(const nb::bytes& name) {
    nb::dict& shadows = shelf_.current->shadows;
    if (shadows.contains(name)) nb::del(shadows[name]);
  }

 private:
  OpenShelf& shelf_;
};

std::string_view bytes_in(const nb::bytes& bytes) { return {bytes.c_str(), bytes.size()}; }

void put(OpenShelf& shelf, const nb::bytes& name, uint32_t kind, const nb::bytes& meta, const void* data,
         uint64_t nbytes) {
  Change change(shelf);
  shelf.put(text(name), kind, text(meta), data, nbytes);
  change.drop_shadow(name);
}

nb::list names_of(const std::vector<std::string>& names) {
  nb::list found;
  for (const std::string& name : names) found.append(bytes_of(name));
  return found;
}

nb::capsule owner_of(std::unique_ptr<Pin> pin) {
  return nb::capsule(pin.release(), [](void* pointer) noexcept { delete static_cast<Pin*>(pointer); });
}

}  // namespace

void bind_shelf(nb::module_& m) {
  nb::exception<ShelfFull>(m, "NativeShelfFull");
  nb::exception<ShelfForeign>(m, "NativeShelfForeign");
  nb::exception<ShelfNewer>(m, "NativeShelfNewer");
  nb::exception<ShelfDamaged>(m, "NativeShelfDamaged");
  nb::exception<ShelfGone>(m, "NativeShelfClosed");
  m.def("empty_shelf", [](uint64_t id, uint64_t limit) { return bytes_of(Shelf::empty_file(id, limit)); });
  m.def("write_back_instruction", &write_back_instruction);
  // For tests: the routine works on any memory.
  m.def("write_back", [](nb::handle data) {
    const View view(data);
    write_back(view.buffer.buf, static_cast<size_t>(view.buffer.len));
    persist_fence();
  });
  m.def("shelf_medium",
        [](nb::handle path) { return name_of(ShelfFile(fs_path(path), false, std::nullopt).medium()); });

  // What a read of one entry works on: its bytes stay as they are while this lives, or an array on them.
  nb::class_<Pin>(m, "NativePin")
      .def_prop_ro("nbytes", &Pin::nbytes)
      // What is damaged, or nothing. Bytes that this process has verified are not read again, unless told to.
      .def("damage",
           [](Pin& self, bool again) -> std::string {
             if (!again && self.verified()) return {};
             std::string found;
             if (self.nbytes() < Shelf::kLong) {
               found = self.damage();
             } else {
               Released release;
               found = self.damage();
             }
             if (found.empty()) self.set_verified();
             return found;
           })
      .def("view",
           [](nb::handle self) {
             const Pin& pin = nb::cast<const Pin&>(self);
             return nb::ndarray<nb::numpy, const uint8_t, nb::ndim<1>>(
                 reinterpret_cast<const uint8_t*>(pin.data()), {pin.nbytes()}, self);
           })
      // Changes to it stay in it.
      .def("own_view", [](const Pin& self) {
        auto own = self.own();
        auto* data = reinterpret_cast<uint8_t*>(own->data());
        return nb::ndarray<nb::numpy, uint8_t, nb::ndim<1>>(data, {self.nbytes()}, owner_of(std::move(own)));
      });

  nb::class_<OpenShelf>(m, "NativeShelf")
      .def("__init__",
           [](OpenShelf* self, nb::handle path, bool writable, const std::string& medium) {
             const std::string where = fs_path(path);
             const auto forced = to_medium(medium);
             {
               Released release;
               new (self) OpenShelf(where, writable, forced);
             }
             self->let_others_run([](const std::function<void()>& work) {
               Released release;
               work();
             });
           })
      .def_prop_ro("locked_by_another", &Shelf::locked_by_another)
      .def_prop_ro("warning", &Shelf::warning)
      .def_prop_ro("failure", &Shelf::failure)
      .def_prop_ro("medium", [](const OpenShelf& self) { return name_of(self.medium()); })
      .def("usage",
           [](const OpenShelf& self) {
             const ShelfUsage found = self.usage();
             return std::make_tuple(found.entries, found.used, found.file, found.limit, found.waiting,
                                    found.generation);
           })
      .def("set_limit", &Shelf::set_limit)
      // Of the committed state; and as the calling thread sees it, in its transaction.
      .def("committed_names", [](const OpenShelf& self) { return names_of(self.names()); })
      .def("names",
           [](const OpenShelf& self) { return names_of(self.mine() ? self.changed_names() : self.names()); })
      .def("has",
           [](const OpenShelf& self, const nb::bytes& name) {
             const auto changed = self.mine() ? self.changed(bytes_in(name)) : std::nullopt;
             return changed ? *changed != nullptr : self.has(bytes_in(name));
           })
      // Of the committed state: kind, description, generation, and the pinned data if there are any.
      .def("read",
           [](OpenShelf& self, const nb::bytes& name) -> nb::object {
             self.require_open();
             auto found = self.read(bytes_in(name));
             if (!found) return nb::none();
             return nb::make_tuple(found->kind, bytes_of(found->meta), found->born,
                                   nb::cast(std::move(found->pin)));
           })
      // The transaction that the calling thread has under way.
      .def("mine", [](const OpenShelf& self) { return self.mine() ? nb::find(*self.current) : nb::none(); })
      // None if the transaction has not changed the entry, an empty tuple if it has removed it, else a copy.
      .def("changed",
           [](OpenShelf& self, const nb::bytes& name) -> nb::object {
             const auto found = self.changed(bytes_in(name));
             if (!found) return nb::none();
             if (*found == nullptr) return nb::make_tuple();
             const ShelfEntry entry = **found;
             const size_t nbytes = entry.data.nbytes;
             auto copy = std::make_unique<uint8_t[]>(nbytes);
             if (nbytes != 0) std::memcpy(copy.get(), self.changed_data(entry), nbytes);
             uint8_t* const data = copy.get();
             const nb::capsule owner(copy.release(),
                                     [](void* pointer) noexcept { delete[] static_cast<uint8_t*>(pointer); });
             return nb::make_tuple(entry.kind, bytes_of(entry.meta),
                                   nb::ndarray<nb::numpy, uint8_t, nb::ndim<1>>(data, {nbytes}, owner));
           })
      .def("refresh",
           [](OpenShelf& self) {
             self.require_open();
             return self.refresh();
           })
      .def("put",
           [](OpenShelf& self, const nb::bytes& name, uint32_t kind, const nb::bytes& meta, uintptr_t address,
              uint64_t nbytes) { put(self, name, kind, meta, reinterpret_cast<const void*>(address), nbytes); })
      .def("put_buffer",
           [](OpenShelf& self, const nb::bytes& name, uint32_t kind, const nb::bytes& meta, nb::handle data) {
             const View view(data);
             put(self, name, kind, meta, view.buffer.buf, static_cast<uint64_t>(view.buffer.len));
           })
      .def("remove",
           [](OpenShelf& self, const nb::bytes& name) {
             Change change(self);
             self.remove(text(name));
             change.drop_shadow(name);
           })
      // Commits and ends the transaction; false if shadow copies have to be stored before.
      .def("commit",
           [](OpenShelf& self) {
             Change change(self);
             if (self.current->shadows.size() != 0) return false;
             self.commit();
             self.end();
             return true;
           })
      // False if another thread has a transaction under way.
      .def("close",
           [](OpenShelf& self) {
             if (self.current != nullptr && !self.mine() && !self.ownerless()) return false;
             if (self.current != nullptr) self.end();
             self.close();
             self.closed = true;
             return true;
           })
      .def("abandon", [](OpenShelf& self) {
        self.current = nullptr;
        self.closed = true;
        self.abandon();
      });

  nb::class_<Block>(m, "NativeTransaction")
      .def(nb::init<nb::object, nb::object>())
      .def_ro("shadows", &Block::shadows)
      .def("__enter__",
           [](nb::handle self) {
             nb::cast<Block&>(self).begin();
             return self;
           })
      .def(
          "__exit__", [](Block& self, nb::handle kind, nb::handle, nb::handle) { self.leave(kind.is_none()); },
          "kind"_a.none(), "error"_a.none(), "trace"_a.none());
}

}  // namespace everystep
