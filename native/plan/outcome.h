// How a call in one process went, told to all processes of its program.
//
// Where other processes take the results of a call, a failure is no error of the
// call: the others wait in the reduction that brings them the results, and would
// wait for ever. So the call gives zeros, and one more result, its outcome; the
// reduction takes that along, and behind it each device of each process fails by
// it.
//
// Knows no Python and no XLA.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

namespace hostcall {

/// One byte for whether it failed on any device, then the text of the caller's,
/// with zeros behind it.
constexpr size_t kOutcomeBytes = 1024;

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

/// As much of the caller's text as went along.
inline std::string TextOfOutcome(const void* outcome) {
  const char* text = static_cast<const char*>(outcome) + 1;
  return {text, strnlen(text, kOutcomeBytes - 1)};
}

/// What calls of this process failed with, for its own devices to fail with. A run
/// ends with its first failure, which each of its devices notes, so the newest few
/// are enough.
class Failures {
 public:
  void Note(int64_t run, const std::string& error) {
    std::lock_guard<std::mutex> lock(mutex_);
    for (const auto& noted : noted_) {
      if (noted.first == run) return;
    }
    noted_.emplace_back(run, error);
    if (noted_.size() > kKept) noted_.erase(noted_.begin());
  }
  /// Empty where there is none.
  std::string Find(int64_t run) const {
    std::lock_guard<std::mutex> lock(mutex_);
    for (const auto& [of_run, error] : noted_) {
      if (of_run == run) return error;
    }
    return "";
  }

 private:
  static constexpr size_t kKept = 64;
  mutable std::mutex mutex_;
  std::vector<std::pair<int64_t, std::string>> noted_;  // mostly none: no memory
};

}  // namespace hostcall
