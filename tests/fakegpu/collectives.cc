// What XLA asks of NCCL (libnccl.so.2), between the devices of this process: each
// rank's part is work on its stream, which waits for the others' there. The last
// that comes does it for all, with a plain loop.
#include <algorithm>
#include <array>
#include <cstring>
#include <deque>
#include <memory>

#include "ptx/numbers.h"
#include "world.h"

namespace {

using namespace fakegpu;

struct Part {
  const char* from = nullptr;
  char* to = nullptr;
};
/// One collective, while its ranks come and go.
struct Meeting {
  std::vector<Part> parts;
  int arrived = 0;
  bool over = false;
};
struct Team {
  int size;
  std::map<long, std::shared_ptr<Meeting>> meetings;
  std::vector<long> begun;  // meetings of each rank
  // What a rank has sent to another one, until it is taken.
  std::map<std::pair<int, int>, std::deque<std::shared_ptr<Part>>> mail;
  // Splits: what each rank asks for, and the teams that came of it.
  struct Split {
    std::vector<std::pair<int, int>> colors;
    int asked = 0;
    std::map<int, std::shared_ptr<Team>> teams;
  };
  std::map<long, Split> splits;
  std::vector<long> splits_of;  // of each rank

  explicit Team(int ranks)
      : size(ranks),
        begun(static_cast<size_t>(ranks)),
        splits_of(static_cast<size_t>(ranks)) {}
};

}  // namespace

struct ncclComm {
  std::shared_ptr<Team> team;
  int rank;
  int device;
};

namespace {

constexpr int kOk = 0, kInvalidArgument = 4;
const size_t kSizes[] = {1, 1, 4, 4, 8, 8, 2, 4, 8, 2, 1, 1};  // by ncclDataType_t

/// In parts of the computation, by rank.
using Compute = std::function<void(std::vector<Part>&)>;

template <typename T>
void ReduceAs(int op, std::vector<Part>& parts, size_t at, size_t count, char* to) {
  std::vector<T> result(count);
  for (size_t i = 0; i < count; ++i) {
    const auto value = [&](const Part& part) {
      return reinterpret_cast<const T*>(part.from)[at + i];
    };
    T all = value(parts[0]);
    for (size_t rank = 1; rank < parts.size(); ++rank) {
      const T other = value(parts[rank]);
      if (op == 1)
        all = T(all * other);
      else if (op == 2)
        all = all < other || other != other ? other : all;
      else if (op == 3)
        all = other < all || other != other ? other : all;
      else
        all = T(all + other);
    }
    if (op == 4) all = T(all / T(static_cast<float>(parts.size())));
    result[i] = all;
  }
  std::memcpy(to, result.data(), count * sizeof(T));
}
void Reduce(int type, int op, std::vector<Part>& parts, size_t at, size_t count,
            char* to) {
  switch (type) {
    case 0:
      return ReduceAs<int8_t>(op, parts, at, count, to);
    case 1:
      return ReduceAs<uint8_t>(op, parts, at, count, to);
    case 2:
      return ReduceAs<int32_t>(op, parts, at, count, to);
    case 3:
      return ReduceAs<uint32_t>(op, parts, at, count, to);
    case 4:
      return ReduceAs<int64_t>(op, parts, at, count, to);
    case 5:
      return ReduceAs<uint64_t>(op, parts, at, count, to);
    case 6:
      return ReduceAs<ptx::Half>(op, parts, at, count, to);
    case 7:
      return ReduceAs<float>(op, parts, at, count, to);
    case 8:
      return ReduceAs<double>(op, parts, at, count, to);
    default:
      return ReduceAs<ptx::Bfloat>(op, parts, at, count, to);
  }
}

/// Enqueues a rank's part of a collective, which reads and writes so many bytes of
/// its own.
int Enter(ncclComm* comm, CUstream_st* handle, Part part, size_t reads,
          size_t writes, Compute compute) {
  Lock lock(W().mutex);
  CUstream_st* const stream = Find(lock, handle);
  if (stream == nullptr) return kInvalidArgument;
  Enqueue(lock, stream,
          [=, team = comm->team, rank = static_cast<size_t>(comm->rank)] {
            Lock lock(W().mutex);
            const long number = team->begun[rank]++;
            std::shared_ptr<Meeting>& place = team->meetings[number];
            if (place == nullptr) {
              place = std::make_shared<Meeting>();
              place->parts.resize(static_cast<size_t>(team->size));
            }
            const std::shared_ptr<Meeting> meeting = place;
            meeting->parts[rank] = part;
            if (++meeting->arrived == team->size) {
              team->meetings.erase(number);
              compute(meeting->parts);
              meeting->over = true;
              W().changed.notify_all();
            }
            W().changed.wait(lock, [&] { return meeting->over || W().lost; });
            Touch(lock, part.from, reads, false, "a collective");
            Touch(lock, part.to, writes, true, "a collective");
          });
  return kOk;
}

/// Sends and receives of a group, which must all begin before one waits.
struct Message {
  ncclComm* comm;
  CUstream_st* stream;
  bool sends;
  int peer;
  Part part;
  size_t bytes;
};
thread_local int t_groups = 0;
thread_local std::vector<Message> t_messages;

void Post() {
  std::vector<Message> messages = std::move(t_messages);
  t_messages.clear();
  std::map<std::pair<ncclComm*, CUstream_st*>, std::vector<Message>> by_stream;
  for (const Message& message : messages)
    by_stream[{message.comm, message.stream}].push_back(message);
  Lock lock(W().mutex);
  for (const auto& [key, together] : by_stream) {
    CUstream_st* const stream = Find(lock, key.second);
    Enqueue(lock, stream,
            [together = together, team = key.first->team, rank = key.first->rank] {
              Lock lock(W().mutex);
              std::vector<std::shared_ptr<Part>> sent;
              for (const Message& message : together) {
                if (!message.sends) continue;
                sent.push_back(std::make_shared<Part>(message.part));
                team->mail[{rank, message.peer}].push_back(sent.back());
              }
              W().changed.notify_all();
              for (const Message& message : together) {
                if (message.sends) continue;
                auto& box = team->mail[{message.peer, rank}];
                W().changed.wait(lock, [&] { return !box.empty() || W().lost; });
                if (box.empty()) return;
                std::memcpy(message.part.to, box.front()->from, message.bytes);
                box.front()->from = nullptr;
                box.pop_front();
                W().changed.notify_all();
                Touch(lock, message.part.to, message.bytes, true, "a message");
              }
              for (const std::shared_ptr<Part>& part : sent)
                W().changed.wait(lock,
                                 [&] { return part->from == nullptr || W().lost; });
            });
  }
}
int Add(Message message) {
  t_messages.push_back(message);
  if (t_groups == 0) Post();
  return kOk;
}

std::map<std::string, std::shared_ptr<Team>>& Teams() {
  static auto* const teams = new std::map<std::string, std::shared_ptr<Team>>;
  return *teams;
}
int Device() { return t_current.empty() ? 0 : t_current.back()->device; }

}  // namespace

