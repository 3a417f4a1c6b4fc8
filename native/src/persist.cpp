#include "persist.hpp"

#include <atomic>
#include <cstdint>

#if defined(__x86_64__)
#include <cpuid.h>
#include <immintrin.h>
#elif defined(__aarch64__)
#include <sys/auxv.h>
#endif

namespace everystep {
namespace {

constexpr uintptr_t kLine = 64;  // the smallest line of the processors below: a larger one is written back twice

#if defined(__x86_64__)

// clwb keeps the line in the cache. clflushopt drops it, clflush does so one after the other.
__attribute__((target("clwb"))) void with_clwb(char* line) { _mm_clwb(line); }
__attribute__((target("clflushopt"))) void with_clflushopt(char* line) { _mm_clflushopt(line); }
void with_clflush(char* line) { _mm_clflush(line); }

struct Way {
  void (*one)(char*);
  const char* name;
};

Way choose() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (__get_cpuid_count(7, 0, &a, &b, &c, &d) != 0) {
    if ((b & (1u << 24)) != 0) return {with_clwb, "clwb"};
    if ((b & (1u << 23)) != 0) return {with_clflushopt, "clflushopt"};
  }
  return {with_clflush, "clflush"};
}

#elif defined(__aarch64__)

// To the point of persistence (ARMv8.2) where there is one, else to the point of coherence.
void to_persistence(char* line) { asm volatile("sys #3, c7, c12, #1, %0" ::"r"(line) : "memory"); }  // dc cvap
void to_coherence(char* line) { asm volatile("dc cvac, %0" ::"r"(line) : "memory"); }

struct Way {
  void (*one)(char*);
  const char* name;
};

Way choose() {
  constexpr unsigned long kDcPop = 1ul << 16;  // HWCAP_DCPOP
  if ((getauxval(AT_HWCAP) & kDcPop) != 0) return {to_persistence, "dc cvap"};
  return {to_coherence, "dc cvac"};
}

#else

struct Way {
  void (*one)(char*);
  const char* name;
};

Way choose() { return {nullptr, "none"}; }

#endif

const Way& way() {
  static const Way chosen = choose();
  return chosen;
}

}  // namespace

void write_back(const void* data, size_t nbytes) {
  void (*const one)(char*) = way().one;
  if (one == nullptr || nbytes == 0) return;
  const auto begin = reinterpret_cast<uintptr_t>(data) & ~(kLine - 1);
  const auto end = reinterpret_cast<uintptr_t>(data) + nbytes;
  for (uintptr_t line = begin; line < end; line += kLine) one(reinterpret_cast<char*>(line));
}

void persist_fence() {
#if defined(__x86_64__)
  _mm_sfence();
#elif defined(__aarch64__)
  asm volatile("dsb sy" ::: "memory");
#else
  std::atomic_thread_fence(std::memory_order_seq_cst);
#endif
}

const char* write_back_instruction() { return way().name; }

}  // namespace everystep
