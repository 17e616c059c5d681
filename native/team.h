// Layer E. The devices of one program, at one of its calls.
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
// Guarantees
//   * `finish` of a member is called exactly once, and not before its own job has
//     ended: until then XLA keeps its buffers.
//   * kOnce: the leader finishes after the others have copied its results.
//   * kEach: members wait for those that have come without limit (they are in user
//     code), and for those that have not for kGrace, since control flow may differ
//     between devices there. The first time somebody is missed the place is marked,
//     and from then on nobody waits at it. One that fails there fails alone, and
//     says so first: the others may never get out of their next collective.
//   * Jobs run on threads of ours, as many as there are jobs under way (the
//     functions may wait for each other). XLA's wait for them, as in a collective.
//
// Which meeting a member joins: the oldest open one of its run in which its device
// is missing. One place is executed by one device in sequence, so a device's n-th
// arrival is its n-th call.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstdint>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

namespace hostcall {

/// Threads for jobs that may wait for each other: never fewer than jobs.
class JobThreads {
 public:
  static JobThreads& Get() {
    static JobThreads* threads = new JobThreads;  // outlives static destruction
    return *threads;
  }
  void Run(std::function<void()> job) {
    {
      std::lock_guard<std::mutex> lock(mutex_);
      jobs_.push_back(std::move(job));
      if (idle_ >= jobs_.size()) {
        wake_.notify_one();
        return;
      }
      ++threads_;
    }
    try {
      std::thread(&JobThreads::Work, this).detach();
    } catch (const std::system_error&) {  // no more threads: on this one, then
      RunOne();
      std::lock_guard<std::mutex> lock(mutex_);
      --threads_;
    }
  }

  /// Ends the threads that have no job, and waits for those that have, so many
  /// seconds at most. False: some are left.
  bool Stop(double seconds) {
    std::unique_lock<std::mutex> lock(mutex_);
    stopped_ = true;
    wake_.notify_all();
    return ended_.wait_for(lock, std::chrono::duration<double>(seconds),
                           [this] { return threads_ == 0; });
  }

 private:
  void Work() {
    while (RunOne()) {
    }
    std::lock_guard<std::mutex> lock(mutex_);
    --threads_;
    ended_.notify_all();
  }
  /// The job is gone when it returns, and what it held with it: a thread that waits
  /// for the next keeps no program alive. False: the threads were stopped.
  bool RunOne() {
    std::unique_lock<std::mutex> lock(mutex_);
    ++idle_;
    wake_.wait(lock, [this] { return !jobs_.empty() || stopped_; });
    --idle_;
    if (jobs_.empty()) return false;
    const std::function<void()> job = std::move(jobs_.front());
    jobs_.pop_front();
    lock.unlock();
    job();
    return true;
  }
  std::mutex mutex_;  // guards all below
  std::condition_variable wake_, ended_;
  std::deque<std::function<void()>> jobs_;
  size_t idle_ = 0;  ///< threads that wait for a job
  size_t threads_ = 0;
  bool stopped_ = false;
};

enum class TeamMode { kAlone, kOnce, kEach };

class Team : public std::enable_shared_from_this<Team> {
 public:
  /// Empty for success.
  using Error = std::string;

  struct Member {
    int device;
    std::function<Error()> job;                           ///< calls the function
    std::function<void(const Error&)> finish;             ///< tells XLA
    std::function<void(const Error&)> alone;              ///< kEach: only it fails
    std::function<void(const Member& leader)> copy_from;  ///< kOnce
    std::vector<void*> results;
  };

  /// As the leader: the one that comes first, for a program that does not know its
  /// devices.
  static constexpr int kFirst = -1;

  Team(TeamMode mode, int size, int leader,
       std::chrono::milliseconds grace = std::chrono::milliseconds(1000))
      : mode_(mode),
        size_(static_cast<size_t>(size)),
        leader_(leader),
        grace_(grace) {}

  void Arrive(int64_t run, Member member) {
    if (mode_ == TeamMode::kOnce) {
      ArriveOnce(run, std::move(member));
    } else {
      ArriveEach(run, std::move(member));
    }
  }

 private:
  struct Meeting {
    int64_t run;
    std::vector<Member> members;
    size_t ended = 0;  ///< kEach: members whose job has ended
    bool done = false;
    Error error;
    std::condition_variable changed;
  };
  using MeetingPtr = std::shared_ptr<Meeting>;

