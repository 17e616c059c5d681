// Helpers of team_test.cc: ways to wait, and a device at one call.
#pragma once

#undef NDEBUG
#include <atomic>
#include <cassert>
#include <chrono>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <utility>

#include "base/team.h"

namespace hostcall {

constexpr std::chrono::milliseconds kForEver{600'000};

/// Lets all waiting threads through once it is open.
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

/// Lets threads through once `size` of them have come.
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

/// One device at one call: its buffer, and how far it got.
struct Visit {
  int value = -1;  ///< stands for the result's buffer
  std::atomic<bool> ran{false}, copied{false}, ended{false}, alone{false};
  std::atomic<bool> left{false};
  std::string error;

  ~Visit() { Wait(); }

  /// Makes the device come to the call, on a thread of its own.
  void Come(std::shared_ptr<Team> team, int64_t run, int device,
            std::function<Team::Error()> job) {
    thread_ = std::thread([this, team = std::move(team), run, device, job] {
      Device member(*this, device, job);
      error = team->Meet(run, member);
      left = true;
    });
  }

  /// Waits until it has left.
  void Wait() {
    if (thread_.joinable()) thread_.join();
  }

 private:
  class Device final : public Team::Member {
   public:
    Device(Visit& visit, int device, const std::function<Team::Error()>& job)
        : Member(device), visit_(visit), job_(job) {}
    Team::Error Call() override {
      visit_.ran = true;
      std::string text = job_();
      visit_.ended = true;
      return text;
    }
    void CopyFrom(const Team::Member& leader) override {
      assert(!visit_.left);
      visit_.value = static_cast<const Device&>(leader).visit_.value;
      visit_.copied = true;
    }
    void FailsAlone(const Team::Error& text) override {
      assert(!visit_.left && !text.empty());
      visit_.alone = true;
    }

   private:
    Visit& visit_;
    const std::function<Team::Error()>& job_;
  };
  std::thread thread_;
};

inline std::shared_ptr<Team> MakeTeam(TeamMode mode, int size,
                                      std::optional<int> leader = 0,
                                      std::chrono::milliseconds grace = kForEver) {
  return std::make_shared<Team>(TeamSettings{mode, size, leader}, grace);
}

/// Makes the first `count` devices come to the call.
template <size_t N, typename Job>
void ComeAll(const std::shared_ptr<Team>& team, int64_t run, Visit (&visits)[N],
             int count, Job job) {
  for (int device = 0; device < count; ++device) {
    visits[device].Come(team, run, device,
                        [job, device]() -> std::string { return job(device); });
  }
}

}  // namespace hostcall
