// What one compiled program knows of one call, made when it is lowered.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "base/guards.h"
#include "base/numpy_api.h"
#include "base/slot_table.h"
#include "base/team_settings.h"
#include "plan/outcome.h"
#include "queue/tap_queue.h"

namespace hostcall {

/// One operand or result, as one row of the batch sees it.
struct Leaf {
  Ref dtype;                          ///< PyArray_Descr of the host's elements
  std::vector<npy_intp> dims;         ///< shape of one row
  int64_t count = 1;                  ///< elements of one row
  int64_t row_bytes = 0;              ///< host bytes of one row
  int bits = 0;                       ///< 1, 2, 4 where XLA packs elements, else 0
  bool is_signed = false;             ///< for packed elements
  int64_t rows = 1;                   ///< rows that lie in the buffer
  std::vector<int64_t> grid_strides;  ///< rows to step an axis; 0: not batched
  Ref convert;                        ///< array -> what the function gets; or null
  Ref fill;                           ///< bytes of a masked row (results); or null

  /// Bytes of the whole buffer as XLA has it.
  size_t buffer_bytes() const {
    const int64_t elements = count * rows;
    return static_cast<size_t>(bits == 0 ? row_bytes * rows
                                         : (elements * bits + 7) / 8);
  }
  PyArray_Descr* descr() const {
    return reinterpret_cast<PyArray_Descr*>(dtype.get());
  }
};

/// How the function's return value falls apart into result leaves.
enum class ResultForm {
  kLeaf,     ///< the value is the one leaf
  kTuple,    ///< a tuple of leaves
  kNothing,  ///< None
  kTree,     ///< anything else: Python's flatten takes it apart
  kIgnored,  ///< a tap's: whatever it is
};

/// Which calls run inside one of XLA's host callbacks (handlers/host_callback.h).
enum class Inside {
  kNever,        ///< none
  kAsked,        ///< on XLA's threads, those of a plan whose scout asked for it
  kXlasThreads,  ///< those on XLA's threads
  kEverywhere,   ///< all
};

/// How arguments reach the function.
enum class Lend {
  kCopy,     ///< arrays that the function owns
  kArgs,     ///< read-only views of XLA's memory
  kOut,      ///< the same, and `out=` views of the results' memory
  kBuffers,  ///< Buffers over both, the results' first (buffer_call.h)
};

/// What calls of one function cost, over all its programs. Written with the GIL
/// held, unless a member says otherwise.
struct Counters {
  int64_t calls = 0;         ///< times the function was entered
  int64_t errors = 0;        ///< programs that it failed
  int64_t bytes_in = 0;      ///< handed to the function
  int64_t bytes_out = 0;     ///< taken from it
  int64_t python_ticks = 0;  ///< attached, in the function and in conversions
  int64_t gil_ticks = 0;     ///< waiting to attach
  // Written without the GIL, hence atomic:
  std::atomic<int64_t> masked{0};  ///< rows that `where` kept from the function
  std::atomic<int64_t> native_calls{0};  ///< calls of native code
  TapCounts taps;                        ///< written by devices
};

/// What a plan knows of a call that works in place on buffers.
struct BufferSettings {
  /// For each result the argument whose memory it shares, or -1.
  std::vector<int> aliases;
  bool debug = false;     ///< poisons outputs, and checks whether inputs changed
  uintptr_t address = 0;  ///< of native code that runs instead of a function
  bool status = false;  ///< the native code returns a number that says how it went

