#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <functional>
#include <memory>

#include "bind.hpp"
#include "persist.hpp"
#include "shelf.hpp"

namespace holdfast {

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

using Found = std::tuple<uint32_t, nb::bytes, uint64_t, uint64_t, uint64_t>;

Found facts(const ShelfEntry& entry) {
  return {entry.kind, bytes_of(entry.meta), entry.data.nbytes, entry.data.offset, entry.data.born};
}

const ShelfEntry& must_find(const Shelf& shelf, const std::string& name) {
  const ShelfEntry* entry = shelf.find(name);
  if (entry == nullptr) throw nb::key_error(name.c_str());
  return *entry;
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

  nb::class_<Shelf>(m, "NativeShelf")
      .def("__init__",
           [](Shelf* self, nb::handle path, bool writable, const std::string& medium) {
             const std::string where = fs_path(path);
             const auto forced = to_medium(medium);
             {
               Released release;
               new (self) Shelf(where, writable, forced);
             }
             self->let_others_run([](const std::function<void()>& work) {
               Released release;
               work();
             });
           })
      .def_prop_ro("locked_by_another", &Shelf::locked_by_another)
      .def_prop_ro("warning", &Shelf::warning)
      .def_prop_ro("failure", &Shelf::failure)
      .def_prop_ro("medium", [](const Shelf& self) { return name_of(self.medium()); })
      .def("usage",
           [](const Shelf& self) {
             const ShelfUsage found = self.usage();
             return std::make_tuple(found.entries, found.used, found.file, found.limit, found.waiting,
                                    found.generation);
           })
      .def("set_limit", &Shelf::set_limit)
      .def("names",
           [](const Shelf& self) {
             nb::list found;
             for (const std::string& name : self.names()) found.append(bytes_of(name));
             return found;
           })
      .def("find",
           [](const Shelf& self, const nb::bytes& name) -> std::optional<Found> {
             const ShelfEntry* entry = self.find({name.c_str(), name.size()});
             return entry == nullptr ? std::nullopt : std::optional(facts(*entry));
           })
      .def("has", [](const Shelf& self,
                     const nb::bytes& name) { return self.find({name.c_str(), name.size()}) != nullptr; })
      // (whether the transaction changed it, what it is then)
      .def("changed",
           [](const Shelf& self, const nb::bytes& name) -> std::pair<bool, std::optional<Found>> {
             const auto found = self.changed({name.c_str(), name.size()});
             if (!found) return {false, std::nullopt};
             return {true, *found == nullptr ? std::nullopt : std::optional(facts(**found))};
           })
      // The bytes of an entry, on the mapping. They do not change while the array, or a view of it, lives.
      .def("view",
           [](Shelf& self, const nb::bytes& name) {
             auto pin = self.pin(must_find(self, text(name)), false);
             const auto* data = reinterpret_cast<const uint8_t*>(pin->data());
             const auto nbytes = static_cast<size_t>(pin->nbytes());
             return nb::ndarray<nb::numpy, const uint8_t, nb::ndim<1>>(data, {nbytes}, owner_of(std::move(pin)));
           })
      .def("own_view",
           [](Shelf& self, const nb::bytes& name) {
             auto pin = self.pin(must_find(self, text(name)), true);
             auto* data = reinterpret_cast<uint8_t*>(pin->data());
             const auto nbytes = static_cast<size_t>(pin->nbytes());
             return nb::ndarray<nb::numpy, uint8_t, nb::ndim<1>>(data, {nbytes}, owner_of(std::move(pin)));
           })
      // A copy of what the transaction under way has stored.
      .def("copy_changed",
           [](Shelf& self, const nb::bytes& name, uintptr_t to) {
             self.copy_changed({name.c_str(), name.size()}, reinterpret_cast<void*>(to));
           })
      .def("damage", [](Shelf& self, const nb::bytes& name) { return self.damage(must_find(self, text(name))); })
      .def("refresh", &Shelf::refresh)
      .def("put",
           [](Shelf& self, const nb::bytes& name, uint32_t kind, const nb::bytes& meta, uintptr_t address,
              uint64_t nbytes) {
             std::string named = text(name), described = text(meta);
             const auto* data = reinterpret_cast<const void*>(address);
             self.put(named, kind, std::move(described), data, nbytes);
           })
      .def("put_buffer",
           [](Shelf& self, const nb::bytes& name, uint32_t kind, const nb::bytes& meta, nb::handle data) {
             const View view(data);
             self.put(text(name), kind, text(meta), view.buffer.buf, static_cast<uint64_t>(view.buffer.len));
           })
      .def("remove", [](Shelf& self, const nb::bytes& name) { self.remove(text(name)); })
      .def("commit", &Shelf::commit)
      .def("rollback", &Shelf::rollback)
      .def("close", &Shelf::close)
      .def("abandon", &Shelf::abandon);
}

}  // namespace holdfast
