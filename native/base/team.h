// Joins the calls that several devices make at one place of a program into one.
//
// A program over several devices executes each of its calls once on every device. A
// Team belongs to one place in such a program, and a Meeting to one execution of
// that place. Does not depend on Python or XLA (tests/native/team_test.cc).
//
// Modes
//   * kOnce: the compiler partitioned the program. All devices hold the whole
//     operands, and all reach the call, since their control flow is the same. Only
//     the leader runs the function, and the others copy its results.
//   * kEach: the user partitioned the program (shard_map, pmap). Each device runs
//     the function on its own shard, and all leave together. If one fails, all
//     fail: a shard that went on alone would wait for the failed one in the next
//     collective, until XLA ends the process.
//
// Threads. Each device calls on the thread that XLA runs it on, and waits there for
// the others, as it would in a collective. The functions of one meeting may wait
// for each other, so nothing here runs them one after another.
//
// Guarantees
//   * kOnce: the leader leaves after all others have copied its results, so its
//     buffers are alive while they are read.
//   * kEach: a member waits without limit for members that have come, since they
//     are in user code. It waits at most `grace` for members that have not come,
//     since control flow may differ between devices. When a member fails to come in
//     time, the team is marked as diverged, and from then on nobody waits at this
//     place for members that have not come. A member that fails in a diverged team
//     fails alone, and reports that before it leaves (FailsAlone): the others may
//     never get out of their next collective.
//   * Each call of Meet returns exactly one error, empty for success.
//
// Which meeting a member joins: the oldest open one of its run that lacks its
// device. A device executes the place sequentially within a run, so its n-th
// arrival joins the n-th meeting of the run.
//
// A meeting in mode kEach, of devices 0 and 1:
//
//   1. device 0: joins, opens the meeting; runs its function
//   2. device 1: joins, which makes the meeting full; runs its function
//   3. device 0: locks, counts itself as ended; waits
//   4. device 1: locks, counts itself as ended; the count is full: closes the
//                meeting and notifies
//   5. both:     return the meeting's first error, which nobody changes any more
//
// If device 1 does not come before the grace ends, device 0 marks the team, closes
// the meeting and returns its own error. All of that happens under the lock, so
// device 1 either joins the meeting in time, and device 0 goes on waiting, or finds
// the team diverged and calls alone.
//
// Spinning. A thread that sleeps wakes up some 10 us after it is notified, which is
// many times what a small function takes. So a member spins for kLook before it
// sleeps. And before its call it spins while another member is in its function: the
// two would meet at the GIL, where CPython sleeps at once. If there are more
// devices than cores, the spinning thread yields between two looks.
#pragma once

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

namespace hostcall {

/// The two ways are told above.
enum class TeamMode { kOnce, kEach };

/// How the devices of a program make one call: what its plan says.
struct TeamSettings {
  TeamMode mode = TeamMode::kOnce;
  int size = 1;  ///< devices of this process that come to the call
  /// kOnce: ordinal of the device that calls. Null: whichever comes first, for a
  /// program that does not know its devices.
  std::optional<int> leader;
};

/// Safe to use from several threads.
class Team {
 public:
  /// The text of an error; empty for success.
  using Error = std::string;

  /// One device's part of a call. Lives on the stack of its thread until Meet
  /// returns, so others may read it only while its thread waits in Meet.
  class Member {
   public:
    explicit Member(int device) : device_(device) {}
    virtual ~Member() = default;
    int device() const { return device_; }
    /// Runs the function. Must not throw, or the others would wait for ever.
    virtual Error Call() = 0;
    /// kOnce: copies the leader's results. The leader waits until it returns.
    virtual void CopyFrom(const Member& leader) = 0;
    /// kEach: reports that this member fails while the others may go on.
    virtual void FailsAlone(const Error& error) = 0;

   private:
    const int device_;
  };

  /// `grace` is how long mode kEach waits for members that have not come.
  explicit Team(const TeamSettings& settings,
                std::chrono::milliseconds grace = std::chrono::milliseconds(1000))
      : mode_(settings.mode),
        size_(static_cast<size_t>(settings.size)),
        leader_(settings.leader),
        grace_(grace),
        yields_(std::thread::hardware_concurrency() < size_) {}

  /// Makes a member's call together with the others of its run, and returns the
  /// error that it leaves with. The calling thread does not hold the GIL.
  Error Meet(int64_t run, Member& member) {
    return mode_ == TeamMode::kOnce ? MeetOnce(run, member) : MeetEach(run, member);
  }

 private:
  /// One call of all devices. Its members share it, and the team keeps it while it
  /// is open. The atomics are changed under the lock, except `inside`. They are
  /// atomic because spinning members read them without the lock.
  struct Meeting {
    int64_t run;               ///< XLA's number of the execution
    std::vector<int> devices;  ///< ordinals of the members that have come
    /// kOnce: members that have copied. kEach: members whose call has ended.
    std::atomic<size_t> ended{0};
    /// kEach: members in their function now. Only a hint for spinning.
    std::atomic<size_t> inside{0};
    /// kOnce: the leader once its call has ended, null before. Valid until `ended`
    /// reaches the number of the others, for which the leader waits. Both publish,
    /// and have the default order, of which release and acquire are used: a meeting
    /// takes microseconds.
    std::atomic<const Member*> leader{nullptr};
    /// kOnce: the leader's error, final once `leader` is set. kEach: the first
    /// error, final once all have ended. Read without the lock only when it is
    /// final.
    Error error;
    /// Notified when the last member joins, and when a member's part ends.
    std::condition_variable changed;
  };
  using MeetingPtr = std::shared_ptr<Meeting>;

