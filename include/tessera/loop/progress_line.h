#pragma once

#include <tessera/export.h>

#include <chrono>
#include <cstdint>
#include <cstdio>
#include <memory>
#include <string_view>

namespace tessera {

struct ProgressLineOptions {
  std::FILE* out = stdout;  ///< must outlive the object
  /// Least time between two lines where `out` is no terminal.
  std::chrono::milliseconds every = std::chrono::seconds(10);
};

/// Shows how far a run is, and when it will end, in one line of at most 80 columns:
///
///     step 120/400 30%  loss 2.131  held-out 2.254  3.2 steps/s  1 min 27 s left
///
///     ProgressLine progress(400);
///     for (int step = 1; step <= 400; ++step) {
///       ...
///       progress.show(step, fmt::format("loss {:.3f}", loss));
///     }
///
/// On a terminal, each line takes the place of the one before. Elsewhere (a file, or the pipe of
/// `tessera run`), a line is printed every `options.every` and for the last step. Only rank 0 of
/// this thread's default world prints. The time left is estimated from the steps that this object
/// has seen, but for the first: it often takes longer. Not collective.
class TESSERA_API ProgressLine {
 public:
  /// `steps`: of the whole run, those before a resume included. Throws `c10::ValueError` if
  /// negative.
  explicit ProgressLine(int64_t steps, const ProgressLineOptions& options = {});
  /// Ends the line.
  ~ProgressLine();
  ProgressLine(ProgressLine&&) noexcept;
  ProgressLine& operator=(ProgressLine&&) noexcept;

  /// Call it after each step, with the number of steps taken. `text` is cut where it does not fit.
  void show(int64_t step, std::string_view text = {});

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;  // null on other ranks than 0
};

}  // namespace tessera
