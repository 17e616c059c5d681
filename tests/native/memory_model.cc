// The model (memory_model.h says what it is). Not compiled for the sanitizer: only
// what it looks at is.
//
// A way is a list of choices. It is run from its beginning; at its end the last
// choice that has another value left takes it. Each thread is a fiber, which may
// stop before each of its operations. Two ways that came to the same operations
// with the same values in the same order go on alike, so the second one is not
// followed.

#include "memory_model.h"

#undef atomic
#undef mutex
#undef condition_variable

#include <malloc.h>
#include <ucontext.h>

#include <map>
#include <set>
#include <string_view>
#include <tuple>

namespace model {
namespace {

constexpr int kThreads = 4;  ///< with number 0, which prepares and looks afterwards
constexpr size_t kStack = 1 << 17;
constexpr int kAcquire = 1, kRelease = 2, kTotal = 4;  ///< a bit for each promise

using Clock = std::array<int, kThreads>;
void Join(Clock& to, const Clock& from) {
  for (int i = 0; i < kThreads; ++i) to[i] = std::max(to[i], from[i]);
}

/// An operation that was made.
struct Event {
  int thread;
  int number;  ///< of its thread's, from 1
  const void* at;
  int order;
  bool writes;
  int from;  ///< the event whose value it read; -1: it only writes
  uint64_t value;
  Clock before{};    ///< what happens before it without what it reads itself
  Clock released{};  ///< what a read of its value with acquire learns
};
/// The writes of a place, by their order.
using Place = std::vector<int>;

/// Accesses to one byte of plain memory.
struct Shadow {
  int writer = 0, written = 0;
  Clock read{};
};

struct Fiber {
  ucontext_t context;
  std::vector<char> stack = std::vector<char>(kStack);
  std::function<bool()> ready;  ///< whether its next operation can be made; or null
  bool done = false;
};

struct Choice {
  size_t taken, of;
};
/// One promise of an order: file, line, bit.
using Promise = std::tuple<std::string_view, int, int>;

struct Model {
  // Of all ways.
  std::vector<Choice> trail;
  std::set<uint64_t> seen;  ///< a number for what was done so far
  std::string wrong;
  int64_t ways = 0;
  std::set<Promise> promises;  ///< all that were met
  bool of_one_order = false;   ///< Program::IsOfOneOrder
  Promise broken{"", 0, 0};    ///< the one that does not hold
  int most = 0;                ///< operations of one thread
  // Of this way.
  bool runs = false;
  Program* program = nullptr;
  size_t next = 0;      ///< the next choice
  bool pruned = false;  ///< goes on only to its end: all choices are the first
  std::vector<Event> events;
  std::map<const void*, Place> places;
  std::unordered_map<uintptr_t, Shadow> shadows;
  std::array<Clock, kThreads> clocks{};
  int threads = 0, current = 0;
  std::array<Fiber, kThreads> fibers;
  ucontext_t main;
};
Model& g = *new Model;
/// The model's own code runs, or none yet: its accesses are not looked at.
bool g_inside = true;
/// For the life of each function of the model.
struct Inside {
  Inside() : was(std::exchange(g_inside, true)) {}
  ~Inside() { g_inside = was; }
  const bool was;
};

void Fail(const char* what) {
  if (g.pruned) return;
  g.wrong = what;
  g.pruned = true;
}

/// One of `n`.
size_t Choose(size_t n) {
  if (g.pruned || n == 1) return 0;
  if (g.next == g.trail.size()) g.trail.push_back({0, n});
  return g.trail[g.next++].taken;
}

// --- Threads

/// The next thread; 0 if none can go on.
int Pick() {
  std::vector<int> can;
  const auto look = [&can](int thread) {
    const Fiber& fiber = g.fibers[thread];
    if (!fiber.done && (!fiber.ready || fiber.ready())) can.push_back(thread);
  };
  if (g.current != 0) look(g.current);  // first: it costs no switch
  for (int t = 1; t <= g.threads; ++t) {
    if (t != g.current) look(t);
  }
  // What goes on after it was pruned, and does not end, is left.
  if (can.empty() || g.events.size() > 20000) return 0;
  return can[Choose(can.size())];
}
void SwitchTo(int thread) {
  if (thread == g.current) return;
  ucontext_t& from = g.fibers[g.current].context;
  g.current = thread;
  g_inside = false;
  swapcontext(&from, thread == 0 ? &g.main : &g.fibers[thread].context);
}
/// Before each operation of a thread: another may go first.
void Point(std::function<bool()> ready = {}) {
  if (g.current == 0) return;
  Fiber& mine = g.fibers[g.current];
  mine.ready = std::move(ready);
  SwitchTo(Pick());
  g_inside = true;
  mine.ready = {};
}
void Body() {
  g_inside = false;
  g.program->Thread(g.current - 1);
  g_inside = true;
  g.fibers[g.current].done = true;
  const int next = Pick();
  g.current = next;
  g_inside = false;
  setcontext(next == 0 ? &g.main : &g.fibers[next].context);
}

// --- Memory

bool Happened(const Event& event, const Clock& clock) {
  return clock[event.thread] >= event.number;
}
Place& PlaceOf(const void* at, uint64_t first) {
  Place& place = g.places[at];
  if (place.empty()) {
    // What it holds before it is written comes before everything.
    place.push_back(static_cast<int>(g.events.size()));
    g.events.push_back({0, 0, at, 0, true, -1, first});
  }
  return place;
}
size_t PositionOf(const Place& place, int event) {
  return static_cast<size_t>(std::find(place.begin(), place.end(), event) -
                             place.begin());
}
/// The last write of the place of which this thread knows: it reads no older one,
/// and its writes come later.
size_t Floor(const void* at, const Place& place) {
  const Clock& clock = g.clocks[g.current];
  size_t floor = 0;
  for (size_t i = 0; i < g.events.size(); ++i) {
    const Event& event = g.events[i];
    if (event.at != at || !Happened(event, clock)) continue;
    const int write = event.writes ? static_cast<int>(i) : event.from;
    floor = std::max(floor, PositionOf(place, write));
  }
  return floor;
}
/// Whether a write may come right behind this one: not between a value and what was
/// made of it at once.
bool IsFree(const Place& place, size_t position) {
  return position + 1 == place.size() ||
         g.events[place[position + 1]].from != place[position];
}

/// Whether one sequentially consistent operation must come before another in their
/// one order: it is earlier in its thread; or happens before it, by more than a
/// pair of operations that are not both such; or comes before it at their place.
bool Precedes(const Event& a, const Event& b) {
  if (a.thread == b.thread) return a.number < b.number;
  if (a.thread == 0 || b.thread == 0) return a.thread == 0;
  if (b.before[a.thread] > a.number) return true;
  if (a.at != b.at) return false;
  const Place& place = g.places[a.at];
  const auto key = [&place](const Event& event) {
    const int self = static_cast<int>(&event - g.events.data());
    return event.writes ? 2 * PositionOf(place, self)
                        : 2 * PositionOf(place, event.from) + 1;
  };
  return key(a) < key(b);
}
/// Whether the newest event closes a circle of what Precedes.
bool ClosesCircle() {
  std::vector<int> total;
  for (size_t i = 0; i < g.events.size(); ++i) {
    if ((g.events[i].order & kTotal) != 0) total.push_back(static_cast<int>(i));
  }
  const int last = total.back();
  std::set<int> reached;
  std::vector<int> open{last};
  while (!open.empty()) {
    const int at = open.back();
    open.pop_back();
    for (const int to : total) {
      if (to == at || !Precedes(g.events[at], g.events[to])) continue;
      if (to == last) return true;
      if (reached.insert(to).second) open.push_back(to);
    }
  }
  return false;
}

/// A number for what was done so far, which tells all that follows.
uint64_t Digest() {
  uint64_t digest = 14695981039346656037ull;
  const auto add = [&digest](int n) {
    digest = (digest ^ static_cast<uint64_t>(n + 2)) * 1099511628211ull;
  };
  const auto add_event = [&add](int i) {
    add(i < 0 ? -1 : g.events[i].thread);
    add(i < 0 ? -1 : g.events[i].number);
  };
  for (int t = 1; t <= g.threads; ++t) {
    add(-2);
    for (size_t i = 0; i < g.events.size(); ++i) {
      const Event& event = g.events[i];
      if (event.thread != t) continue;
      add_event(event.from);
      if (!event.writes) continue;
      const Place& place = g.places[event.at];
      add_event(place[PositionOf(place, static_cast<int>(i)) - 1]);
    }
  }
  return digest;
}

void Made(Event event, size_t position) {
  Clock& clock = g.clocks[event.thread];
  event.number = ++clock[event.thread];
  event.before = clock;
  event.before[event.thread] = event.number - 1;
  if (event.from >= 0) {
    const Event& from = g.events[event.from];
    if ((event.order & kAcquire) != 0) Join(clock, from.released);
    if (event.writes) event.released = from.released;
  }
  if ((event.order & kRelease) != 0) Join(event.released, clock);
  const auto self = static_cast<int>(g.events.size());
  g.events.push_back(event);
  if (event.writes) {
    Place& place = g.places[event.at];
    place.insert(place.begin() + static_cast<std::ptrdiff_t>(position), self);
  }
  if (g.pruned || g.current == 0) return;
  if ((event.order & kTotal) != 0 && ClosesCircle()) {
    g.pruned = true;  // C++ does not allow it
  } else if (event.number >= g.most) {
    g.pruned = true;
  } else if (g.next == g.trail.size() && !g.seen.insert(Digest()).second) {
    g.pruned = true;
  }
}

int PromisesOf(std::memory_order order) {
  switch (order) {
    case std::memory_order_relaxed:
      return 0;
    case std::memory_order_release:
      return kRelease;
    case std::memory_order_acq_rel:
      return kAcquire | kRelease;
    case std::memory_order_seq_cst:
      return kAcquire | kRelease | kTotal;
    default:
      return kAcquire;
  }
}
/// The promises of an order that count for an operation and hold in this way.
int OrderAt(std::memory_order order, int counts, Site site) {
  const std::string_view path = site.file;
  const std::string_view file = path.substr(path.rfind('/') + 1);
  const int promised = PromisesOf(order) & counts;
  int bits = promised;
  for (const int bit : {kTotal, kAcquire, kRelease}) {
    const Promise promise{file, site.line, bit};
    if ((promised & bit) == 0) continue;
    g.promises.insert(promise);
    if (promise == g.broken) bits &= ~(bit | kTotal);
  }
  return bits;
}

/// The last value of a place of the model's own.
uint64_t Last(const void* at) { return g.events[PlaceOf(at, 0).back()].value; }
/// An operation on it, which reads the last value: all see these in one order.
void Step(const void* at, int order, uint64_t value) {
  const Place& place = PlaceOf(at, 0);
  Made({g.current, 0, at, order, true, place.back(), value}, place.size());
}

}  // namespace

uint64_t Update(const void* at, uint64_t first, std::memory_order writing,
                std::memory_order reading, const Change& change, Site site) {
  const Inside inside;
  if (!g.runs) return first;
  Point();
  const Place& place = PlaceOf(at, first);
  struct Way {
    size_t position;
    bool writes;
    uint64_t value;
  };
  std::vector<Way> can;
  const size_t floor = Floor(at, place);
  for (size_t i = place.size(); i-- > floor;) {
    Way way{i, false, 0};
    way.writes = change(g.events[place[i]].value, &way.value);
    if (!way.writes || IsFree(place, i)) can.push_back(way);
  }
  const Way way = can[Choose(can.size())];
  const int from = place[way.position];
  const uint64_t old = g.events[from].value;
  const int order = way.writes
                        ? OrderAt(writing, kAcquire | kRelease | kTotal, site)
                        : OrderAt(reading, kAcquire | kTotal, site);
  Made({g.current, 0, at, order, way.writes, from, way.value}, way.position + 1);
  return old;
}

void Store(const void* at, uint64_t first, uint64_t value, std::memory_order order,
           Site site) {
  const Inside inside;
  if (!g.runs) return;
  Point();
  const Place& place = PlaceOf(at, first);
  std::vector<size_t> can;
  const size_t floor = Floor(at, place);
  for (size_t i = place.size(); i-- > floor;) {
    if (IsFree(place, i)) can.push_back(i + 1);
  }
  const size_t position = can[Choose(can.size())];
  const int bits = OrderAt(order, kRelease | kTotal, site);
  Made({g.current, 0, at, bits, true, -1, value}, position);
}

void Forget(const void* at) {
  if (g_inside) return;  // an object that was made before main
  const Inside inside;
  g.places.erase(at);
}

void Mutex::lock() {
  const Inside inside;
  if (!g.runs) return;
  Point([this] { return Last(this) == 0; });
  Step(this, kAcquire, 1);
}
void Mutex::unlock() {
  const Inside inside;
  if (!g.runs) return;
  Point();
  Step(this, kRelease, 0);
}

void Condition::notify_all() {
  const Inside inside;
  if (!g.runs) return;
  Point();
  Step(this, 0, Last(this) + 1);
}
bool Condition::Wait(std::unique_lock<Mutex>& lock, bool limited) {
  const Inside inside;
  // Nothing comes between this and the unlock that another thread could see.
  const uint64_t before = Last(this);
  Step(this, 0, before);
  lock.unlock();
  limited = limited && g.program->LimitsEnd();
  Point([=] { return limited || Last(this) != before; });
  const uint64_t now = Last(this);
  Step(this, 0, now);
  lock.lock();
  return now != before;
}

void ModelSemaphore::Post() {
  const Inside inside;
  if (!g.runs) return;
  Point();
  Step(this, kAcquire | kRelease, Last(this) + 1);
}
bool ModelSemaphore::Wait(double) {
  const Inside inside;
  Point([this] { return Last(this) != 0; });
  Step(this, kAcquire | kRelease, Last(this) - 1);
  return true;
}

void Check(bool ok, const char* what) {
  const Inside inside;
  if (!ok) Fail(what);
}

// --- All ways

namespace {

void RunOnce(Program* (*make)(), int threads) {
  g.next = 0;
  g.pruned = false;
  g.events.clear();
  g.places.clear();
  g.shadows.clear();
  g.clocks = {};
  g.current = g.threads = 0;
  g.runs = true;
  g_inside = false;
  const std::unique_ptr<Program> program(make());
  g_inside = true;
  g.program = program.get();
  g.of_one_order = program->IsOfOneOrder();
  g.threads = threads;
  for (int t = 1; t <= threads; ++t) {
    Fiber& fiber = g.fibers[t];
    fiber.done = false;
    fiber.ready = {};
    g.clocks[t] = g.clocks[0];
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack.data();
    fiber.context.uc_stack.ss_size = fiber.stack.size();
    makecontext(&fiber.context, Body, 0);
  }
  g.current = Pick();
  g_inside = false;
  swapcontext(&g.main, &g.fibers[g.current].context);
  g_inside = true;
  g.current = 0;
  bool all = true;
  for (int t = 1; t <= threads; ++t) {
    all = all && g.fibers[t].done;
    Join(g.clocks[0], g.clocks[t]);
  }
  if (!all) Fail("a thread waits for ever");
  if (g.pruned) g.runs = false;
  g_inside = false;
  if (!g.pruned) program->After();
  g.runs = false;
}

/// What goes wrong in some way if this promise is broken; "" if nothing does.
std::string TryAll(Program* (*make)(), int threads, Promise broken) {
  g.trail.clear();
  g.seen.clear();
  g.wrong.clear();
  g.ways = 0;
  g.broken = broken;
  for (;;) {
    RunOnce(make, threads);
    const Inside inside;
    ++g.ways;
    if (!g.wrong.empty()) return g.wrong;
    while (!g.trail.empty() && g.trail.back().taken + 1 == g.trail.back().of) {
      g.trail.pop_back();
    }
    if (g.trail.empty()) return "";
    ++g.trail.back().taken;
  }
}

std::string TextOf(const Promise& promise) {
  const auto [file, line, bit] = promise;
  return std::string(file) + ":" + std::to_string(line) +
         (bit == kAcquire   ? " acquire"
          : bit == kRelease ? " release"
                            : " seq_cst");
}

}  // namespace

void Try(const char* name, Program* (*make)(), int threads, int needed, int most) {
  const Inside inside;
  g.most = most;
  g.promises.clear();
  const std::string wrong = TryAll(make, threads, {"", 0, 0});
  std::printf("%s: %lld ways, %zu promises of order\n", name,
              static_cast<long long>(g.ways), g.promises.size());
  if (!wrong.empty()) {
    std::printf("  WRONG: %s\n", wrong.c_str());
    std::exit(1);
  }
  int found = 0;
  for (const Promise& promise : std::set<Promise>(g.promises)) {
    if (g.of_one_order && std::get<2>(promise) != kTotal) continue;
    const std::string found_wrong = TryAll(make, threads, promise);
    found += found_wrong.empty() ? 0 : 1;
    std::printf("  without %s: %s\n", TextOf(promise).c_str(),
                found_wrong.empty() ? "right too" : found_wrong.c_str());
  }
  if (found == needed) return;
  std::printf("  WRONG: it needs %d of them, and %d were expected\n", found,
              needed);
  std::exit(1);
}

// --- Plain memory

namespace {

void AccessByte(uintptr_t at, bool writes) {
  Shadow& shadow = g.shadows[at];
  const int me = g.current;
  const Clock& clock = g.clocks[me];
  bool races = shadow.writer != me && clock[shadow.writer] < shadow.written;
  for (int t = 1; writes && t < kThreads; ++t) {
    races = races || (t != me && clock[t] < shadow.read[t]);
  }
  // The access comes before the thread's next operation.
  const int now = clock[me] + 1;
  if (writes) {
    shadow.writer = me;
    shadow.written = now;
  } else {
    shadow.read[me] = now;
  }
  if (races) Fail("a data race");
}
bool IsLooked() { return !g_inside && g.runs && !g.pruned && g.current != 0; }
void Access(const void* address, size_t size, bool writes) {
  if (!IsLooked()) return;
  const Inside inside;
  const auto* byte = static_cast<const char*>(address);
  for (const Fiber& fiber : g.fibers) {
    if (byte >= fiber.stack.data() && byte < fiber.stack.data() + kStack) return;
  }
  const auto at = reinterpret_cast<uintptr_t>(address);
  for (size_t i = 0; i < size; ++i) AccessByte(at + i, writes);
}
/// Memory is given back: that writes to what was used of it, and ends it.
void Free(void* address) {
  if (IsLooked()) {
    const Inside inside;
    const auto at = reinterpret_cast<uintptr_t>(address);
    const size_t size = malloc_usable_size(address);
    for (size_t i = 0; i < size; ++i) {
      if (g.shadows.count(at + i) == 0) continue;
      AccessByte(at + i, true);
      g.shadows.erase(at + i);
    }
  }
  std::free(address);
}

}  // namespace
}  // namespace model

// What the compiler calls.
#define MODEL_ACCESSES(size)                                                     \
  void __tsan_read##size(void* at) { model::Access(at, size, false); }           \
  void __tsan_write##size(void* at) { model::Access(at, size, true); }           \
  void __tsan_unaligned_read##size(void* at) { model::Access(at, size, false); } \
  void __tsan_unaligned_write##size(void* at) { model::Access(at, size, true); }
extern "C" {
MODEL_ACCESSES(1)
MODEL_ACCESSES(2)
MODEL_ACCESSES(4)
MODEL_ACCESSES(8)
MODEL_ACCESSES(16)
void __tsan_read_range(void* at, size_t n) { model::Access(at, n, false); }
void __tsan_write_range(void* at, size_t n) { model::Access(at, n, true); }
void __tsan_vptr_update(void** at, void*) { model::Access(at, sizeof *at, true); }
void __tsan_vptr_read(void**) {}
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
}

void operator delete(void* at) noexcept { model::Free(at); }
void operator delete(void* at, size_t) noexcept { model::Free(at); }
void operator delete(void* at, std::align_val_t) noexcept { model::Free(at); }
void operator delete(void* at, size_t, std::align_val_t) noexcept {
  model::Free(at);
}
