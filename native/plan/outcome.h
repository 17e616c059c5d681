// How a call in one process went, told to all processes of its program.
//
// If other processes take the results of a call, a failure must not fail the call
// for XLA: the other processes wait in the reduction that brings them the results,
// and would wait for ever. So the failed call returns zeros, and every such call
// returns one more result, its outcome. The reduction carries the outcome along.
// Behind the reduction, a second custom call on each device of each process reads
// it, and fails if it says so.
//
// Does not depend on Python or XLA (tests/native/outcome_test.cc).
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

namespace hostcall {

/// Size of an outcome: one byte that is 1 if the call failed on any device, then
/// the text of the caller's error, padded with zeros.
constexpr size_t kOutcomeBytes = 1024;

/// Writes the outcome of a call; an empty error is success. A long text is cut.
inline void WriteOutcome(const std::string& error, void* outcome) {
  char* bytes = static_cast<char*>(outcome);
  std::memset(bytes, 0, kOutcomeBytes);
  if (error.empty()) return;
  bytes[0] = 1;
  std::memcpy(bytes + 1, error.data(), std::min(error.size(), kOutcomeBytes - 1));
}

inline bool HasFailed(const void* outcome) {
  return *static_cast<const char*>(outcome) != 0;
}

/// The text of the error, as far as it fitted.
inline std::string TextOfOutcome(const void* outcome) {
  const char* text = static_cast<const char*>(outcome) + 1;
  return {text, strnlen(text, kOutcomeBytes - 1)};
}

/// The full texts of failed calls in this process, so that its own devices fail
/// with more than what fits an outcome. A run ends with its first failure, which
/// each of its devices notes, so the newest few are enough. Safe to use from
/// several threads.
class Failures {
 public:
  /// Keeps the first error of a run.
  void Note(int64_t run, const std::string& error) {
    std::lock_guard<std::mutex> lock(mutex_);
    for (const auto& noted : noted_) {
      if (noted.first == run) return;
    }
    noted_.emplace_back(run, error);
    if (noted_.size() > kKept) noted_.erase(noted_.begin());
  }
  /// The error of a run; empty if none is kept.
  std::string Find(int64_t run) const {
    std::lock_guard<std::mutex> lock(mutex_);
    for (const auto& [of_run, error] : noted_) {
      if (of_run == run) return error;
    }
    return "";
  }

 private:
  static constexpr size_t kKept = 64;
  mutable std::mutex mutex_;  ///< guards noted_; taken only when something failed
  /// Runs and their errors, oldest first. A vector, since it is almost always
  /// empty.
  std::vector<std::pair<int64_t, std::string>> noted_;
};

}  // namespace hostcall
