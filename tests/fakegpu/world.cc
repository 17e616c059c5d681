#include "world.h"

#include <dlfcn.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <unordered_map>

namespace fakegpu {

thread_local std::vector<CUctx_st*> t_current;
thread_local bool t_in_host_function = false;

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
                 std::strstr(info.dli_fname, "jax_cuda") != nullptr;
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
    w.changed.wait(lock, [&] { return stream->closed || !stream->queue.empty(); });
    if (stream->queue.empty()) break;
    Op op = std::move(stream->queue.front());
    stream->queue.pop_front();
    const std::chrono::microseconds nap = Nap(lock);
    const bool lost = w.lost;
    lock.unlock();
    if (!lost) {
      if (nap.count() != 0) std::this_thread::sleep_for(nap);
      op();
    }
    op = nullptr;
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
  W().streams.insert(stream);
  stream->thread = std::thread(Work, stream);
  return stream;
}

std::thread Close(Lock&, CUstream_st* stream) {
  W().streams.erase(stream);
  std::thread thread = std::move(stream->thread);
  stream->closed = true;
  W().changed.notify_all();
  return thread;
}

CUgraph_st* NewGraph(Lock&) { return &W().graphs.emplace_back(); }

CUgraphNode_st* AddNode(Lock&, CUgraph_st* graph, Op op, CUgraph_st* child) {
  W().nodes.push_back(CUgraphNode_st{std::move(op), child});
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

void Enqueue(Lock& lock, CUstream_st* stream, Op op) {
  if (stream->capture != nullptr) {
    AddNode(lock, stream->capture, std::move(op));
    return;
  }
  stream->queue.push_back(std::move(op));
  ++stream->enqueued;
  W().changed.notify_all();
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
  w.changed.wait(lock, over);
  return w.lost ? kIllegalAddress : kSuccess;
}

Op HostOp(void (*function)(void*), void* data) {
  return [function, data] {
    t_in_host_function = true;
    function(data);
    t_in_host_function = false;
  };
}

int WaitForAll(Lock& lock) {
  for (CUstream_st* stream : std::set<CUstream_st*>(W().streams)) {
    if (W().streams.count(stream) == 0 || stream->capture != nullptr) continue;
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

char* Allocate(size_t bytes, int content) {
  const size_t whole = (bytes + 4095) / 4096 * 4096;
  void* const data = std::aligned_alloc(4096, whole != 0 ? whole : 4096);
  if (data != nullptr) std::memset(data, content, bytes);
  return static_cast<char*>(data);
}

}  // namespace fakegpu