  /// The lock is held.
  MeetingPtr Join(int64_t run, Member member) {
    MeetingPtr meeting;
    for (const MeetingPtr& open : meetings_) {
      if (open->run != run || open->members.size() == size_) continue;
      bool here = false;
      for (const Member& other : open->members)
        here |= other.device == member.device;
      if (!here) {
        meeting = open;
        break;
      }
    }
    if (!meeting) {
      meeting = std::make_shared<Meeting>();
      meeting->run = run;
      meeting->members.reserve(size_);  // addresses of members stay
      meetings_.push_back(meeting);
    }
    meeting->members.push_back(std::move(member));
    return meeting;
  }
  void Close(const MeetingPtr& meeting) {
    for (size_t i = 0; i < meetings_.size(); ++i) {
      if (meetings_[i] != meeting) continue;
      meetings_.erase(meetings_.begin() + static_cast<std::ptrdiff_t>(i));
      return;
    }
  }

  void ArriveOnce(int64_t run, Member member) {
    bool leads = member.device == leader_;
    std::unique_lock<std::mutex> lock(mutex_);
    MeetingPtr meeting = Join(run, std::move(member));
    if (leader_ == kFirst) leads = meeting->members.size() == 1;
    Member& mine = meeting->members.back();
    if (leads) {
      lock.unlock();
      JobThreads::Get().Run([self = shared_from_this(), meeting, &mine] {
        Error error = mine.job();
        std::unique_lock<std::mutex> relock(self->mutex_);
        meeting->error = std::move(error);
        meeting->done = true;
        self->Settle(meeting, relock);
      });
      return;
    }
    if (meeting->done) Settle(meeting, lock);
  }

  /// Serves the members that are there; with all there, the leader and the end.
  void Settle(const MeetingPtr& meeting, std::unique_lock<std::mutex>& lock) {
    const Member* leader = nullptr;
    for (const Member& member : meeting->members) {
      if (member.device == leader_) leader = &member;
    }
    if (leader_ == kFirst) leader = &meeting->members.front();
    std::vector<std::function<void(const Error&)>> finished;
    for (Member& member : meeting->members) {
      if (&member == leader || !member.finish) continue;
      if (meeting->error.empty()) member.copy_from(*leader);
      finished.push_back(std::exchange(member.finish, nullptr));
    }
    const bool last = meeting->members.size() == size_;
    if (last) {
      for (Member& member : meeting->members) {
        if (&member == leader) {
          finished.push_back(std::exchange(member.finish, nullptr));
        }
      }
      Close(meeting);
    }
    lock.unlock();
    for (auto& finish : finished) finish(meeting->error);
  }

  void ArriveEach(int64_t run, Member member) {
    std::unique_lock<std::mutex> lock(mutex_);
    if (diverged_) {
      lock.unlock();
      JobThreads::Get().Run(
          [member = std::move(member)] { FinishAlone(member, member.job()); });
      return;
    }
    MeetingPtr meeting = Join(run, std::move(member));
    Member& mine = meeting->members.back();
    if (meeting->members.size() == size_) meeting->changed.notify_all();
    lock.unlock();
    JobThreads::Get().Run([self = shared_from_this(), meeting, &mine] {
      self->RunEach(meeting, mine);
    });
  }

  void RunEach(const MeetingPtr& meeting, Member& mine) {
    Error error = mine.job();
    std::unique_lock<std::mutex> lock(mutex_);
    ++meeting->ended;
    if (meeting->error.empty()) meeting->error = error;
    meeting->changed.notify_all();
    const auto until = std::chrono::steady_clock::now() + grace_;
    while (meeting->ended < size_) {
      if (meeting->members.size() == size_) {
        meeting->changed.wait(lock);
      } else if (diverged_ || meeting->changed.wait_until(lock, until) ==
                                  std::cv_status::timeout) {
        if (meeting->members.size() == size_) continue;
        diverged_ = true;
        Close(meeting);  // who comes later finds `diverged_`
        meeting->changed.notify_all();
        break;
      }
    }
    if (meeting->ended == size_) {
      Close(meeting);
      const Error shared = meeting->error;
      lock.unlock();
      mine.finish(shared);
    } else {
      lock.unlock();
      FinishAlone(mine, error);
    }
  }

  static void FinishAlone(const Member& member, const Error& error) {
    if (!error.empty()) member.alone(error);
    member.finish(error);
  }

  const TeamMode mode_;
  const size_t size_;
  const int leader_;
  const std::chrono::milliseconds grace_;
  std::mutex mutex_;  // guards all below, and the meetings
  std::vector<MeetingPtr> meetings_;
  bool diverged_ = false;
};

}  // namespace hostcall
