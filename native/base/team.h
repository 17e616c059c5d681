// The devices of one program, at one of its calls.
//
// A program over several devices comes to each of its calls once on each device.
// Knows no Python and no XLA (tests/native/team_test.cc).
//
// Two ways to make one call of several
//   kOnce  the program is partitioned by the compiler: all devices hold the whole
//          operands, and all come to the call, for their control flow is the same.
//          The leader's function runs, and its results are copied to the others.
//   kEach  the program is written per device (shard_map, pmap): each calls for its
//          own shard, and they leave together. If one fails, all do: a shard that
//          went on alone would wait for the failed one in the next collective
//          until XLA ends the process.
//
// Each device calls on the thread that it came on, and waits there for the others,
// as it would in a collective. Functions of one meeting may wait for each other.
//
// Guarantees
//   * kOnce: the leader leaves after the others have copied its results.
//   * kEach: members wait for those that have come without limit (they are in user
//     code), and for those that have not for kGrace, since control flow may differ
//     between devices there. The first time somebody is missed the place is marked,
//     and from then on nobody waits at it. One that fails there fails alone, and
//     says so first: the others may never get out of their next collective.
//
// Which meeting a member joins: the oldest open one of its run in which its device
// is missing. One place is executed by one device in sequence, so a device's n-th
// arrival is its n-th call.
//
// Waiting. A thread that sleeps is woken some 10 us later, which is many times what
// a small function takes. So a member looks for a while before it sleeps: before
// the call, whether another member is in its own (they would meet again at the
// GIL, where CPython sleeps at once), and after it, whether all have ended. Where
// there are more devices than cores it gives the core away between two looks.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace hostcall {

enum class TeamMode { kAlone, kOnce, kEach };

class Team {
 public:
  /// Empty for success.
  using Error = std::string;

  /// A device at a call.
  class Member {
   public:
    explicit Member(int device) : device_(device) {}
    virtual ~Member() = default;
    int device() const { return device_; }
    virtual Error Call() = 0;                         ///< runs the function
    virtual void CopyFrom(const Member& leader) = 0;  ///< kOnce: its results
    virtual void FailsAlone(const Error& error) = 0;  ///< kEach: only this one does

   private:
    const int device_;
  };

  /// As the leader: the one that comes first, for a program that does not know its
  /// devices.
  static constexpr int kFirst = -1;

  Team(TeamMode mode, int size, int leader,
       std::chrono::milliseconds grace = std::chrono::milliseconds(1000))
      : mode_(mode),
        size_(static_cast<size_t>(size)),
        leader_(leader),
        grace_(grace),
        yields_(std::thread::hardware_concurrency() < size_) {}

  /// Makes the call of a member, with the others of its run, and gives the error
  /// that it leaves with.
  Error Meet(int64_t run, Member& member) {
    return mode_ == TeamMode::kOnce ? MeetOnce(run, member) : MeetEach(run, member);
  }

 private:
  struct Meeting {
    int64_t run;
    std::vector<int> devices;       ///< of the members
    std::atomic<size_t> ended{0};   ///< members that have called, or copied
    std::atomic<size_t> inside{0};  ///< kEach: members in their function
    std::atomic<const Member*> leader{nullptr};  ///< kOnce: when it has called
    Error error;  ///< kOnce: the leader's; kEach: the first
    std::condition_variable changed;
  };
  using MeetingPtr = std::shared_ptr<Meeting>;

  /// How long a member looks before it sleeps, or calls beside another.
  static constexpr std::chrono::microseconds kLook{20};

  /// The lock is held.
  MeetingPtr Join(int64_t run, int device) {
    for (const MeetingPtr& open : meetings_) {
      const std::vector<int>& here = open->devices;
      if (open->run != run || here.size() == size_ ||
          std::find(here.begin(), here.end(), device) != here.end()) {
        continue;
      }
      open->devices.push_back(device);
      if (here.size() == size_) open->changed.notify_all();
      return open;
    }
    auto meeting = std::make_shared<Meeting>();
    meeting->run = run;
    meeting->devices.reserve(size_);
    meeting->devices.push_back(device);
    meetings_.push_back(meeting);
    return meeting;
  }
  void Close(const MeetingPtr& meeting) {
    for (size_t i = 0; i < meetings_.size(); ++i) {
      if (meetings_[i] != meeting) continue;
      meetings_.erase(meetings_.begin() + static_cast<std::ptrdiff_t>(i));
      return;
    }
  }

