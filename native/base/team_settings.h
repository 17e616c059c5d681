// How the devices of a program make one call: what a plan says about it, apart from
// the meeting itself (base/team.h).
#pragma once

#include <optional>

namespace hostcall {

/// The two ways are told at the head of base/team.h.
enum class TeamMode { kOnce, kEach };

struct TeamSettings {
  TeamMode mode = TeamMode::kOnce;
  int size = 1;  ///< devices of this process that come to the call
  /// kOnce: ordinal of the device that calls. Null: whichever comes first, for a
  /// program that does not know its devices.
  std::optional<int> leader;
};

}  // namespace hostcall
