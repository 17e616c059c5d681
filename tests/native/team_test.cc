// The devices of a program at one of its calls; threads act as devices.
#undef NDEBUG
#include <algorithm>
#include <cassert>
#include <chrono>
#include <cstdio>
#include <memory>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "visit.h"

using hostcall::Barrier;
using hostcall::ComeAll;
using hostcall::Gate;
using hostcall::MakeTeam;
using hostcall::Team;
using hostcall::TeamMode;
using hostcall::Visit;
using std::chrono::milliseconds;

namespace {

// --- kOnce ---------------------------------------------------------------------

void TheLeaderCallsForAll(int leader, std::vector<int> order) {
  auto team = MakeTeam(TeamMode::kOnce, 4, leader);
  Visit visits[4];
  for (int device : order) {
    visits[device].Come(team, 1, device, [&visits, leader] {
      visits[leader].value = 42;
      return std::string();
    });
  }
  for (int device = 0; device < 4; ++device) {
    visits[device].Wait();
    assert(visits[device].error.empty());
    assert(visits[device].value == 42);
    assert(visits[device].ran == (device == leader));
    assert(visits[device].copied == (device != leader));
  }
}

void TheFirstLeads(int first) {
  auto team = MakeTeam(TeamMode::kOnce, 3, std::nullopt);
  for (int run = 0; run < 3; ++run) {
    Visit visits[3];
    for (int i = 0; i < 3; ++i) {
      const int device = (first + i) % 3;
      visits[device].Come(team, run, device, [&visits, device] {
        visits[device].value = 42;
        return std::string();
      });
      while (!visits[first].ran) std::this_thread::yield();
    }
    for (int device = 0; device < 3; ++device) {
      visits[device].Wait();
      assert(visits[device].error.empty() && visits[device].value == 42);
      assert(visits[device].ran == (device == first));
      assert(visits[device].copied == (device != first));
    }
  }
}

void TheLeaderWaitsUntilAllHaveCopied() {
  auto team = MakeTeam(TeamMode::kOnce, 2);
  Visit leader, follower;
  leader.Come(team, 1, 0, [&leader] {
    leader.value = 5;
    return std::string();
  });
  while (!leader.ended) std::this_thread::yield();
  std::this_thread::sleep_for(milliseconds(20));
  assert(!leader.left);  // its buffer is still needed
  follower.Come(team, 1, 1, [] { return std::string("never runs"); });
  follower.Wait();
  leader.Wait();
  assert(follower.value == 5);
}

void AllReturnTheLeadersError() {
  auto team = MakeTeam(TeamMode::kOnce, 3, 1);
  Visit visits[3];
  ComeAll(team, 1, visits, 3, [](int) { return std::string("bad"); });
  for (Visit& visit : visits) {
    visit.Wait();
    assert(visit.error == "bad" && !visit.copied);
  }
}

/// Many runs at once; each device comes to the place again and again.
void ManyRuns(TeamMode mode) {
  constexpr int kRuns = 6, kDevices = 4, kCalls = 60;
  auto team = MakeTeam(mode, kDevices, 2);
  auto all = std::make_unique<Visit[][kCalls][kDevices]>(kRuns);
  std::vector<std::thread> threads;
  for (int run = 0; run < kRuns; ++run) {
    for (int device = 0; device < kDevices; ++device) {
      threads.emplace_back([&all, &team, mode, run, device] {
        std::mt19937 random(static_cast<uint32_t>(run * 31 + device));
        for (int call = 0; call < kCalls; ++call) {
          if (random() % 8 == 0) std::this_thread::sleep_for(milliseconds(1));
          Visit& visit = all[run][call][device];
          const bool fails = (call + run) % 7 == 0 && device == 2;
          visit.Come(team, run, device, [&visit, run, call, fails] {
            visit.value = run * kCalls + call;
            return fails ? "run " + std::to_string(run) : std::string();
          });
          visit.Wait();
          const bool failed = (call + run) % 7 == 0;
          assert(visit.error == (failed ? "run " + std::to_string(run) : ""));
          if (!failed) assert(visit.value == run * kCalls + call);
          assert(visit.ran == (mode == TeamMode::kEach || device == 2));
        }
      });
    }
  }
  for (std::thread& thread : threads) thread.join();
}

// --- kEach ---------------------------------------------------------------------

void EachCallsAndAllLeaveTogether() {
  auto team = MakeTeam(TeamMode::kEach, 4);
  Visit visits[4];
  Barrier barrier(4);  // functions may wait for each other
  Gate slow;
  ComeAll(team, 1, visits, 4, [&](int device) {
    barrier.Wait();
    if (device == 3) slow.Wait();
    return std::string();
  });
  for (int device = 0; device < 3; ++device) {
    while (!visits[device].ended) std::this_thread::yield();
  }
  std::this_thread::sleep_for(milliseconds(20));
  for (Visit& visit : visits) assert(!visit.left);
  slow.Open();
  for (Visit& visit : visits) {
    visit.Wait();
    assert(visit.ran && visit.error.empty() && !visit.copied);
  }
}

void OneErrorFailsAllMembers() {
  for (int failing = 0; failing < 4; ++failing) {
    auto team = MakeTeam(TeamMode::kEach, 4);
    Visit visits[4];
    ComeAll(team, 1, visits, 4, [failing](int device) {
      return device == failing ? std::string("shard") : std::string();
    });
    for (Visit& visit : visits) {
      visit.Wait();
      assert(visit.error == "shard" && !visit.alone);
    }
    // The next call of the same place starts afresh.
    Visit again[4];
    ComeAll(team, 1, again, 4, [](int) { return std::string(); });
    for (Visit& visit : again) {
      visit.Wait();
      assert(visit.error.empty());
    }
  }
}

/// Members that have come are waited for without limit, however short the grace.
void ASlowFunctionIsNotMissing() {
  auto team = MakeTeam(TeamMode::kEach, 3, 0, milliseconds(1));
  Visit visits[3];
  Barrier barrier(3);
  ComeAll(team, 1, visits, 3, [&barrier](int device) {
    barrier.Wait();
    if (device == 1) std::this_thread::sleep_for(milliseconds(60));
    return device == 1 ? std::string("late but here") : std::string();
  });
  for (Visit& visit : visits) {
    visit.Wait();
    assert(visit.error == "late but here");
  }
}

void TheOthersWaitForALateMember() {
  auto team = MakeTeam(TeamMode::kEach, 3);
  Visit visits[3];
  ComeAll(team, 1, visits, 2, [](int) { return std::string(); });
  for (int device = 0; device < 2; ++device) {
    while (!visits[device].ended) std::this_thread::yield();
  }
  std::this_thread::sleep_for(milliseconds(20));
  assert(!visits[0].left && !visits[1].left);
  visits[2].Come(team, 1, 2, [] { return std::string("last"); });
  for (Visit& visit : visits) {
    visit.Wait();
    assert(visit.error == "last");
  }
}

void AMissingMemberEndsTheWaiting() {
  auto team = MakeTeam(TeamMode::kEach, 3, 0, milliseconds(30));
  Visit visits[3];
  ComeAll(team, 1, visits, 2, [](int device) {
    return device == 0 ? std::string("own") : std::string();
  });
  visits[0].Wait();
  visits[1].Wait();
  assert(visits[0].error == "own");
  assert(visits[1].error.empty());  // nobody knows whether all will come
  assert(visits[0].alone && !visits[1].alone);
  // A member that comes now calls alone, and so do all from now on.
  visits[2].Come(team, 1, 2, [] { return std::string("third"); });
  visits[2].Wait();
  assert(visits[2].error == "third" && visits[2].alone);
  // Errors are no longer shared, even if all members come.
  Visit again[3];
  Gate gate;
  ComeAll(team, 2, again, 3, [&gate](int device) {
    gate.Wait();
    return device == 2 ? std::string("alone") : std::string();
  });
  gate.Open();
  for (int device = 0; device < 3; ++device) {
    again[device].Wait();
    assert(again[device].error == (device == 2 ? "alone" : ""));
    assert(again[device].alone == (device == 2));
  }
}

/// If the others stop waiting during a job, the job ends with its own error.
void DivergenceDuringAJob() {
  auto team = MakeTeam(TeamMode::kEach, 3, 0, milliseconds(10));
  Visit quick, slow;
  Gate gate;
  slow.Come(team, 1, 1, [&gate] {
    gate.Wait();
    return std::string("slow");
  });
  quick.Come(team, 1, 0, [] { return std::string(); });
  quick.Wait();
  assert(quick.error.empty() && !slow.left);
  gate.Open();
  slow.Wait();
  assert(slow.error == "slow");
}

/// Arrivals just before and after the end of the grace: every member returns, with
/// its own error or the shared one.
void ArrivalsAroundTheGrace() {
  for (uint32_t seed = 0; seed < 60; ++seed) {
    auto team = MakeTeam(TeamMode::kEach, 4, 0, milliseconds(2));
    Visit visits[3][4];
    std::vector<std::thread> threads;
    for (int device = 0; device < 4; ++device) {
      threads.emplace_back([&team, &visits, seed, device] {
        std::mt19937 random(seed * 4 + static_cast<uint32_t>(device));
        for (auto& call : visits) {
          std::this_thread::sleep_for(std::chrono::microseconds(random() % 3000));
          call[device].Come(team, 1, device, [device] {
            return device == 0 ? std::string("zero") : std::string();
          });
          call[device].Wait();
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
    for (auto& call : visits) {
      assert(call[0].error == "zero");
      for (int device = 1; device < 4; ++device) {
        assert(call[device].error.empty() || call[device].error == "zero");
        assert(call[device].left && call[device].ended);
      }
    }
  }
}

}  // namespace

int main() {
  std::vector<int> order = {0, 1, 2, 3};
  do {
    for (int leader = 0; leader < 4; ++leader) TheLeaderCallsForAll(leader, order);
  } while (std::next_permutation(order.begin(), order.end()));
  for (int first = 0; first < 3; ++first) TheFirstLeads(first);
  TheLeaderWaitsUntilAllHaveCopied();
  AllReturnTheLeadersError();
  ManyRuns(TeamMode::kOnce);
  EachCallsAndAllLeaveTogether();
  OneErrorFailsAllMembers();
  ASlowFunctionIsNotMissing();
  TheOthersWaitForALateMember();
  AMissingMemberEndsTheWaiting();
  DivergenceDuringAJob();
  ManyRuns(TeamMode::kEach);
  ArrivalsAroundTheGrace();
  std::puts("team: ok");
}
