// Outcomes as bytes, and the failures of this process under several threads.
#undef NDEBUG
#include "plan/outcome.h"

#include <cassert>
#include <cstdint>
#include <cstdio>
#include <string>
#include <thread>
#include <vector>

using hostcall::Failures;
using hostcall::HasFailed;
using hostcall::kOutcomeBytes;
using hostcall::TextOfOutcome;
using hostcall::WriteOutcome;

namespace {

/// Like XLA's memory: of exactly this size, with arbitrary content.
std::vector<char> Memory() { return std::vector<char>(kOutcomeBytes, 'x'); }

void ASuccessIsAllZeros() {
  auto outcome = Memory();
  WriteOutcome("", outcome.data());
  assert(!HasFailed(outcome.data()) && TextOfOutcome(outcome.data()).empty());
  assert(outcome == std::vector<char>(kOutcomeBytes, 0));
}

void ALongTextIsCut() {
  for (size_t size : {size_t{1}, size_t{100}, kOutcomeBytes - 2, kOutcomeBytes - 1,
                      kOutcomeBytes, 5 * kOutcomeBytes}) {
    auto outcome = Memory();
    const std::string text(size, 'e');
    WriteOutcome(text, outcome.data());
    assert(HasFailed(outcome.data()));
    assert(TextOfOutcome(outcome.data()) == text.substr(0, kOutcomeBytes - 1));
  }
}

/// Devices that do not call send only the first byte.
void AFailureElsewhereHasNoText() {
  std::vector<char> outcome(kOutcomeBytes, 0);
  outcome[0] = 1;
  assert(HasFailed(outcome.data()) && TextOfOutcome(outcome.data()).empty());
}

void TheNewestAreKept() {
  Failures failures;
  assert(failures.Find(0).empty());
  for (int64_t run = 0; run < 1000; ++run) {
    failures.Note(run, "run " + std::to_string(run));
  }
  assert(failures.Find(999) == "run 999" && failures.Find(950) == "run 950");
  assert(failures.Find(0).empty());
  for (int device = 0; device < 100; ++device) failures.Note(999, "again");
  assert(failures.Find(999) == "run 999" && failures.Find(950) == "run 950");
}

/// Threads note and find failures of different runs at the same time.
void ThreadsAtOnce() {
  Failures failures;
  std::vector<std::thread> threads;
  for (int64_t t = 0; t < 8; ++t) {
    threads.emplace_back([&failures, t] {
      for (int64_t i = 0; i < 2000; ++i) {
        const int64_t run = 2000 * t + i;
        const std::string text = "run " + std::to_string(run);
        failures.Note(run, text);
        const std::string found = failures.Find(run);
        assert(found == text || found.empty());  // others may have pushed it out
      }
    });
  }
  for (auto& thread : threads) thread.join();
}

}  // namespace

int main() {
  ASuccessIsAllZeros();
  ALongTextIsCut();
  AFailureElsewhereHasNoText();
  TheNewestAreKept();
  ThreadsAtOnce();
  std::puts("outcome: all held");
}