  /// How long a member spins before it sleeps, or before it enters its function
  /// although another member is in its own.
  static constexpr std::chrono::microseconds kLook{20};

  /// Adds a device to its meeting, opening one if needed. The lock is held.
  MeetingPtr Join(int64_t run, int device) {
    for (const MeetingPtr& open : meetings_) {
      const std::vector<int>& devices = open->devices;
      if (open->run != run || devices.size() == size_ ||
          std::find(devices.begin(), devices.end(), device) != devices.end()) {
        continue;
      }
      open->devices.push_back(device);
      // Members in WaitForAll may now wait without limit.
      if (devices.size() == size_) open->changed.notify_all();
      return open;
    }
    auto meeting = std::make_shared<Meeting>();
    meeting->run = run;
    meeting->devices.reserve(size_);
    meeting->devices.push_back(device);
    meetings_.push_back(meeting);
    return meeting;
  }
  /// Makes the team forget a meeting, if it has not already. The lock is held.
  void Close(const MeetingPtr& meeting) {
    const auto open = std::find(meetings_.begin(), meetings_.end(), meeting);
    if (open != meetings_.end()) meetings_.erase(open);
  }

  /// Spins until `there` is true, but no longer than kLook.
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
  /// Tells the processor that this is a spin loop.
  static void Pause() {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
  }

  /// Waits until `there` is true: spins, then sleeps. Returns holding the lock.
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
      leads = leader_ ? member.device() == *leader_ : meeting->devices.size() == 1;
    }
    if (leads) {
      Error error = member.Call();
      {
        std::lock_guard<std::mutex> lock(mutex_);
        // The error first: a spinning member that sees the leader set reads the
        // error without the lock.
        meeting->error = std::move(error);
        meeting->leader = &member;
        meeting->changed.notify_all();
      }
      // The others read this member's results, so it can't leave before they have
      // copied them.
      const auto lock =
          Await(*meeting, [&] { return meeting->ended == size_ - 1; });
      Close(meeting);
    } else {
      Await(*meeting, [&] { return meeting->leader != nullptr; });
      // Await's lock is dropped at once, so that the members copy in parallel.
      if (meeting->error.empty()) member.CopyFrom(*meeting->leader);
      std::lock_guard<std::mutex> lock(mutex_);
      if (++meeting->ended == size_ - 1) meeting->changed.notify_all();
    }
    return meeting->error;  // final, so read without the lock
  }

  Error MeetEach(int64_t run, Member& member) {
    MeetingPtr meeting;
    {
      std::lock_guard<std::mutex> lock(mutex_);
      if (!diverged_) meeting = Join(run, member.device());
    }
    if (!meeting) return Alone(member, member.Call());
    // Best effort: another member may enter between this look and the call.
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
    // The last member increments `ended` after all errors were written, and `all`
    // loads it (seq_cst): once `all` is true, the error can be read without the
    // lock.
    Look(all);
    if (!all() && !WaitForAll(meeting)) return Alone(member, std::move(error));
    return meeting->error;
  }

  /// Waits until all members have ended. Returns false if some member has not come
  /// in time; the team is then marked as diverged.
  bool WaitForAll(const MeetingPtr& meeting) {
    const auto until = std::chrono::steady_clock::now() + grace_;
    std::unique_lock<std::mutex> lock(mutex_);
    while (meeting->ended != size_) {
      if (meeting->devices.size() == size_) {
        // All have come: they are in user code, and may take as long as they like.
        meeting->changed.wait(lock);
      } else if (diverged_ || meeting->changed.wait_until(lock, until) ==
                                  std::cv_status::timeout) {
        // The last member may have joined just as the grace ended.
        if (meeting->devices.size() == size_) continue;
        diverged_ = true;  // members that come later join no meeting
        Close(meeting);
        meeting->changed.notify_all();
        return false;
      }
    }
    return true;
  }

  /// Reports the error of a member that leaves without the others, if there is one,
  /// and returns it.
  static Error Alone(Member& member, Error error) {
    if (!error.empty()) member.FailsAlone(error);
    return error;
  }

  const TeamMode mode_;
  const size_t size_;
  const std::optional<int> leader_;  ///< an ordinal; null: the first to come
  const std::chrono::milliseconds grace_;
  const bool yields_;  ///< whether spinning yields, as there are too few cores
  // Guards the fields below, and the fields of meetings that are not atomic. Its
  // parties are the devices of all runs of the program; it is never held during a
  // call or a copy. A lock for each meeting would not help: joining searches all
  // open meetings, and divergence has to reach them all.
  std::mutex mutex_;
  std::vector<MeetingPtr> meetings_;  ///< open ones, oldest first
  bool diverged_ = false;             ///< a member was missed once; never reset
};

}  // namespace hostcall
