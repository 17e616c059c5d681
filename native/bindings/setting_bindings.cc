#include "bindings/setting_bindings.h"

#include <nanobind/stl/optional.h>
#include <nanobind/stl/vector.h>

#include "base/team_settings.h"
#include "bindings/keywords.h"
#include "plan/plan.h"

namespace nb = nanobind;

namespace hostcall {

void InitSettings(nb::module_& m) {
  nb::enum_<Lend>(m, "Lend")
      .value("COPY", Lend::kCopy)
      .value("ARGS", Lend::kArgs)
      .value("OUT", Lend::kOut)
      .value("BUFFERS", Lend::kBuffers);
  nb::enum_<ResultForm>(m, "ResultForm")
      .value("LEAF", ResultForm::kLeaf)
      .value("TUPLE", ResultForm::kTuple)
      .value("NOTHING", ResultForm::kNothing)
      .value("TREE", ResultForm::kTree)
      .value("IGNORED", ResultForm::kIgnored);
  nb::enum_<Inside>(m, "Inside")
      .value("NEVER", Inside::kNever)
      .value("ASKED", Inside::kAsked)
      .value("XLAS_THREADS", Inside::kXlasThreads)
      .value("EVERYWHERE", Inside::kEverywhere);
  nb::enum_<TeamMode>(m, "TeamMode")
      .value("ONCE", TeamMode::kOnce)
      .value("EACH", TeamMode::kEach);
  BindStruct(m, Keywords<TeamSettings>("TeamSettings")
                    .Field<&TeamSettings::mode>("mode")
                    .Field<&TeamSettings::size>("size")
                    .Field<&TeamSettings::leader>("leader"));
  BindStruct(m, Keywords<BufferSettings>("BufferSettings")
                    .Field<&BufferSettings::aliases>("aliases")
                    .Field<&BufferSettings::debug>("debug")
                    .Field<&BufferSettings::address>("address")
                    .Field<&BufferSettings::status>("status"));
}

}  // namespace hostcall
