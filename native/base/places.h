// What the numbers of places stand for: a function's name and the user's line.
//
// Does not depend on Python (tests/native/flight_test.cc).
//
// Events hold the number of a place. Plans die while their events are still known,
// but a place's text lives for ever: there are as many as lines of the program that
// write calls, and Python gives the same number for the same line again
// (_engine/info.py). Reading needs no lock, so a signal handler may read.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>

namespace hostcall {

/// The texts of a place. Never changed or freed once it is set.
struct Place {
  std::string name;  ///< the tag, or the function's name
  std::string line;  ///< "file:line in function"
};

/// The places of the process.
class Places {
 public:
  /// A place with a higher number has no text here, only in Python.
  static constexpr uint32_t kMost = 1 << 13;

  /// Sets the texts of a number, once. Release: a reader, which acquires, sees the
  /// whole text. The look before it is relaxed, as it reads no text.
  static void Name(uint32_t number, std::string name, std::string line) {
    if (number >= kMost) return;
    if (g_places[number].load(std::memory_order_relaxed) != nullptr) return;
    g_places[number].store(new Place{name, line}, std::memory_order_release);
  }
  /// The texts of a number, or null.
  static const Place* Find(uint32_t number) {
    return number < kMost ? g_places[number].load(std::memory_order_acquire)
                          : nullptr;
  }

 private:
  inline static std::atomic<const Place*> g_places[kMost] = {};
};

}  // namespace hostcall
