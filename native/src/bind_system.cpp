#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "bind.hpp"
#include "bind_directory.hpp"
#include "forks.hpp"
#include "memory.hpp"
#include "probe.hpp"
#include "queue.hpp"
#include "sys.hpp"

namespace everystep {

using namespace nb::literals;

namespace {

nb::object fs_text(const std::string& path) {
  return nb::steal(PyUnicode_DecodeFSDefaultAndSize(path.data(), static_cast<Py_ssize_t>(path.size())));
}

sys::Fault make_fault(const std::string& call, uint64_t nth, const std::string& action, int code, bool lasting) {
  sys::Fault fault;
  fault.nth = nth;
  fault.code = code;
  fault.lasting = lasting;
  if (call != "any") {
    fault.call = sys::parse_call(call);
    if (!fault.call) throw std::invalid_argument("unknown call " + call);
  }
  if (action == "error") {
    fault.action = sys::Fault::Action::error;
  } else if (action == "short") {
    fault.action = sys::Fault::Action::short_count;
  } else if (action == "kill") {
    fault.action = sys::Fault::Action::kill;
  } else if (action == "slow") {
    fault.action = sys::Fault::Action::slow;
  } else {
    throw std::invalid_argument("unknown action " + action);
  }
  return fault;
}

}  // namespace

void bind_system(nb::module_& m) {
  // Files and directories, through the seam.
  const auto on_path = [](auto function) {
    return [function](nb::handle path) {
      const sys::Path where = to_path(path);
      Released release;
      return function(where);
    };
  };
  const auto on_paths = [](auto function) {
    return [function](nb::handle a, nb::handle b) {
      const sys::Path from = to_path(a), to = to_path(b);
      Released release;
      function(from, to);
    };
  };
  m.def("mkdir", on_path([](const sys::Path& path) { sys::mkdir(path); }));
  m.def("rmdir", on_path(sys::rmdir));
  m.def("unlink", on_path(sys::unlink));
  m.def("exists", on_path(sys::exists));
  m.def("is_link", on_path(sys::is_link));
  m.def("rename", on_paths(sys::rename));
  m.def("rename_new", on_paths(sys::rename_new));
  m.def("exchange", on_paths(sys::exchange));
  m.def("link", on_paths(sys::link));
  m.def("sync_dir", [](nb::handle where) {
    const auto directory = to_directory(where);
    Released release;
    sys::sync_dir(*directory);
  });
  m.def("identity", [](nb::handle where) {
    sys::Identity found{};
    if (nb::isinstance<OpenDirectory>(where)) {
      found = sys::identity(*nb::cast<OpenDirectory&>(where).directory());
    } else {
      const sys::Path path = to_path(where);
      Released release;
      found = sys::identity(path);
    }
    return std::make_tuple(found.device, found.inode, found.made_ns);
  });

  nb::class_<sys::Path>(m, "Entry")
      .def_prop_ro("name", [](const sys::Path& self) { return fs_text(self.name); })
      .def_prop_ro("path", [](const sys::Path& self) { return fs_text(self.shown); });
  nb::class_<OpenDirectory>(m, "OpenDirectory")
      .def_prop_ro("path", [](const OpenDirectory& self) { return fs_text(self.path()); })
      .def("renamed", [](OpenDirectory& self, nb::handle path) { self.set_path(fs_path(path)); })
      .def("fileno", [](const OpenDirectory& self) { return self.directory()->fd(); })
      .def("at",
           [](const OpenDirectory& self, nb::handle name) { return sys::Path(self.directory(), fs_path(name)); })
      .def("is_current",
           [](const OpenDirectory& self) {
             const auto directory = self.directory();
             Released release;
             return sys::is_current(*directory);
           })
      .def("release", &OpenDirectory::release);
  const auto opened = [](nb::handle path, bool exclusive, auto take) {
    const sys::Path where = to_path(path);
    std::shared_ptr<sys::Directory> directory;
    {
      Released release;
      directory = take(where);
    }
    return directory ? new OpenDirectory(std::move(directory), exclusive) : nullptr;
  };
  m.def(
      "open_directory",
      [opened](nb::handle path, bool follow) {
        return opened(path, false, [&](const sys::Path& where) { return sys::open_directory(where, follow); });
      },
      "path"_a, "follow"_a = true, nb::rv_policy::take_ownership);
  // By default readers (shared) follow a link. Writers do not: a link could lead them elsewhere.
  m.def(
      "lock_directory",
      [opened](nb::handle path, bool exclusive, std::optional<bool> follow) {
        return opened(path, exclusive, [&](const sys::Path& where) {
          return sys::lock_directory(where, exclusive, follow.value_or(!exclusive));
        });
      },
      "path"_a, "exclusive"_a, "follow"_a = nb::none(), nb::rv_policy::take_ownership);
  m.def(
      "make_directory", [opened](nb::handle path) { return opened(path, true, sys::make_directory); },
      nb::rv_policy::take_ownership);
  m.def("close_exclusive_directories", &OpenDirectory::close_exclusive);

  m.def("probe", [](nb::handle path) {
    const std::string where = fs_path(path);
    Released release;
    const Probe probe = probe_directory(where);
    return std::make_tuple(probe.direct, probe.memory_alignment, probe.offset_alignment, probe.reason);
  });
  m.def("huge_pages_given", &PageSizes::can_be_huge);
  m.def("page_sizes", [] { return std::make_pair(page_nbytes(), huge_page_nbytes()); });
  m.def("forks", &forks);
  m.def("uring_available", [] {
    std::string reason;
    const bool available = uring_available(reason);
    return std::make_pair(available, reason);
  });

  // For tests.
  m.def("set_faults", [](const std::vector<std::tuple<std::string, uint64_t, std::string, int, bool>>& faults) {
    std::vector<sys::Fault> out;
    for (const auto& [call, nth, action, code, lasting] : faults) {
      out.push_back(make_fault(call, nth, action, code, lasting));
    }
    sys::set_faults(std::move(out));
  });
  m.def("call_names", [] {
    std::vector<std::string_view> names;
    for (size_t i = 0; i < sys::kCallCount; ++i) names.push_back(sys::name(static_cast<sys::Call>(i)));
    return nb::tuple(nb::cast(names));
  });
  m.def("calls_seen", sys::calls_seen);
  m.def("start_trace", sys::start_trace);
  m.def("stop_trace", [] {
    nb::list out;
    for (const sys::Event& event : sys::stop_trace()) {
      out.append(nb::make_tuple(std::string(sys::name(event.call)), event.path, event.path2, event.offset,
                                event.nbytes, nb::bytes(event.data.data(), event.data.size()), event.creates));
    }
    return out;
  });
}

}  // namespace everystep
