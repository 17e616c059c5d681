// CUDA graphs: captured from a stream, or built of nodes. Nodes run one after the
// other.
#include <cstring>
#include <utility>

#include "kernels.h"
#include "world.h"

struct CUgraphExec_st {
  std::vector<CUgraphNode_st*> order;
  std::map<CUgraphNode_st*, CUgraphNode_st>
      now;  // what each node does in this graph
};

namespace {

using namespace fakegpu;

CUgraph_st* Clone(Lock& lock, const CUgraph_st* graph) {
  CUgraph_st* const clone = NewGraph(lock);
  for (const CUgraphNode_st* node : graph->nodes) {
    CUgraph_st* const child = node->child ? Clone(lock, node->child) : nullptr;
    AddNode(lock, clone, node->op, child);
  }
  return clone;
}

/// What a node does in an instance. Nodes of a graph that was moved into another
/// one are the instance's, too, and may have got other parameters.
void Collect(const CUgraphExec_st& exec, CUgraphNode_st* node,
             std::vector<Op>& ops) {
  const auto found = exec.now.find(node);
  const CUgraphNode_st& now = found != exec.now.end() ? found->second : *node;
  if (now.op) ops.push_back(now.op);
  if (now.child == nullptr) return;
  for (CUgraphNode_st* inner : now.child->nodes) Collect(exec, inner, ops);
}

void Take(Lock& lock, CUgraphExec_st* exec, const CUgraph_st* graph) {
  exec->order = graph->nodes;
  exec->now.clear();
  for (CUgraphNode_st* node : graph->nodes) {
    CUgraph_st* child = node->child;
    if (child != nullptr && !node->moved) child = Clone(lock, child);
    exec->now[node] = {node->op, child, node->moved};
  }
}

/// CUDA_MEMCPY3D, of which a row is used.
struct CopySide {
  size_t x, y, z, level;
  int kind;
  void* host;
  Address device;
  void *array, *reserved;
  size_t pitch, height;

  char* at() const {
    return static_cast<char*>(device ? Pointer(device) : host) + x;
  }
};
struct CopyNode {
  CopySide from, to;
  size_t width, height, depth;
};
/// CUDA_MEMSET_NODE_PARAMS.
struct FillNode {
  Address to;
  size_t pitch;
  unsigned value, element_size;
  size_t width, height;
};

Op CopyOp(const CopyNode& node) {
  return [node] {
    Lock lock(W().mutex);
    const bool gone =
        (node.to.device && !IsDevices(lock, node.to.at(), node.width)) ||
        (node.from.device && !IsDevices(lock, node.from.at(), node.width));
    if (gone) {
      Fault(lock, "a graph has a copy of memory that is gone", 0);
    } else {
      std::memcpy(node.to.at(), node.from.at(), node.width);
      Touch(lock, node.from.at(), node.width, false, "a graph's copy");
      Touch(lock, node.to.at(), node.width, true, "a graph's copy");
    }
  };
}
Op FillOp(const FillNode& node) {
  return [node] {
    const size_t bytes = node.width * node.element_size;
    Lock lock(W().mutex);
    if (!IsDevices(lock, Pointer(node.to), bytes)) {
      Fault(lock, "a graph fills memory that is gone", 0);
      return;
    }
    auto* const to = static_cast<char*>(Pointer(node.to));
    for (size_t i = 0; i < bytes; i += node.element_size)
      std::memcpy(to + i, &node.value, node.element_size);
    Touch(lock, to, bytes, true, "a graph's fill");
  };
}

/// CUDA_KERNEL_NODE_PARAMS, as far as it is read.
struct KernelNode {
  CUfunc_st* function;
  unsigned grid[3], block[3];
  unsigned shared_bytes;
  void** params;

