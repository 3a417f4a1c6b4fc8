#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>
#include <unistd.h>

#include <algorithm>

#include "bind.hpp"
#include "forks.hpp"
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

// A directory that is held until `release`, or until nothing refers to it any more: where an interrupt strikes
// right after the call that took it, nobody has its descriptor yet. Made and destroyed with the GIL held, as is
// what a fork does about it.
class HeldDirectory {
 public:
  HeldDirectory(int fd, bool exclusive) : fd_(fd) {
    if (exclusive) alone().push_back(this);
  }
  ~HeldDirectory() { release(); }
  HeldDirectory(const HeldDirectory&) = delete;
  HeldDirectory& operator=(const HeldDirectory&) = delete;

  [[nodiscard]] int fd() const { return fd_; }

  void release() {
    if (fd_ < 0) return;
    alone().erase(std::remove(alone().begin(), alone().end(), this), alone().end());
    if (forks() == owner_) {
      sys::release_directory(fd_);
    } else {
      ::close(fd_);  // a forked child shares the lock with its parent, who goes on
    }
    fd_ = -1;
  }

  // In a forked child: were the parent killed while it writes, the child would hold its directories.
  static void leave_to_the_parent() {
    for (HeldDirectory* held : alone()) {
      ::close(held->fd_);
      held->fd_ = -1;
    }
    alone().clear();
  }

 private:
  static std::vector<HeldDirectory*>& alone() {
    static std::vector<HeldDirectory*> found;
    return found;
  }

  int fd_;
  const uint64_t owner_ = forks();
};

}  // namespace

void bind_system(nb::module_& m) {
  // Files and directories, through the seam.
  const auto on_path = [](auto function) {
    return [function](nb::handle path) {
      const std::string where = fs_path(path);
      Released release;
      function(where);
    };
  };
  const auto on_paths = [](auto function) {
    return [function](nb::handle a, nb::handle b) {
      const std::string from = fs_path(a), to = fs_path(b);
      Released release;
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
    const std::string where = fs_path(path);
    Released release;
    const sys::Identity found = sys::identity(where);
    return std::make_tuple(found.device, found.inode, found.made_ns);
  });

  m.def("exists", [](nb::handle path) {
    const std::string where = fs_path(path);
    Released release;
    return sys::exists(where);
  });

  nb::class_<HeldDirectory>(m, "HeldDirectory")
      .def("fileno", &HeldDirectory::fd)
      .def("release", &HeldDirectory::release);
  const auto held = [](nb::handle path, bool exclusive, auto take) {
    const std::string where = fs_path(path);
    std::optional<int> fd;
    {
      Released release;
      fd = take(where);
    }
    return fd ? new HeldDirectory(*fd, exclusive) : nullptr;
  };
  m.def(
      "hold_directory",
      [held](nb::handle path, bool exclusive) {
        return held(path, exclusive,
                    [&](const std::string& where) { return sys::hold_directory(where, exclusive); });
      },
      nb::rv_policy::take_ownership);
  m.def(
      "make_directory", [held](nb::handle path) { return held(path, true, sys::make_directory); },
      nb::rv_policy::take_ownership);
  m.def("leave_directories_to_the_parent", &HeldDirectory::leave_to_the_parent);

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
