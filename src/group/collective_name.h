#pragma once

#include <tessera/process_group.h>

#include <chrono>
#include <cstdint>
#include <exception>
#include <string>

#include "memory/process_mark.h"

namespace tessera {

/// What errors call a collective.
struct CollectiveName {
  std::string collective;  ///< all_gather, reduce_scatter, ...
  std::string subject;     ///< copied from the tag, which need not outlive the call that is late
  Channel channel = Channel::kControl;
  int64_t sequence = 0;  ///< how many collectives this channel had before
  int rank = 0;
  int size = 1;

  /// "[all_gather] unit 'blocks.3' (channel kParams, #17): rank 1 of 2"
  std::string describe() const;
};

/// Throws `c10::DistBackendError`: this rank waited `waited` for `whom`. `cause` is what the
/// backend threw, or null when it did not answer at all.
[[noreturn]] void throw_wait_failed(const CollectiveName& name, const std::string& whom,
                                    std::chrono::duration<double> waited,
                                    std::chrono::milliseconds timeout, std::exception_ptr cause);

/// The message where `rank` came to place `sequence` of a channel with `theirs`, this rank with
/// `own` (of `CollectiveForm::text()`).
std::string differing_order(const CollectiveName& name, int64_t sequence, const std::string& own,
                            int rank, const std::string& theirs);

/// Throws `c10::DistBackendError` in a child that was forked after `mark` was made: it has its
/// parent's connections, but no thread that serves them, and no place among the ranks.
void check_process(const ProcessMark& mark, const CollectiveName& name);

/// The text of an exception, without LibTorch's stack trace.
std::string exception_text(const std::exception_ptr& exception);

}  // namespace tessera
