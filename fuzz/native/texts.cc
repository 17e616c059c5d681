// Any events and texts. Each line of a trace must be JSON, the flight recorder's
// lines must be bounded, and outcomes must be read back as they were written.
#include <array>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <string>

#include "base/flight_text.h"
#include "plan/outcome.h"

namespace {
void Check(bool holds) {
  if (!holds) std::abort();
}

/// These read one JSON value from `text` on, and return the place behind it.
const char* String(const char* text) {
  Check(*text++ == '"');
  for (; *text != '"'; ++text) {
    Check(static_cast<unsigned char>(*text) >= 0x20);
    if (*text != '\\') continue;
    ++text;
    Check(*text == 'u' || *text == '\\' || *text == '"');
    for (int digit = 0; *text == 'u' && digit < 4; ++digit) {
      Check(std::isxdigit(static_cast<unsigned char>(text[1 + digit])) != 0);
    }
    if (*text == 'u') text += 4;
  }
  return text + 1;
}
const char* Value(const char* text) {
  if (*text == '"') return String(text);
  if (*text != '{') {
    char* end = nullptr;
    (void)std::strtod(text, &end);
    return Check(end != text), end;
  }
  do {
    text = String(text + 1);
    Check(*text == ':');
    text = Value(text + 1);
  } while (*text == ',');
  return Check(*text == '}'), text + 1;
}

/// A number of the input, within what clocks and counts give.
int64_t Number(const uint8_t** data, size_t* size) {
  uint64_t all = 0;
  const size_t count = std::min<size_t>(*size, 6);
  std::memcpy(&all, *data, count);
  *data += count;
  *size -= count;
  return static_cast<int64_t>(all) - (int64_t{1} << 20);
}
}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace hostcall;
  const uint8_t* at = data;
  size_t left = size;
  Event event = {};
  event.kind = static_cast<EventKind>(Number(&at, &left) & 0xff);
  event.state = static_cast<EventState>(Number(&at, &left) & 0xff);
  event.device = static_cast<int16_t>(Number(&at, &left));
  event.place = static_cast<uint32_t>(Number(&at, &left));
  for (int64_t* field : {&event.start, &event.entered, &event.end, &event.bytes,
                         &event.run, &event.number}) {
    *field = Number(&at, &left);
  }
  const std::string name(reinterpret_cast<const char*>(at), left);
  Places::Name(event.place % 64, "name", "line");
  Line line;
  line.Text(name.c_str(), left % 700).Number(event.bytes, left % 60);
  line.Seconds(event.start, left % 30)
      .Pad(left)
      .EndInto([](const char* bytes, size_t count) {
        Check(count <= 501 && std::memchr(bytes, '\n', count) == bytes + count - 1);
      });
  std::array<char, kOutcomeBytes> outcome;
  WriteOutcome(name, outcome.data());
  Check(HasFailed(outcome.data()) == !name.empty());
  Check(name.compare(0, TextOfOutcome(outcome.data()).size(),
                     TextOfOutcome(outcome.data())) == 0);
  outcome.fill(name.empty() ? 1 : name[0]);
  Check(TextOfOutcome(outcome.data()).size() < kOutcomeBytes);
  return 0;
}
