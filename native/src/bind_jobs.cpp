#include <fcntl.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include "bind_directory.hpp"
#include "bind_pieces.hpp"
#include "copy.hpp"
#include "job.hpp"
#include "memory.hpp"
#include "read.hpp"
#include "small_file.hpp"
#include "sync.hpp"
#include "write.hpp"

namespace everystep {

using namespace nb::literals;

namespace {

Tuning make_tuning(const std::string& backend, uint64_t window, unsigned depth, uint64_t chunk, uint64_t small) {
  Tuning tuning;
  tuning.backend = find_backend(backend);
  if (tuning.backend == nullptr) throw std::invalid_argument("unknown backend " + backend);
  if (window == 0 || window > kMaxWindow || window % tuning.alignment != 0) {
    throw std::invalid_argument("bad engine tuning: a window has a multiple of " +
                                std::to_string(tuning.alignment) + " bytes, at most 1 GiB, not " +
                                std::to_string(window));
  }
  if (depth == 0 || depth > kMaxDepth) {
    throw std::invalid_argument("bad engine tuning: from 1 to " + std::to_string(kMaxDepth) +
                                " windows can be under way, not " + std::to_string(depth));
  }
  if (chunk == 0 || chunk > kMaxChunk) {
    throw std::invalid_argument("bad engine tuning: a checksum covers 1 byte to 1 GiB, not " +
                                std::to_string(chunk));
  }
  tuning.window = window;
  tuning.depth = depth;
  tuning.chunk = chunk;
  tuning.small = small;
  return tuning;
}

// Waits without the GIL, in slices, so that Ctrl-C is heard. After each slice it calls `progress`, if there is
// one, with the bytes done so far.
template <typename Result>
bool wait(Job<Result>& job, std::optional<double> timeout, uint64_t nbytes = UINT64_MAX,
          nb::handle progress = {}) {
  using Clock = std::chrono::steady_clock;
  const auto start = Clock::now();
  for (;;) {
    double slice = 0.1;
    if (timeout) slice = std::min(slice, *timeout - std::chrono::duration<double>(Clock::now() - start).count());
    bool done = false;
    {
      Released release;
      done = job.wait_for_nbytes(nbytes, std::chrono::duration<double>(std::max(slice, 0.0)));
    }
    if (done) return true;
    if (PyErr_CheckSignals() != 0) throw nb::python_error();
    if (progress.is_valid() && !progress.is_none()) progress(job.progress());
    if (timeout && slice <= 0) return false;
  }
}

template <typename Result>
class PyJob {
 public:
  PyJob(Plan plan, std::function<Result(const Plan&, Control&)> work, bool background) : plan_(std::move(plan)) {
    Released release;
    job_ =
        std::make_unique<Job<Result>>([this, work](Control& control) { return work(plan_, control); }, background);
  }
  ~PyJob() { stop(); }
  PyJob(const PyJob&) = delete;
  PyJob& operator=(const PyJob&) = delete;
  Job<Result>& job() { return *job_; }
  Result& result() {
    if (!job_->done()) throw std::logic_error("the job is still running");
    plan_.callbacks.clear();  // they are not called again, and may hold this job
    try {
      return job_->result();
    } catch (const nb::python_error&) {
      // A callback's exception is raised once. Kept here, its traceback would keep this job alive forever.
      job_->replace_error(
          std::make_exception_ptr(std::runtime_error("the job failed; its error was raised already")));
      throw;
    }
  }

 protected:
  // Ends the thread. A class that owns memory the plan refers to calls it before that memory goes.
  void stop() {
    // The thread may be waiting for the GIL in a callback.
    Released release;
    if (job_ && job_->ours() && plan_.in_callback && shutting_down()) {
      // It never returns from there. Leave the thread.
      job_->cancel();
      while (!job_->wait_for(std::chrono::milliseconds(10))) {
        if (*plan_.in_callback) return static_cast<void>(job_.release());
      }
    }
    job_.reset();
  }

