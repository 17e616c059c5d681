// What the numbers of places stand for: a function's name and the user's line.
//
// Does not depend on Python (tests/native/flight_test.cc).
//
// Events hold the number of a place. Plans die while their events are still known,
// but a place's text lives for ever: there are as many as lines of the program that
// write calls, and Python gives the same number for the same line again
// (_engine/places.py). Reading needs no lock, so a signal handler may read.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <string>

namespace hostcall {

/// The texts of a place. Never changed or freed once it is set.
struct Place {
  std::string name;       ///< the tag, or the function's name
  std::string line;       ///< "file:line in function"
  std::string json_name;  ///< as a JSON string, with its quotes
  std::string json_line;
};

/// A string as JSON writes it, with quotes.
inline std::string Quoted(const std::string& text) {
  static constexpr char kHex[] = "0123456789abcdef";
  std::string quoted = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') {
      quoted += '\\';
      quoted += c;
    } else if (static_cast<unsigned char>(c) < 0x20) {
      quoted += "\\u00";
      quoted += kHex[c >> 4 & 0xf];
      quoted += kHex[c & 0xf];
    } else {
      quoted += c;  // UTF-8 may stand as it is
    }
  }
  return quoted + "\"";
}

/// The places of the process.
class Places {
 public:
  /// A place with a higher number has no text here, only in Python.
  static constexpr uint32_t kMost = 1 << 13;

  /// Sets the texts of a number, once. Release: a reader sees the whole text.
  static void Name(uint32_t number, const std::string& name,
                   const std::string& line) {
    if (number >= kMost || g_places[number].load() != nullptr) return;
    g_places[number].store(new Place{name, line, Quoted(name), Quoted(line)},
                           std::memory_order_release);
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
