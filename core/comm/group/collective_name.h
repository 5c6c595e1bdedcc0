#pragma once

#include <c10/util/Exception.h>
#include <tessera/comm/process_group.h>

#include <array>
#include <atomic>
#include <chrono>
#include <cstdint>
#include <exception>
#include <memory>
#include <string>
#include <string_view>
#include <utility>

#include "base/memory/process_mark.h"
#include "comm/group/collective_watch.h"

namespace tessera {

/// Returns "kParams", ...
std::string_view channel_name(Channel channel);

/// The name of a collective in errors.
struct CollectiveName {
  std::string collective;  ///< all_gather, reduce_scatter, ...
  std::string subject;     ///< a copy: the tag's text may not outlive the call
  Channel channel = Channel::kControl;
  int64_t sequence = 0;  ///< number of earlier collectives in this channel
  int rank = 0;
  int size = 1;
  std::shared_ptr<CollectiveWatch> watch = nullptr;  ///< null: nobody watches
  int64_t record = -1;                               ///< of the watch

  /// Returns, for example, "[all_gather] unit 'blocks.3' (channel kParams, #17): rank 1 of 2".
  std::string describe() const;
};

/// The ranks for which a wait waits.
struct Awaited {
  int rank = -1;  ///< of the process group; -1: several
  std::string text;
  bool has_ended = false;  ///< the process of `rank`, as was seen

  static Awaited one(int rank, bool has_ended = false) {
    return {rank, "rank " + std::to_string(rank), has_ended};
  }
  static Awaited all() { return {-1, "its peers"}; }
};

/// The error of a wait that has failed.
class WaitError : public c10::DistBackendError {
 public:
  WaitError(const std::string& text, WaitCause cause, bool timed_out)
      : c10::DistBackendError({__func__, __FILE__, __LINE__}, text),
        cause_(std::move(cause)),
        timed_out_(timed_out) {}
  const WaitCause& cause() const { return cause_; }
  bool timed_out() const { return timed_out_; }

 private:
  WaitCause cause_;
  bool timed_out_;
};

/// Throws `WaitError`: this rank waited `waited` for `whom`. If the ranks watch each
/// other, it names the rank that caused it. `cause` is the exception that the backend threw, or
/// null if it did not respond at all.
[[noreturn]] void throw_wait_failed(const CollectiveName& name, const Awaited& whom,
                                    std::chrono::duration<double> waited,
                                    std::chrono::milliseconds timeout, std::exception_ptr cause);

/// Throws `WaitError` for a wait that the watch ended.
[[noreturn]] void throw_wait_aborted(const CollectiveName& name, const WaitCause& cause);

/// Throws `WaitError` for a collective in which ranks disagree. `rank`: the other one, in the
/// process group; `how`: in what.
[[noreturn]] void throw_disagreement(const CollectiveName& name, int rank, const std::string& how);

/// What errors say where ranks have issued different collectives.
inline constexpr std::string_view kExpectedCalls =
    "Expected all ranks to make the same collective calls (forward, backward, step, save, "
    "full_state, printing a parameter) in the same order, with equal sizes and dtypes";

/// Returns the error message for position `sequence` of a channel, at which `rank` issued `theirs`
/// and this rank `own` (both from `CollectiveForm::text()`).
std::string differing_order(int64_t sequence, const std::string& own, int rank,
                            const std::string& theirs);

/// Throws `c10::DistBackendError` in a child that was forked after `mark` was made: the child has
/// its parent's connections but no threads that serve them, and it is not a rank.
void check_process(const ProcessMark& mark, const CollectiveName& name);

/// Numbers the collectives of a transport, from 0 in each channel, and reports them to its watch.
class ChannelOrder {
 public:
  /// Returns the name of the next collective of the channel of `tag`. Throws
  /// `c10::DistBackendError` in a forked child.
  CollectiveName next(const ProcessGroup& process_group, const char* collective,
                      const CollectiveTag& tag, const CollectiveForm& form);

  void set_watch(std::shared_ptr<CollectiveWatch> watch) { watch_ = std::move(watch); }
  const std::shared_ptr<CollectiveWatch>& watch() const { return watch_; }

  /// Returns true in a forked child.
  bool is_inherited() const { return mark_.is_inherited(); }

 private:
  const ProcessMark mark_;
  std::array<std::atomic<int64_t>, 3> sequences_{};
  std::shared_ptr<CollectiveWatch> watch_;
};

/// Returns the text of an exception, without LibTorch's stack trace.
std::string exception_text(const std::exception_ptr& exception);

}  // namespace tessera
