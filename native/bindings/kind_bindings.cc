// The kinds of equations (plan/kind.h), which Python makes by their settings.
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/vector.h>

#include "bindings/bindings.h"
#include "bindings/keywords.h"
#include "invoke/buffer_kind.h"
#include "invoke/call_kind.h"
#include "invoke/feed_kind.h"
#include "invoke/taps.h"
#include "plan/kind.h"

namespace nb = nanobind;

namespace hostcall {

void InitKinds(nb::module_& m) {
  nb::class_<Kind>(m, "Kind");
  BindEnum<Lend>(m, "Lend", {"COPY", "ARGS", "OUT"});
  BindStruct<Kind>(m,
                   Keywords<CallKind>("CallKind").Field<&CallKind::lend>("lend"));
  BindEnum<WhenFull>(m, "WhenFull", {"BLOCK", "DROP_NEWEST", "DROP_OLDEST"});
  BindStruct<Kind>(m, Keywords<TapKind>("TapKind")
                          .Field<&TapKind::when_full>("when_full")
                          .Field<&TapKind::nested>("nested")
                          .Field<&TapKind::only>("only")
                          .Field<&TapKind::linked>("linked")
                          .Field<&TapKind::through>("through")
                          .Field<&TapKind::every_steps>("every_steps")
                          .Field<&TapKind::every_ns>("every_ns")
                          .Field<&TapKind::sample>("sample")
                          .Field<&TapKind::always>("always")
                          .Field<&TapKind::batch>("batch"));
  BindStruct<Kind>(m, Keywords<FeedKind>("FeedKind")
                          .Field<&FeedKind::ring>("ring")
                          .Field<&FeedKind::devices>("devices"));
  BindStruct<Kind>(m, Keywords<BufferKind>("BufferKind")
                          .Field<&BufferKind::aliases>("aliases")
                          .Field<&BufferKind::debug>("debug")
                          .Field<&BufferKind::address>("address")
                          .Field<&BufferKind::status>("status"));
}

}  // namespace hostcall