  Plan plan_;
  std::unique_ptr<Job<Result>> job_;
};

class WriteJob : public PyJob<Written> {
 public:
  // `header` is the plan's first piece when it is not empty; its bytes are kept here.
  WriteJob(Plan plan, nb::bytes header, std::function<Written(const Plan&, Control&)> work, bool background)
      : PyJob(std::move(plan), std::move(work), background), header_(std::move(header)) {}
  ~WriteJob() { stop(); }
  // One string per piece after the header: its chunks' checksums, 16 digits each.
  nb::list checksums(uint64_t chunk) {
    const Written& written = result();
    const auto header = static_cast<uint64_t>(header_.size());
    return checksum_texts(plan_, header > 0 ? 1 : 0, written.hashes.data() + chunk_count(header, chunk), chunk);
  }
  sys::File take() { return std::move(result().file); }
  [[nodiscard]] bool fresh() { return result().file.fresh(); }
  // Without a sync: the file is not wanted any more. A job that failed has closed it already.
  void close() {
    if (!job_->failed()) take();
  }

 private:
  nb::bytes header_;
};

class ReadJob : public PyJob<Read> {
 public:
  using PyJob::PyJob;
};

std::tuple<uint64_t, uint64_t, uint64_t> stats_tuple(const Stats& stats) {
  return {stats.direct_nbytes, stats.staged_nbytes, stats.transfers};
}

// A small file written whole; the caller syncs it together with others.
class PendingFile {
 public:
  PendingFile(sys::File file, nb::handle data, nb::handle more) : file_(std::move(file)) {
    const View first(data), second(more);
    std::vector<iovec> parts;
    for (const View* view : {&first, &second}) {
      if (view->buffer.len > 0) parts.push_back({view->buffer.buf, static_cast<size_t>(view->buffer.len)});
    }
    Released release;
    write_small_file(file_, parts);
  }
  sys::File take() { return std::move(file_); }
  [[nodiscard]] bool fresh() const { return file_.fresh(); }
  // Without a sync, if it has not been taken: the file is not wanted any more.
  void close() { file_.close(); }

