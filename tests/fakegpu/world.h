// What the files of the driver share. README.md says what it is for, and where it
// is stricter than the real driver.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "codes.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

using Lock = std::unique_lock<std::mutex>;
using Op = std::function<void()>;
using Address =
    unsigned long long;  // of a device's memory, which is the host's here

/// How much of each stream's work, by the streams' numbers, is surely over when a
/// piece of work begins.
using Clock = std::vector<long>;
/// A piece of work that a stream has to do.
struct Piece {
  Op op;
  Clock clock;
};

struct CUctx_st {
  int device = 0;
};
struct CUevent_st {
  CUctx_st* context;
  // Whether its stream has reached the last recording. Each recording has a flag of
  // its own: another stream may wait for an earlier one.
  std::shared_ptr<bool> reached = std::make_shared<bool>(true);
  Clock clock;  // what was over when it was recorded last, and its stream's work
                // before it
};
struct CUgraphNode_st {
  Op op;
  struct CUgraph_st* child = nullptr;
  bool moved = false;  // the child is this node's alone
};
struct CUgraph_st {
  std::vector<CUgraphNode_st*> nodes;  // in an order that dependencies allow
};
struct CUstream_st {
  CUctx_st* context;
  int number = 0;
  std::deque<Piece> queue;
  long enqueued = 0, done = 0;
  Clock clock;                    // of what is enqueued next
  CUgraph_st* capture = nullptr;  // what its work is recorded into
  bool spoilt = false;            // something was done that a capture forbids
  bool closed = false;
  // Its thread waits here while there is nothing to do, not for `World::changed`:
  // each piece of work would wake the threads of all streams, some 150 in a long
  // run.
  std::condition_variable work;
  std::thread thread;  // does its work; frees the stream when it is closed
};

namespace fakegpu {

constexpr int kMostDevices = 8;

/// A use of memory by a piece of work.
struct Use {
  const char *begin, *end;
  int stream;
  long piece;
};

/// A piece of device or pinned memory.
struct Block {
  size_t size;
  int device;
  bool ours;                           // not XLA's
  bool mapped = false;                 // virtual memory
  int queued = 0;                      // queued copies that use it
  std::vector<Use> reads{}, writes{};  // the last ones
};
using Blocks = std::map<char*, Block>;

/// All state, guarded by one lock; streams copy memory without it. Never destroyed,
/// since threads of streams outlive everything.
struct World {
  std::mutex mutex;
  std::condition_variable changed;
  bool ready = false;
  CUctx_st contexts[kMostDevices];
  CUstream_st* default_streams[kMostDevices] = {};
  std::set<CUstream_st*> streams;
  int numbered = 0;
  Clock host;  // what the host has waited for, in any thread
  std::map<CUevent_st*, std::shared_ptr<CUevent_st>> events;
  // Kept when they are destroyed: nodes and child graphs are known by address.
  std::deque<CUgraph_st> graphs;
  std::deque<CUgraphNode_st> nodes;
  Blocks device, pinned;
  size_t limit = 0;                // bytes of each device's memory; 0: no limit
  bool has_device_memory = false;  // false: all memory may stand for a device's

  // What tests ask and tell.
  std::map<std::string, int> failures;  // of the next call that is not XLA's
  std::set<std::string> ignored;  // functions that do nothing if not XLA calls them
  std::map<std::string, long> counts;  // of calls that are not XLA's
  std::string faults;
  long kernels = 0;                     // that could not be run
  long launches = 0;                    // of those that can
  std::map<std::string, long> missing;  // what could not be run, and how often
  long graph_launches = 0;
  std::chrono::microseconds delay{0};  // of each piece of work
  bool reordered = false;              // some work, at random, waits for up to 2 ms
  bool pinned_waits =
      false;       // cuMemHostAlloc and cuMemFreeHost wait for all streams
  long left = -1;  // calls until the context is lost; -1: it is not
  bool lost = false;
  std::mt19937 random{7};
};
World& W();

extern thread_local std::vector<CUctx_st*> t_current;
extern thread_local bool t_in_host_function;
/// What this thread, which is a stream's, does.
struct Running {
  int stream;
  const Clock* clock;
};
extern thread_local Running t_running;

/// Whether the code at an address is XLA's or JAX's plugin.
bool IsXlas(const void* code);

/// What `Enter` returns of a call that says that it succeeded, and does nothing.
constexpr int kIgnored = -1;
/// Begins each function of the driver. Returns 0, or the code that the function
/// shall return. A lost context answers questions that need no device (`asks`).
int Enter(Lock& lock, const char* function, bool xlas, bool asks);

/// Notes that a rule of CUDA was broken: the test fails. Returns the code.
int Fault(Lock& lock, const std::string& what, int code);

CUstream_st* NewStream(Lock& lock, CUctx_st* context);
/// Forgets the stream. Returns its thread, which does what is queued, and ends.
std::thread Close(Lock& lock, CUstream_st* stream);
/// The stream of a handle; null if there is none.
CUstream_st* Find(Lock& lock, CUstream_st* handle);
void Enqueue(Lock& lock, CUstream_st* stream, Op op);
/// A call of a host function.
Op HostOp(void (*function)(void*), void* data);
CUgraphNode_st* AddNode(Lock& lock, CUgraph_st* graph, Op op,
                        CUgraph_st* child = nullptr);
CUgraph_st* NewGraph(Lock& lock);
void Join(Clock& clock, const Clock& other);
/// Notes that the work which this thread does used memory. Work that used the same
/// memory on another stream has to be over, unless both only read: events say so,
/// or the host, which waited for it. If not, the rule is broken, whatever the
/// values are this time.
void Touch(Lock& lock, const void* begin, size_t bytes, bool writes,
           const std::string& who);
/// Waits for what is queued by now. Returns the code that says how that went.
int Wait(Lock& lock, CUstream_st* stream);
/// Waits for all streams, or for those of a device.
int WaitForAll(Lock& lock, int device = -1);

/// Counts a kernel, or work of a library, that can't be run. Returns the code.
int Missing(Lock& lock, const std::string& what);

/// The block that has the whole range; null if there is none.
Block* Within(Lock& lock, Blocks& blocks, const void* at, size_t bytes);
/// Whether the range is a device's memory.
bool IsDevices(Lock& lock, const void* at, size_t bytes);

/// What a device's memory holds.
size_t DeviceBytes(Lock& lock, int device);
/// Whether so much more fits into it.
bool HasSpace(Lock& lock, size_t bytes, int device);
/// Memory with another content than anybody expects.
char* Allocate(size_t bytes, int content);
inline void* Pointer(Address address) { return reinterpret_cast<void*>(address); }

}  // namespace fakegpu

#define ENTER_AS(asks)                                                        \
  using namespace fakegpu;                                                    \
  const bool xlas = IsXlas(__builtin_return_address(0));                      \
  Lock lock(W().mutex);                                                       \
  if (const int code = Enter(lock, __func__, xlas, asks); code != kSuccess) { \
    return code == kIgnored ? kSuccess : code;                                \
  }                                                                           \
  (void)xlas
#define ENTER() ENTER_AS(false)
#define ENTER_ASKING() ENTER_AS(true)
#define ENTER_STREAM(handle)                      \
  ENTER();                                        \
  CUstream_st* const stream = Find(lock, handle); \
  if (stream == nullptr) return Fault(lock, "no such stream", kInvalidHandle)
#define ENTER_EVENT(handle)                              \
  ENTER();                                               \
  if (W().events.count(handle) == 0)                     \
    return Fault(lock, "no such event", kInvalidHandle); \
  const std::shared_ptr<CUevent_st> event = W().events[handle]