struct ncclUniqueId {
  char bytes[128];
};

EXPORT int ncclGetVersion(int* version) { return *version = 22807, kOk; }
EXPORT const char* ncclGetErrorString(int) { return "an error of no NCCL"; }
EXPORT const char* ncclGetLastError(ncclComm*) { return ""; }
EXPORT int ncclGetUniqueId(ncclUniqueId* id) {
  static int number = 0;
  Lock lock(W().mutex);
  std::memset(id, 0, sizeof(*id));
  return std::snprintf(id->bytes, sizeof(id->bytes), "team %d", ++number), kOk;
}
EXPORT int ncclCommInitRankConfig(ncclComm** comm, int size, ncclUniqueId id,
                                  int rank, void*) {
  Lock lock(W().mutex);
  std::shared_ptr<Team>& team = Teams()[std::string(id.bytes, sizeof(id.bytes))];
  if (team == nullptr) team = std::make_shared<Team>(size);
  return *comm = new ncclComm{team, rank, Device()}, kOk;
}
EXPORT int ncclCommInitRank(ncclComm** comm, int size, ncclUniqueId id, int rank) {
  return ncclCommInitRankConfig(comm, size, id, rank, nullptr);
}
EXPORT int ncclCommInitRankScalable(ncclComm** comm, int size, int rank, int,
                                    ncclUniqueId* ids, void* config) {
  return ncclCommInitRankConfig(comm, size, ids[0], rank, config);
}
EXPORT int ncclCommSplit(ncclComm* comm, int color, int key, ncclComm** made,
                         void*) {
  Lock lock(W().mutex);
  Team& team = *comm->team;
  const auto rank = static_cast<size_t>(comm->rank);
  Team::Split& split = team.splits[team.splits_of[rank]++];
  split.colors.resize(static_cast<size_t>(team.size));
  split.colors[rank] = {color, key};
  if (++split.asked == team.size) W().changed.notify_all();
  W().changed.wait(lock, [&] { return split.asked == team.size || W().lost; });
  if (color < 0) return *made = nullptr, kOk;
  std::vector<std::pair<int, size_t>> ranks;  // those of the color, by their keys
  for (size_t i = 0; i < split.colors.size(); ++i)
    if (split.colors[i].first == color)
      ranks.emplace_back(split.colors[i].second, i);
  std::sort(ranks.begin(), ranks.end());
  const auto mine = std::find_if(ranks.begin(), ranks.end(), [&](const auto& one) {
    return one.second == rank;
  });
  std::shared_ptr<Team>& part = split.teams[color];
  if (part == nullptr)
    part = std::make_shared<Team>(static_cast<int>(ranks.size()));
  return *made = new ncclComm{part, static_cast<int>(mine - ranks.begin()),
                              comm->device},
         kOk;
}
EXPORT int ncclCommFinalize(ncclComm*) { return kOk; }
EXPORT int ncclCommDestroy(ncclComm* comm) { return delete comm, kOk; }
EXPORT int ncclCommAbort(ncclComm* comm) { return delete comm, kOk; }
EXPORT int ncclCommGetAsyncError(ncclComm*, int* error) {
  return *error = kOk, kOk;
}
EXPORT int ncclCommCount(ncclComm* comm, int* count) {
  return *count = comm->team->size, kOk;
}
EXPORT int ncclCommCuDevice(ncclComm* comm, int* device) {
  return *device = comm->device, kOk;
}
EXPORT int ncclCommUserRank(ncclComm* comm, int* rank) {
  return *rank = comm->rank, kOk;
}
EXPORT int ncclCommRegister(ncclComm*, void*, size_t, void** handle) {
  return *handle = nullptr, kOk;
}
EXPORT int ncclCommDeregister(ncclComm*, void*) { return kOk; }
EXPORT int ncclGroupStart() { return ++t_groups, kOk; }
EXPORT int ncclGroupEnd() {
  if (--t_groups == 0) Post();
  return kOk;
}

