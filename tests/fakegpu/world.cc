#include "world.h"

#include <dlfcn.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <unordered_map>

namespace fakegpu {

thread_local std::vector<CUctx_st*> t_current;
thread_local bool t_in_host_function = false;
thread_local Running t_running{-1, nullptr};

World& W() {
  static World* const world = [] {
    auto* made = new World;
    for (int i = 0; i < kMostDevices; ++i) made->contexts[i].device = i;
    return made;
  }();
  return *world;
}

bool IsXlas(const void* code) {
  // Not under the lock: dladdr takes the loader's, which initialisers of libraries
  // hold while they call the driver.
  thread_local std::unordered_map<const void*, bool> seen;
  const auto [at, is_new] = seen.emplace(code, false);
  Dl_info info;
  if (is_new && dladdr(code, &info) != 0 && info.dli_fname != nullptr) {
    at->second = std::strstr(info.dli_fname, "jax_plugins") != nullptr ||
                 std::strstr(info.dli_fname, "jax_cuda") != nullptr ||
                 std::strstr(info.dli_fname, "libcudart") != nullptr ||
                 std::strstr(info.dli_fname, "libnccl") != nullptr;
  }
  return at->second;
}

int Enter(Lock& lock, const char* function, bool xlas, bool asks) {
  World& w = W();
  if (!xlas) {
    ++w.counts[function];
    if (w.left > 0 && --w.left == 0) w.lost = true, w.changed.notify_all();
    const auto failure = w.failures.extract(function);
    if (!failure.empty()) return failure.mapped();
    if (w.ignored.count(function) != 0) return kIgnored;
  }
  if (t_in_host_function) {
    return Fault(lock, std::string(function) + " in a host function",
                 kNotPermitted);
  }
  if (!w.ready && std::strcmp(function, "cuInit") != 0) return kNotInitialized;
  return w.lost && !asks ? kIllegalAddress : kSuccess;
}

int Fault(Lock&, const std::string& what, int code) {
  W().faults += what + "\n";
  std::fprintf(stderr, "fakegpu: %s\n", what.c_str());
  return code;
}

int Missing(Lock&, const std::string& what) {
  ++W().kernels;
  ++W().missing[what];
  return kNotSupported;
}

namespace {

std::chrono::microseconds Nap(Lock&) {
  World& w = W();
  if (!w.reordered || w.random() % 2 == 0) return w.delay;
  return w.delay + std::chrono::microseconds(w.random() % 2000);
}

void Work(CUstream_st* stream) {
  World& w = W();
  Lock lock(w.mutex);
  for (;;) {
    stream->work.wait(lock,
                      [&] { return stream->closed || !stream->queue.empty(); });
    if (stream->queue.empty()) break;
    Piece piece = std::move(stream->queue.front());
    stream->queue.pop_front();
    t_running = {stream->number, &piece.clock};
    const std::chrono::microseconds nap = Nap(lock);
    const bool lost = w.lost;
    lock.unlock();
    if (!lost) {
      if (nap.count() != 0) std::this_thread::sleep_for(nap);
      piece.op();
    }
    piece.op = nullptr;
    t_running = {-1, nullptr};
    lock.lock();
    ++stream->done;
    w.changed.notify_all();
  }
  delete stream;
}

}  // namespace

CUstream_st* NewStream(Lock&, CUctx_st* context) {
  auto* stream = new CUstream_st{};
  stream->context = context;
  stream->number = W().numbered++;
  W().streams.insert(stream);
  stream->thread = std::thread(Work, stream);
  return stream;
}

std::thread Close(Lock&, CUstream_st* stream) {
  W().streams.erase(stream);
  std::thread thread = std::move(stream->thread);
  stream->closed = true;
  stream->work.notify_one();
  W().changed.notify_all();
  return thread;
}

CUgraph_st* NewGraph(Lock&) { return &W().graphs.emplace_back(); }

CUgraphNode_st* AddNode(Lock&, CUgraph_st* graph, Op op, CUgraph_st* child) {
  W().nodes.push_back(CUgraphNode_st{std::move(op), child, false});
  return graph->nodes.emplace_back(&W().nodes.back());
}

CUstream_st* Find(Lock& lock, CUstream_st* handle) {
  World& w = W();
  if (reinterpret_cast<uintptr_t>(handle) > 2) {
    return w.streams.count(handle) != 0 ? handle : nullptr;
  }
  // The names of the default streams.
  CUctx_st* context = t_current.empty() ? &w.contexts[0] : t_current.back();
  CUstream_st*& found = w.default_streams[context->device];
  if (found == nullptr) found = NewStream(lock, context);
  return found;
}

void Join(Clock& clock, const Clock& other) {
  if (clock.size() < other.size()) clock.resize(other.size());
  for (size_t i = 0; i < other.size(); ++i) clock[i] = std::max(clock[i], other[i]);
}

namespace {

constexpr size_t kMostUses = 32;  // of a block that are kept

bool IsOver(const Use& use) {
  const auto stream = static_cast<size_t>(use.stream);
  return use.stream == t_running.stream ||
         (stream < t_running.clock->size() &&
          (*t_running.clock)[stream] >= use.piece);
}
/// Adds a use, and drops those that no later one can collide with but for this one.
void Add(std::vector<Use>& uses, const Use& use) {
  uses.erase(std::remove_if(uses.begin(), uses.end(),
                            [&](const Use& old) {
                              return old.begin >= use.begin && old.end <= use.end &&
                                     IsOver(old);
                            }),
             uses.end());
  if (uses.size() == kMostUses) uses.erase(uses.begin());
  uses.push_back(use);
}
bool Collides(const std::vector<Use>& uses, const Use& use) {
  for (const Use& old : uses)
    if (old.begin < use.end && use.begin < old.end && !IsOver(old)) return true;
  return false;
}

}  // namespace

void Touch(Lock& lock, const void* begin, size_t bytes, bool writes,
           const std::string& who) {
  if (t_running.clock == nullptr || bytes == 0) return;
  Block* block = Within(lock, W().device, begin, bytes);
  if (block == nullptr) block = Within(lock, W().pinned, begin, bytes);
  if (block == nullptr) return;
  const auto* const from = static_cast<const char*>(begin);
  const Use use{from, from + bytes, t_running.stream,
                (*t_running.clock)[static_cast<size_t>(t_running.stream)]};
  if (Collides(block->writes, use))
    Fault(lock,
          who + (writes ? " writes" : " reads") +
              " memory that another stream writes, without waiting for it",
          0);
  else if (writes && Collides(block->reads, use))
    Fault(lock,
          who + " writes memory that another stream reads, without waiting for it",
          0);
  Add(writes ? block->writes : block->reads, use);
}

void Enqueue(Lock& lock, CUstream_st* stream, Op op) {
  if (stream->capture != nullptr) {
    AddNode(lock, stream->capture, std::move(op));
    return;
  }
  ++stream->enqueued;
  Join(stream->clock, W().host);
  const auto number = static_cast<size_t>(stream->number);
  if (stream->clock.size() <= number) stream->clock.resize(number + 1);
  stream->clock[number] = stream->enqueued;
  stream->queue.push_back(Piece{std::move(op), stream->clock});
  stream->work.notify_one();
}

int Wait(Lock& lock, CUstream_st* stream) {
  if (stream->capture != nullptr) {
    stream->spoilt = true;
    return kCaptureUnsupported;
  }
  World& w = W();
  const long number = stream->enqueued;
  const auto over =
      [&] {  // a stream that was destroyed meanwhile has done its work
        return w.streams.count(stream) == 0 || stream->done >= number;
      };
  const Clock clock = stream->clock;
  w.changed.wait(lock, over);
  Join(w.host, clock);
  return w.lost ? kIllegalAddress : kSuccess;
}

Op HostOp(void (*function)(void*), void* data) {
  return [function, data] {
    {  // It may tell a thread of the host that all before it is over.
      Lock lock(W().mutex);
      if (t_running.clock != nullptr) Join(W().host, *t_running.clock);
    }
    t_in_host_function = true;
    function(data);
    t_in_host_function = false;
  };
}

int WaitForAll(Lock& lock, int device) {
  for (CUstream_st* stream : std::set<CUstream_st*>(W().streams)) {
    if (W().streams.count(stream) == 0 || stream->capture != nullptr) continue;
    if (device >= 0 && stream->context->device != device) continue;
    if (const int code = Wait(lock, stream); code != kSuccess) return code;
  }
  return kSuccess;
}

Block* Within(Lock&, Blocks& blocks, const void* at, size_t bytes) {
  auto* const begin = static_cast<char*>(const_cast<void*>(at));
  auto found = blocks.upper_bound(begin);
  if (found == blocks.begin()) return nullptr;
  --found;
  const auto offset = static_cast<size_t>(begin - found->first);
  const size_t size = found->second.size;
  return offset <= size && bytes <= size - offset ? &found->second : nullptr;
}

bool IsDevices(Lock& lock, const void* at, size_t bytes) {
  World& w = W();
  return Within(lock, w.device, at, bytes) != nullptr ||
         (!w.has_device_memory && at != nullptr);
}

size_t DeviceBytes(Lock&, int device) {
  size_t bytes = 0;
  for (const auto& [at, block] : W().device)
    bytes += block.device == device ? block.size : 0;
  return bytes;
}
bool HasSpace(Lock& lock, size_t bytes, int device) {
  return W().limit == 0 || DeviceBytes(lock, device) + bytes <= W().limit;
}

char* Allocate(size_t bytes, int content) {
  const size_t whole = (bytes + 4095) / 4096 * 4096;
  void* const data = std::aligned_alloc(4096, whole != 0 ? whole : 4096);
  if (data != nullptr) std::memset(data, content, bytes);
  return static_cast<char*>(data);
}

}  // namespace fakegpu
