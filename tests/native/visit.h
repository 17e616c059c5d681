// Devices for team_test.cc: what waits, and what a device sees of one call.
#pragma once

#undef NDEBUG
#include <atomic>
#include <cassert>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <utility>

#include "team.h"

namespace hostcall {

constexpr std::chrono::milliseconds kForEver{600'000};

/// Opens once, for all who wait.
class Gate {
 public:
  void Open() {
    std::lock_guard<std::mutex> lock(mutex_);
    open_ = true;
    changed_.notify_all();
  }
  void Wait() {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [this] { return open_; });
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  bool open_ = false;
};

/// Lets nobody on before `size` have come.
class Barrier {
 public:
  explicit Barrier(int size) : missing_(size) {}
  void Wait() {
    std::unique_lock<std::mutex> lock(mutex_);
    if (--missing_ == 0) changed_.notify_all();
    changed_.wait(lock, [this] { return missing_ <= 0; });
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  int missing_;
};

/// One device at one call: its buffers, and what became of it.
struct Visit {
  int value = -1;  ///< the result's buffer
  std::atomic<bool> ran{false}, copied{false}, ended{false}, alone{false};
  std::atomic<int> finished{0};
  std::string error;
  Gate gate;  ///< opens when XLA has been told

  Team::Member Member(int device, std::function<Team::Error()> job) {
    Team::Member member;
    member.device = device;
    member.results = {&value};
    member.job = [this, job = std::move(job)] {
      ran = true;
      std::string text = job();
      ended = true;
      return text;
    };
    member.copy_from = [this](const Team::Member& leader) {
      value = *static_cast<int*>(leader.results[0]);
      copied = true;
    };
    member.finish = [this](const std::string& text) {
      assert(++finished == 1);
      error = text;
      gate.Open();
    };
    member.alone = [this](const std::string& text) {
      assert(finished == 0 && !text.empty());
      alone = true;
    };
    return member;
  }
};

inline std::shared_ptr<Team> MakeTeam(TeamMode mode, int size, int leader = 0,
                                      std::chrono::milliseconds grace = kForEver) {
  return std::make_shared<Team>(mode, size, leader, grace);
}

/// The first `count` devices come to the call, in order.
template <size_t N, typename Job>
void ArriveAll(Team& team, int64_t run, Visit (&visits)[N], int count, Job job) {
  for (int device = 0; device < count; ++device) {
    team.Arrive(
        run, visits[device].Member(device, [job, device] { return job(device); }));
  }
}

}  // namespace hostcall