  KernelLaunch launch() const {
    return {function,
            {grid[0], grid[1], grid[2]},
            {block[0], block[1], block[2]},
            shared_bytes,
            params};
  }
};
/// CUDA_MEMCPY_NODE_PARAMS.
struct CopyNodeInContext {
  int flags, reserved;
  CUctx_st* context;
  CopyNode copy;
};
/// CUDA_CHILD_GRAPH_NODE_PARAMS.
struct ChildNode {
  CUgraph_st* graph;
  int ownership;  // 1: the graph is moved, and not copied
};
/// CUDA_HOST_NODE_PARAMS.
struct HostNode {
  void (*function)(void*);
  void* data;
};
/// CUgraphNodeParams, as far as it is read.
struct NodeParams {
  int kind;
  int reserved[3];
  union {
    ChildNode child;
    KernelNode kernel;
    CopyNodeInContext copy;
    FillNode fill;
    HostNode host;
  };
};
constexpr int kKernel = 0, kCopy = 1, kFill = 2, kHost = 3, kChild = 4, kEmpty = 5;

/// The work of a node that has no graph in it.
int NodeOp(Lock& lock, const NodeParams& params, Op& op) {
  switch (params.kind) {
    case kKernel:
      return KernelOp(lock, params.kernel.launch(), op);
    case kCopy:
      return op = CopyOp(params.copy.copy), kSuccess;
    case kFill:
      return op = FillOp(params.fill), kSuccess;
    case kHost:
      return op = HostOp(params.host.function, params.host.data), kSuccess;
    case kEmpty:
      return op = nullptr, kSuccess;
    default:
      return Missing(lock, "a graph's node of kind " + std::to_string(params.kind));
  }
}

}  // namespace

// --- Capture
// ----------------------------------------------------------------------

EXPORT int cuStreamBeginCaptureToGraph(CUstream_st* handle, CUgraph_st* graph,
                                       void*, void*, size_t, int) {
  ENTER_STREAM(handle);
  stream->spoilt = false;
  return stream->capture = graph, kSuccess;
}
EXPORT int cuStreamBeginCapture_v2(CUstream_st* handle, int) {
  ENTER_STREAM(handle);
  stream->spoilt = false;
  return stream->capture = NewGraph(lock), kSuccess;
}
EXPORT int cuStreamEndCapture(CUstream_st* handle, CUgraph_st** graph) {
  ENTER_STREAM(handle);
  if (stream->capture == nullptr) return kInvalidValue;
  CUgraph_st* const captured = std::exchange(stream->capture, nullptr);
  if (graph != nullptr) *graph = stream->spoilt ? nullptr : captured;
  return stream->spoilt ? kCaptureInvalidated : kSuccess;
}

// --- Graphs
// -----------------------------------------------------------------------

EXPORT int cuGraphCreate(CUgraph_st** graph, unsigned) {
  ENTER();
  return *graph = NewGraph(lock), kSuccess;
}
EXPORT int cuGraphDestroy(CUgraph_st*) { return kSuccess; }
EXPORT int cuGraphAddEmptyNode(CUgraphNode_st** node, CUgraph_st* graph, void*,
                               size_t) {
  ENTER();
  return *node = AddNode(lock, graph, nullptr), kSuccess;
}
EXPORT int cuGraphAddChildGraphNode(CUgraphNode_st** node, CUgraph_st* graph, void*,
                                    size_t, CUgraph_st* child) {
  ENTER();
  return *node = AddNode(lock, graph, nullptr, Clone(lock, child)), kSuccess;
}
EXPORT int cuGraphAddMemcpyNode(CUgraphNode_st** node, CUgraph_st* graph, void*,
                                size_t, const CopyNode* copy, CUctx_st*) {
  ENTER();
  return *node = AddNode(lock, graph, CopyOp(*copy)), kSuccess;
}
EXPORT int cuGraphAddMemsetNode(CUgraphNode_st** node, CUgraph_st* graph, void*,
                                size_t, const FillNode* fill, CUctx_st*) {
  ENTER();
  return *node = AddNode(lock, graph, FillOp(*fill)), kSuccess;
}
EXPORT int cuGraphAddKernelNode_v2(CUgraphNode_st** node, CUgraph_st* graph, void*,
                                   size_t, const KernelNode* kernel) {
  ENTER();
  Op op;
  if (const int code = KernelOp(lock, kernel->launch(), op); code != kSuccess)
    return code;
  return *node = AddNode(lock, graph, std::move(op)), kSuccess;
}
EXPORT int cuGraphAddKernelNode(CUgraphNode_st** node, CUgraph_st* graph,
                                void* needs, size_t count,
                                const KernelNode* kernel) {
  return cuGraphAddKernelNode_v2(node, graph, needs, count, kernel);
}
EXPORT int cuGraphAddNode_v2(CUgraphNode_st** node, CUgraph_st* graph, void*, void*,
                             size_t, const NodeParams* params) {
  ENTER();
  if (params->kind == kChild) {
    const bool moved = params->child.ownership == 1;
    CUgraph_st* const child =
        moved ? params->child.graph : Clone(lock, params->child.graph);
    *node = AddNode(lock, graph, nullptr, child);
    (*node)->moved = moved;
    return kSuccess;
  }
  Op op;
  if (const int code = NodeOp(lock, *params, op); code != kSuccess) return code;
  return *node = AddNode(lock, graph, std::move(op)), kSuccess;
}
EXPORT int cuGraphGetNodes(CUgraph_st* graph, CUgraphNode_st** nodes,
                           size_t* count) {
  ENTER();
  for (size_t i = 0; nodes != nullptr && i < *count; ++i)
    nodes[i] = graph->nodes[i];
  return *count = graph->nodes.size(), kSuccess;
}
EXPORT int cuGraphGetRootNodes(CUgraph_st* graph, CUgraphNode_st** nodes,
                               size_t* count) {
  ENTER();
  const size_t roots = graph->nodes.empty() ? 0 : 1;
  if (nodes != nullptr && roots != 0) nodes[0] = graph->nodes[0];
  return *count = roots, kSuccess;
}
EXPORT int cuGraphGetEdges(CUgraph_st*, void*, void*, size_t* count) {
  return *count = 0, kSuccess;
}
EXPORT int cuGraphGetEdges_v2(CUgraph_st*, void*, void*, void*, size_t* count) {
  return *count = 0, kSuccess;
}
EXPORT int cuGraphNodeGetType(CUgraphNode_st* node, int* kind) {
  return *kind = node->child != nullptr ? kChild : 5, kSuccess;
}
EXPORT int cuGraphDebugDotPrint(CUgraph_st*, const char*, unsigned) {
  return kSuccess;
}