  /// Looks for a while whether `there` is true.
  template <typename Condition>
  void Look(const Condition& there) const {
    if (there()) return;
    const auto until = std::chrono::steady_clock::now() + kLook;
    do {
      for (int i = 0; i < (yields_ ? 1 : 16); ++i) {
        if (there()) return;
        Pause();
      }
      if (yields_) std::this_thread::yield();
    } while (std::chrono::steady_clock::now() < until);
  }
  static void Pause() {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
  }

  /// Waits until `there` is true: looks for a while, then sleeps.
  template <typename Condition>
  std::unique_lock<std::mutex> Await(Meeting& meeting, const Condition& there) {
    Look(there);
    std::unique_lock<std::mutex> lock(mutex_);
    meeting.changed.wait(lock, there);
    return lock;
  }

  Error MeetOnce(int64_t run, Member& member) {
    MeetingPtr meeting;
    bool leads;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      meeting = Join(run, member.device());
      leads = leader_ == kFirst ? meeting->devices.size() == 1
                                : member.device() == leader_;
    }
    if (leads) {
      Error error = member.Call();
      {
        std::lock_guard<std::mutex> lock(mutex_);
        meeting->error = std::move(error);
        meeting->leader = &member;
        meeting->changed.notify_all();
      }
      const auto lock =
          Await(*meeting, [&] { return meeting->ended == size_ - 1; });
      Close(meeting);
    } else {
      Await(*meeting, [&] { return meeting->leader != nullptr; });
      if (meeting->error.empty()) member.CopyFrom(*meeting->leader);
      std::lock_guard<std::mutex> lock(mutex_);
      if (++meeting->ended == size_ - 1) meeting->changed.notify_all();
    }
    return meeting->error;
  }

  Error MeetEach(int64_t run, Member& member) {
    MeetingPtr meeting;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (!diverged_) meeting = Join(run, member.device());
    }
    if (!meeting) return Alone(member, member.Call());
    Look([&] { return meeting->inside == 0; });
    ++meeting->inside;
    Error error = member.Call();
    --meeting->inside;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (meeting->error.empty()) meeting->error = error;
      if (++meeting->ended == size_) {
        Close(meeting);
        meeting->changed.notify_all();
      }
    }
    const auto all = [&] { return meeting->ended == size_; };
    Look(all);
    if (!all() && !WaitForAll(meeting)) return Alone(member, std::move(error));
    return meeting->error;
  }

  /// False: somebody is missing.
  bool WaitForAll(const MeetingPtr& meeting) {
    const auto until = std::chrono::steady_clock::now() + grace_;
    std::unique_lock<std::mutex> lock(mutex_);
    while (meeting->ended != size_) {
      if (meeting->devices.size() == size_) {
        meeting->changed.wait(lock);
      } else if (diverged_ || meeting->changed.wait_until(lock, until) ==
                                  std::cv_status::timeout) {
        if (meeting->devices.size() == size_) continue;
        diverged_ = true;  // who comes later joins nobody
        Close(meeting);
        meeting->changed.notify_all();
        return false;
      }
    }
    return true;
  }

  static Error Alone(Member& member, Error error) {
    if (!error.empty()) member.FailsAlone(error);
    return error;
  }

  const TeamMode mode_;
  const size_t size_;
  const int leader_;
  const std::chrono::milliseconds grace_;
  const bool yields_;
  std::mutex mutex_;  // guards all below, and what in meetings is not atomic
  std::vector<MeetingPtr> meetings_;
  bool diverged_ = false;
};

}  // namespace hostcall
