// Tries the engine's core without Python: on other processors, on other page sizes, and under sanitizers.
// `core hash`, `core files DIRECTORY`, `core exit DIRECTORY`; test_core.py builds and runs it.
#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "hash.hpp"
#include "read.hpp"
#include "write.hpp"

// The library's plainest code, as the reference: no vector instructions.
#define XXH_VECTOR 0
#define XXH_INLINE_ALL
#include <xxhash.h>

namespace everystep {
namespace {

int failures = 0;

void expect(bool good, const std::string& what) {
  if (good) return;
  std::fprintf(stderr, "wrong: %s\n", what.c_str());
  ++failures;
}

std::vector<char> random_bytes(size_t nbytes, uint64_t seed) {
  std::mt19937_64 draw(seed);
  std::vector<char> data(nbytes);
  for (char& byte : data) byte = static_cast<char>(draw());
  return data;
}

// --- hash: every length the algorithm treats differently, with and without copies -------------------------------

void hash() {
  const std::vector<size_t> lengths = {
      0,    1,    3,    8,    16,     17, 128,    129,  240,  241,  1024, 4095,   4096,    4097,    5000,
      8191, 8192, 8193, 8256, 50'000, 5,  60'000, 6000, 6000, 6000, 6000, 70'000, 100'000, 1 << 20, (1 << 20) + 1};
  const std::vector<char> source = random_bytes((2U << 20) + 64, 1);
  for (const size_t shift : {0, 1, 8, 16}) {
    for (const bool copied : {false, true}) {
      std::vector<std::vector<char>> copies;
      std::vector<Hashing> blocks;
      for (const size_t length : lengths) {
        copies.emplace_back(length + 128, '\x5a');
        blocks.push_back({source.data() + shift, length});
      }
      for (size_t i = 0; i < blocks.size(); ++i) {
        if (copied)
          blocks[i].copy = copies[i].data() + (64 + shift - reinterpret_cast<uintptr_t>(copies[i].data())) % 64;
      }
      xxh3_each(blocks);
      for (size_t i = 0; i < blocks.size(); ++i) {
        const Hashing& block = blocks[i];
        const std::string what = std::to_string(block.nbytes) + " bytes, shifted by " + std::to_string(shift);
        const uint64_t reference = XXH3_64bits(block.data, block.nbytes);
        expect(block.value == reference, "checksum of " + what);
        expect(xxh3(block.data, block.nbytes) == reference, "checksum by itself of " + what);
        if (copied) expect(std::memcmp(block.copy, block.data, block.nbytes) == 0, "copy of " + what);
      }
    }
  }
}

// --- files: what is written is what is read, in every kind of piece --------------------------------------------

void files(const std::string& directory) {
  constexpr uint64_t kAlignment = 4096;
  const std::vector<char> data = random_bytes(24U << 20, 2);
  const auto address = reinterpret_cast<uintptr_t>(data.data());
  std::vector<char> elements = random_bytes(600'000, 3);
  const Strided strided(reinterpret_cast<uintptr_t>(elements.data()), 4, {300, 500}, {4, 1200});
  for (const Backend* backend : {&kThreads, &kBuffered}) {
    const std::string name(backend->name);
    const std::string path = directory + "/" + name;
    Plan plan;
    // Large and congruent to its offset; odd; strided; fetched.
    const uint64_t congruent = kAlignment + address % kAlignment;
    plan.pieces.push_back({congruent, 12U << 20, Place::memory, address, 0});
    plan.pieces.push_back({plan.pieces.back().end() + 100, (9U << 20) + 77, Place::memory, address + 3, 0});
    plan.pieces.push_back({plan.pieces.back().end() + 1, 600'000, Place::strided, 0, 0});
    plan.pieces.push_back({plan.pieces.back().end(), 3U << 20, Place::callback, 0, 0});
    plan.strided.push_back(strided);
    plan.callbacks.emplace_back([&](char* window, uint64_t nbytes, uint64_t offset) {
      std::memcpy(window, data.data() + offset, nbytes);
    });
    const uint64_t nbytes = align_up(plan.pieces.back().end(), kAlignment);
    Tuning tuning;
    tuning.backend = backend;
    tuning.window = 1U << 20;
    tuning.depth = 4;
    tuning.chunk = 1U << 20;
    tuning.small = 1U << 20;
    Control control;
    Written written = write_file(path, nbytes, false, plan, tuning, control);
    sys::sync(written.file);
    expect(sys::size(written.file) == nbytes, name + ": size");

    std::vector<char> flat(600'000);
    strided.gather(0, flat.size(), flat.data());
    const std::vector<const char*> sources = {data.data(), data.data() + 3, flat.data(), data.data()};
    std::vector<char> whole(nbytes);
    std::vector<std::vector<char>> found;
    Plan back;
    for (const Piece& piece : plan.pieces) {
      found.emplace_back(piece.nbytes + kAlignment);
      char* to =
          found.back().data() + (piece.offset - reinterpret_cast<uintptr_t>(found.back().data())) % kAlignment;
      back.pieces.push_back({piece.offset, piece.nbytes, Place::memory, reinterpret_cast<uintptr_t>(to), 0});
    }
    Control reading;
    const Read read = read_file(path, back, written.hashes, tuning, reading);
    expect(read.damage.empty(), name + ": checksums");
    for (size_t i = 0; i < sources.size(); ++i) {
      const char* there = reinterpret_cast<const char*>(back.pieces[i].address);
      expect(std::memcmp(there, sources[i], plan.pieces[i].nbytes) == 0, name + ": piece " + std::to_string(i));
    }
    expect(control.done_nbytes == nbytes, name + ": progress");
  }
}

// --- exit: threads are at work when exit handlers run ---------------------------------------------------------

void leave(const std::string& directory) {
  std::atexit([] { ::usleep(100'000); });  // registered first: runs when all else has been freed
  const sys::File file = sys::open(directory + "/f", O_WRONLY | O_CREAT);
  sys::set_faults({{sys::Call::read, 1'000'000'000, sys::Fault::Action::error, EIO, false}});
  for (int i = 0; i < 2; ++i) {
    std::thread([&file] {
      for (const iovec bytes{const_cast<char*>("x"), 1};;) sys::pwritev(file, &bytes, 1, 0);
    }).detach();
  }
  while (sys::calls_seen() < 1000) std::this_thread::yield();
  std::exit(failures);
}

}  // namespace
}  // namespace everystep

int main(int count, char** arguments) {
  const std::string what = count > 1 ? arguments[1] : "";
  const std::string where = count > 2 ? arguments[2] : "";
  try {
    if (what == "hash") {
      everystep::hash();
    } else if (what == "files") {
      everystep::files(where);
    } else if (what == "exit") {
      everystep::leave(where);
    } else {
      std::fprintf(stderr, "core: hash, files DIRECTORY, or exit DIRECTORY\n");
      return 2;
    }
  } catch (const everystep::sys::Error& error) {
    std::fprintf(stderr, "%s: %s\n", error.path.c_str(), std::strerror(error.code));
    return 1;
  }
  return everystep::failures == 0 ? 0 : 1;
}