EXPORT int ncclAllReduce(const char* from, char* to, size_t count, int type, int op,
                         ncclComm* comm, CUstream_st* stream) {
  const size_t bytes = count * kSizes[type];
  return Enter(comm, stream, {from, to}, bytes, bytes,
               [=](std::vector<Part>& parts) {
                 std::vector<char> result(bytes);
                 Reduce(type, op, parts, 0, count, result.data());
                 for (const Part& part : parts)
                   std::memcpy(part.to, result.data(), bytes);
               });
}
EXPORT int ncclReduce(const char* from, char* to, size_t count, int type, int op,
                      int root, ncclComm* comm, CUstream_st* stream) {
  const size_t bytes = count * kSizes[type];
  return Enter(comm, stream, {from, to}, bytes, comm->rank == root ? bytes : 0,
               [=](std::vector<Part>& parts) {
                 std::vector<char> result(bytes);
                 Reduce(type, op, parts, 0, count, result.data());
                 std::memcpy(parts[static_cast<size_t>(root)].to, result.data(),
                             bytes);
               });
}
EXPORT int ncclReduceScatter(const char* from, char* to, size_t count, int type,
                             int op, ncclComm* comm, CUstream_st* stream) {
  const size_t bytes = count * kSizes[type];
  const auto ranks = static_cast<size_t>(comm->team->size);
  return Enter(comm, stream, {from, to}, ranks * bytes, bytes,
               [=](std::vector<Part>& parts) {
                 std::vector<char> result(ranks * bytes);
                 Reduce(type, op, parts, 0, ranks * count, result.data());
                 for (size_t i = 0; i < ranks; ++i)
                   std::memcpy(parts[i].to, result.data() + i * bytes, bytes);
               });
}
EXPORT int ncclAllGather(const char* from, char* to, size_t count, int type,
                         ncclComm* comm, CUstream_st* stream) {
  const size_t bytes = count * kSizes[type];
  const auto ranks = static_cast<size_t>(comm->team->size);
  return Enter(comm, stream, {from, to}, bytes, ranks * bytes,
               [=](std::vector<Part>& parts) {
                 std::vector<char> result(ranks * bytes);
                 for (size_t i = 0; i < ranks; ++i)
                   std::memcpy(result.data() + i * bytes, parts[i].from, bytes);
                 for (const Part& part : parts)
                   std::memcpy(part.to, result.data(), result.size());
               });
}
EXPORT int ncclAlltoAll(const char* from, char* to, size_t count, int type,
                        ncclComm* comm, CUstream_st* stream) {
  const size_t bytes = count * kSizes[type];
  const auto ranks = static_cast<size_t>(comm->team->size);
  return Enter(comm, stream, {from, to}, ranks * bytes, ranks * bytes,
               [=](std::vector<Part>& parts) {
                 std::vector<std::vector<char>> results(
                     ranks, std::vector<char>(ranks * bytes));
                 for (size_t i = 0; i < ranks; ++i)
                   for (size_t k = 0; k < ranks; ++k)
                     std::memcpy(results[i].data() + k * bytes,
                                 parts[k].from + i * bytes, bytes);
                 for (size_t i = 0; i < ranks; ++i)
                   std::memcpy(parts[i].to, results[i].data(), results[i].size());
               });
}
EXPORT int ncclBroadcast(const char* from, char* to, size_t count, int type,
                         int root, ncclComm* comm, CUstream_st* stream) {
  const size_t bytes = count * kSizes[type];
  return Enter(comm, stream, {from, to}, comm->rank == root ? bytes : 0, bytes,
               [=](std::vector<Part>& parts) {
                 const std::vector<char> value(
                     parts[static_cast<size_t>(root)].from,
                     parts[static_cast<size_t>(root)].from + bytes);
                 for (const Part& part : parts)
                   std::memcpy(part.to, value.data(), bytes);
               });
}
EXPORT int ncclSend(const char* from, size_t count, int type, int peer,
                    ncclComm* comm, CUstream_st* stream) {
  return Add({comm, stream, true, peer, {from, nullptr}, count * kSizes[type]});
}
EXPORT int ncclRecv(char* to, size_t count, int type, int peer, ncclComm* comm,
                    CUstream_st* stream) {
  return Add({comm, stream, false, peer, {nullptr, to}, count * kSizes[type]});
}