  bool Aliases(size_t result) const {
    return result < aliases.size() && aliases[result] >= 0;
  }
  /// Whether an argument's memory is a result's too.
  bool Shares(size_t arg) const {
    const auto number = static_cast<int>(arg);
    return std::find(aliases.begin(), aliases.end(), number) != aliases.end();
  }
};

/// What makes a plan a tap's: its operands are queued, and the function runs later.
struct TapSettings {
  WhenFull when_full = WhenFull::kBlock;
  bool nested = false;  ///< its program is run by host code: never waits for space
  /// Ordinals of the devices that tap, if several hold the same values; empty: all.
  std::vector<int> only;
  bool linked = false;      ///< has one result, which only says that the tap ran
  bool through = false;     ///< the arguments are results too
  int64_t every_steps = 0;  ///< lets one of so many through; 0: all
  int64_t every_ns = 0;     ///< lets one through in so many nanoseconds; 0: all
  double sample = 1;        ///< lets this share through
};

/// Where a tap's operands lie in an event of the queue.
struct TapLayout {
  std::vector<size_t> offsets;  ///< of each operand, the mask first
  size_t bytes = 0;             ///< of all operands
};

class Plan : public TapOwner {
 public:
  Ref function;   ///< called with one argument a leaf
  Ref runner;     ///< null, or runs all rows: runner(rows, indices) -> results
  Ref flatten;    ///< value -> list of leaves, or raises (wrong structure)
  Ref coerce;     ///< (leaf number, value) -> array of the leaf's dtype and shape
  Ref on_error;   ///< (exception, info, row) -> text of the error XLA gets
  Ref on_escape;  ///< (info, leaf numbers) -> raises: lent views are still held
  Ref on_unwritten;     ///< (info, leaf number) -> raises: `out` was not written
  Ref on_lone_failure;  ///< (ordinal, text): one device failed, the others go on
  Ref on_failure_elsewhere;  ///< (text) -> text of the error: another process
                             ///< failed
  Ref out_tree;        ///< list of result arrays -> the `out` argument; or null
  Ref info;            ///< the Python side's description, for errors and status
  Ref device;          ///< the device that host code finds as its default
  Ref guard;           ///< refuses programs that would wait for this one; or null
  Ref scout;           ///< in its place on XLA's threads, until `asked`; or null
  Ref counters_owner;  ///< Python object that holds *counters
  Counters* counters = nullptr;

  std::vector<Leaf> args;
  std::vector<Leaf> results;
  /// For each argument an array of an earlier call that nobody kept, or null. Of
  /// kBuffers the context, and a Buffer for each result and argument.
  mutable std::vector<Ref> spares;
  std::vector<int64_t> grid;          ///< batch axes, outermost first
  int64_t rows = 1;                   ///< product of grid
  bool masked = false;                ///< the first operand is the mask
  std::vector<int64_t> mask_strides;  ///< as Leaf::grid_strides
  int64_t mask_rows = 1;              ///< bools in the mask's buffer
  ResultForm form = ResultForm::kTree;
  bool literals = true;  ///< Python's numbers may stand for arrays of 32 bits
  Lend lend = Lend::kCopy;
  std::optional<TapSettings> tap;  ///< null: a call
  TapLayout layout;                ///< of a tap
  BufferSettings buffers;          ///< all defaults unless `lend` is kBuffers
  bool packed = false;             ///< some leaf's elements are smaller than a byte
  std::optional<TeamSettings> team;  ///< null: each device calls alone
  Inside inside = Inside::kNever;
  bool elsewhere = false;   ///< another process calls: only asks whether it may run
  bool sends = false;       ///< the runner sends rows to other processes
  bool keeps_mesh = false;  ///< the dispatching thread's meshes are not hidden
  mutable bool asked = false;  ///< the scout asked; guarded by the GIL
  bool tells = false;          ///< one more result says all processes how it went
  mutable Failures failures;   ///< of a plan that tells
  uint64_t signature = 0;      ///< of the avals, checked against the program's
  int64_t bytes_in = 0, bytes_out = 0;  ///< of one row

  /// Operands that XLA passes: the mask, if any, and the arguments.
  size_t operands() const { return args.size() + (masked ? 1 : 0); }
  /// Results that XLA wants: the function's, and the outcome, if any.
  size_t outputs() const { return results.size() + (tells ? 1 : 0); }

  /// Finishes what the fields above imply. Called once, after they are set.
  void Seal();
};

}  // namespace hostcall
