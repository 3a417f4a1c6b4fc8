#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "bind.hpp"
#include "memory.hpp"
#include "probe.hpp"
#include "queue.hpp"
#include "sys.hpp"

namespace holdfast {
namespace {

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
      const std::string where = fs_path(path);
      nb::gil_scoped_release release;
      function(where);
    };
  };
  const auto on_paths = [](auto function) {
    return [function](nb::handle a, nb::handle b) {
      const std::string from = fs_path(a), to = fs_path(b);
      nb::gil_scoped_release release;
      function(from, to);
    };
  };
  m.def("mkdir", on_path([](const std::string& path) { sys::mkdir(path); }));
  m.def("rmdir", on_path(sys::rmdir));
  m.def("unlink", on_path(sys::unlink));
  m.def("sync_dir", on_path([](const std::string& path) { sys::sync_dir(path); }));
  m.def("rename", on_paths(sys::rename));
  m.def("rename_new", on_paths(sys::rename_new));
  m.def("exchange", on_paths(sys::exchange));

  m.def("identity", [](nb::handle path) {
    const sys::Identity found = sys::identity(fs_path(path));
    return std::make_tuple(found.device, found.inode, found.made_ns);
  });

  m.def("exists", [](nb::handle path) { return sys::exists(fs_path(path)); });
  m.def("hold_directory", [](nb::handle path, bool exclusive) {
    const std::string where = fs_path(path);
    nb::gil_scoped_release release;
    return sys::hold_directory(where, exclusive);
  });

  m.def("make_directory", [](nb::handle path) {
    const std::string where = fs_path(path);
    nb::gil_scoped_release release;
    return sys::make_directory(where);
  });
  m.def("release_directory", sys::release_directory);

  m.def("probe", [](nb::handle path) {
    const std::string where = fs_path(path);
    const Probe probe = probe_directory(where);
    return std::make_tuple(probe.direct, probe.memory_alignment, probe.offset_alignment, probe.reason);
  });
  m.def("huge_pages_given", &PageSizes::can_be_huge);
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

}  // namespace holdfast