// --- Instances
// --------------------------------------------------------------------

EXPORT int cuGraphInstantiate(CUgraphExec_st** exec, CUgraph_st* graph, Address) {
  ENTER();
  *exec = new CUgraphExec_st;
  return Take(lock, *exec, graph), kSuccess;
}
EXPORT int cuGraphInstantiateWithFlags(CUgraphExec_st** exec, CUgraph_st* graph,
                                       Address) {
  ENTER();
  *exec = new CUgraphExec_st;
  return Take(lock, *exec, graph), kSuccess;
}
EXPORT int cuGraphExecDestroy(CUgraphExec_st* exec) {
  ENTER();
  return delete exec, kSuccess;
}
EXPORT int cuGraphExecUpdate_v2(CUgraphExec_st* exec, CUgraph_st* graph, void*) {
  ENTER();
  return Take(lock, exec, graph), kSuccess;
}
EXPORT int cuGraphExecChildGraphNodeSetParams(CUgraphExec_st* exec,
                                              CUgraphNode_st* node,
                                              CUgraph_st* child) {
  ENTER();
  return exec->now[node].child = Clone(lock, child), kSuccess;
}
EXPORT int cuGraphExecKernelNodeSetParams_v2(CUgraphExec_st* exec,
                                             CUgraphNode_st* node,
                                             const KernelNode* kernel) {
  ENTER();
  return KernelOp(lock, kernel->launch(), exec->now[node].op);
}
EXPORT int cuGraphExecKernelNodeSetParams(CUgraphExec_st* exec,
                                          CUgraphNode_st* node,
                                          const KernelNode* kernel) {
  ENTER();
  return KernelOp(lock, kernel->launch(), exec->now[node].op);
}
EXPORT int cuGraphExecMemcpyNodeSetParams(CUgraphExec_st* exec,
                                          CUgraphNode_st* node,
                                          const CopyNode* copy, CUctx_st*) {
  ENTER();
  return exec->now[node].op = CopyOp(*copy), kSuccess;
}
EXPORT int cuGraphExecMemsetNodeSetParams(CUgraphExec_st* exec,
                                          CUgraphNode_st* node,
                                          const FillNode* fill, CUctx_st*) {
  ENTER();
  return exec->now[node].op = FillOp(*fill), kSuccess;
}
EXPORT int cuGraphExecNodeSetParams(CUgraphExec_st* exec, CUgraphNode_st* node,
                                    const NodeParams* params) {
  ENTER();
  if (params->kind != kChild) return NodeOp(lock, *params, exec->now[node].op);
  return exec->now[node].child = Clone(lock, params->child.graph), kSuccess;
}
EXPORT int cuGraphUpload(CUgraphExec_st*, CUstream_st*) { return kSuccess; }
EXPORT int cuGraphLaunch(CUgraphExec_st* exec, CUstream_st* handle) {
  ENTER_STREAM(handle);
  ++W().graph_launches;
  std::vector<Op> ops;  // what the graph does now, whatever is set later
  for (CUgraphNode_st* node : exec->order) Collect(*exec, node, ops);
  Enqueue(lock, stream, [ops] {
    for (const Op& op : ops) op();
  });
  return kSuccess;
}