 private:
  sys::File file_;
};

}  // namespace

void bind_jobs(nb::module_& m) {
  nb::class_<WriteJob>(m, "WriteJob")
      .def(
          "wait",
          [](WriteJob& self, std::optional<double> timeout, nb::handle progress) {
            return wait(self.job(), timeout, UINT64_MAX, progress);
          },
          "timeout"_a = nb::none(), "progress"_a = nb::none())
      .def(
          "wait_for_nbytes",
          [](WriteJob& self, uint64_t nbytes, std::optional<double> timeout) {
            return wait(self.job(), timeout, nbytes);
          },
          "nbytes"_a, "timeout"_a = nb::none())
      .def("done", [](WriteJob& self) { return self.job().done(); })
      .def("progress", [](WriteJob& self) { return self.job().progress(); })
      .def("cancel", [](WriteJob& self) { self.job().cancel(); })
      .def("close", &WriteJob::close)
      .def("check", [](WriteJob& self) { self.result(); })
      .def("truncate", [](WriteJob& self, uint64_t nbytes) { sys::truncate(self.result().file, nbytes); })
      .def("fresh", &WriteJob::fresh)
      .def("stats", [](WriteJob& self) { return stats_tuple(self.result().stats); })
      .def("checksums", &WriteJob::checksums);

  nb::class_<ReadJob>(m, "ReadJob")
      .def(
          "wait",
          [](ReadJob& self, std::optional<double> timeout, nb::handle progress) {
            return wait(self.job(), timeout, UINT64_MAX, progress);
          },
          "timeout"_a = nb::none(), "progress"_a = nb::none())
      .def("done", [](ReadJob& self) { return self.job().done(); })
      .def("cancel", [](ReadJob& self) { self.job().cancel(); })
      .def("stats", [](ReadJob& self) { return stats_tuple(self.result().stats); })
      .def("damage", [](ReadJob& self) {
        std::vector<std::pair<size_t, uint64_t>> out;
        for (const Damage& damage : self.result().damage) out.emplace_back(damage.piece, damage.chunk);
        return out;
      });

  m.def(
      "write",
      [](nb::handle path, uint64_t nbytes, bool recycle, nb::bytes header, const Pieces& pieces,
         const std::string& backend, uint64_t window, unsigned depth, uint64_t chunk, uint64_t small,
         bool background) {
        Plan plan = pieces.plan(true);
        if (header.size() > 0) {
          if (!plan.pieces.empty() && plan.pieces.front().offset < header.size()) {
            throw std::invalid_argument("pieces reach into the header");
          }
          Piece piece;
          piece.nbytes = header.size();
          piece.address = reinterpret_cast<uintptr_t>(header.c_str());
          plan.pieces.insert(plan.pieces.begin(), piece);
        }
        if (!plan.pieces.empty() && plan.pieces.back().end() > nbytes) {
          throw std::invalid_argument("pieces reach past the end of the file");
        }
        const Tuning tuning = make_tuning(backend, window, depth, chunk, small);
        if (nbytes > small && nbytes % tuning.effective_alignment() != 0) {
          throw std::invalid_argument("direct I/O wants a file size that is a multiple of the alignment");
        }
        auto work = [path = to_path(path), nbytes, recycle, tuning](const Plan& p, Control& control) {
          return write_file(path, nbytes, recycle, p, tuning, control);
        };
        return new WriteJob(std::move(plan), std::move(header), std::move(work), background);  // Python owns it
      },
      "path"_a, "nbytes"_a, "recycle"_a, "header"_a, "pieces"_a, "backend"_a, "window"_a, "depth"_a, "chunk"_a,
      "small"_a, "background"_a);

  m.def(
      "read",
      [](nb::handle path, const Pieces& pieces, bool verify, const std::string& backend, uint64_t window,
         unsigned depth, uint64_t chunk, uint64_t small, bool background) {
        Plan plan = pieces.plan(false);
        const Tuning tuning = make_tuning(backend, window, depth, chunk, small);
        auto work = [path = fs_path(path), hashes = verify ? pieces.expected(chunk) : std::vector<uint64_t>(),
                     tuning](const Plan& p, Control& control) {
          return read_file(path, p, hashes, tuning, control);
        };
        return new ReadJob(std::move(plan), std::move(work), background);
      },
      "path"_a, "pieces"_a, "verify"_a, "backend"_a, "window"_a, "depth"_a, "chunk"_a, "small"_a, "background"_a);

  // Copies pieces to `destination` + their offsets, which the caller has made room for.
  m.def(
      "copy",
      [](uintptr_t destination, const Pieces& pieces) {
        const Plan plan = pieces.plan(true);
        Released release;
        copy_pieces(plan, reinterpret_cast<char*>(destination));
      },
      "destination"_a, "pieces"_a);
  // `nbytes` of data made of the pieces, each at its offset with zeros between, and the checksums of each.
  m.def(
      "pack",
      [](uint64_t nbytes, uint64_t chunk, const Pieces& pieces) {
        const Plan plan = pieces.plan(true);
        if (chunk == 0 || (!plan.pieces.empty() && plan.pieces.back().end() > nbytes)) {
          throw std::invalid_argument("pieces reach past the end of the data");
        }
        nb::object packed = nb::steal(PyBytes_FromStringAndSize(nullptr, static_cast<Py_ssize_t>(nbytes)));
        if (!packed.is_valid()) throw nb::python_error();
        char* bytes = PyBytes_AsString(packed.ptr());
        std::vector<uint64_t> hashes;
        {
          Released release;  // no other code has these bytes yet
          hashes = pack_pieces(plan, bytes, nbytes, chunk);
        }
        return nb::make_tuple(packed, checksum_texts(plan, 0, hashes.data(), chunk));
      },
      "nbytes"_a, "chunk"_a, "pieces"_a);
  m.def(
      "fingerprints",
      [](const Pieces& pieces) {
        const Plan plan = pieces.plan(true);
        std::vector<uint64_t> out(plan.pieces.size());
        Released release;
        for (size_t i = 0; i < out.size(); ++i) out[i] = fingerprint(plan, plan.pieces[i]);
        return out;
      },
      "pieces"_a);

  m.def(
      "count_writes",
      [](uint64_t nbytes, const std::string& backend, uint64_t window, unsigned depth, uint64_t small) {
        return count_writes(nbytes, make_tuning(backend, window, depth, 1, small));
      },
      "nbytes"_a, "backend"_a, "window"_a, "depth"_a, "small"_a);

  nb::class_<PendingFile>(m, "PendingFile")
      .def(
          "__init__",
          [](PendingFile* self, nb::handle path, nb::handle data, bool recycle, nb::handle more) {
            const sys::Path where = to_path(path);
            sys::File file;
            {
              Released release;
              file = recycle ? sys::open_over(where) : sys::open(where, O_WRONLY | O_CREAT | O_EXCL);
            }
            new (self) PendingFile(std::move(file), data, more);
          },
          "path"_a, "data"_a, "recycle"_a, "more"_a = nb::bytes("", 0))
      .def("fresh", &PendingFile::fresh)
      .def("close", &PendingFile::close)
      // Native, so that no interrupt comes between the end of a `with` block and the close.
      .def("__enter__", [](nb::handle self) { return nb::borrow(self); })
      .def("__exit__", [](PendingFile& self, nb::args) { self.close(); });
  // A new file that Python writes step by step.
  nb::class_<sys::File>(m, "NewFile")
      .def(
          "__init__",
          [](sys::File* self, nb::handle path) {
            const sys::Path where = to_path(path);
            Released release;
            new (self) sys::File(sys::open(where, O_WRONLY | O_CREAT | O_EXCL));
          },
          "path"_a)
      .def("write",
           [](sys::File& self, uint64_t offset, nb::handle data) {
             const View view(data);
             const iovec part{view.buffer.buf, static_cast<size_t>(view.buffer.len)};
             Released release;
             if (part.iov_len > 0) sys::write_all(self, {&part, 1}, offset);
           })
      .def("sync",
           [](sys::File& self) {
             Released release;
             sys::sync(self);
           })
      .def("close", &sys::File::close);
  // Makes durable what others have written into a file.
  m.def("sync_file", [](nb::handle path) {
    const sys::Path where = to_path(path);
    Released release;
    sys::sync(sys::open_regular(where));
  });
  // Closes the files also when a sync fails: a second sync would not report the loss.
  m.def(
      "sync",
      [](nb::list written, std::optional<nb::object> directory) {
        const auto where = directory ? to_directory(*directory) : nullptr;
        std::vector<sys::File> files;
        for (nb::handle item : written) {
          files.push_back(nb::isinstance<WriteJob>(item) ? nb::cast<WriteJob&>(item).take()
                                                         : nb::cast<PendingFile&>(item).take());
          if (!files.back().is_open()) throw std::logic_error("this file has been synced already");
        }
        Released release;
        sync_together(std::move(files), where.get());
      },
      "written"_a, "directory"_a = nb::none());

  // Where an array begins, and whether its bytes follow each other in C order. Its element type may be any.
  m.def("array_memory", [](nb::handle array) {
    const View view(array, PyBUF_STRIDES);
    return std::make_pair(reinterpret_cast<uintptr_t>(view.buffer.buf),
                          PyBuffer_IsContiguous(&view.buffer, 'C') != 0);
  });
  // Bytes at an address congruent to `residue` modulo 4096, as a numpy array that owns them.
  m.def(
      "fresh_memory",
      [](size_t nbytes, size_t residue) {
        auto memory = std::make_unique<FreshMemory>(nbytes + residue % 4096);
        auto* data = reinterpret_cast<uint8_t*>(memory->data() + residue % 4096);
        nb::capsule owner(memory.release(),
                          [](void* pointer) noexcept { delete static_cast<FreshMemory*>(pointer); });
        return nb::ndarray<nb::numpy, uint8_t, nb::ndim<1>>(data, {nbytes}, owner);
      },
      "nbytes"_a, "residue"_a);
}

}  // namespace everystep
