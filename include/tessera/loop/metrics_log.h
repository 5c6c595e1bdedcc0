#pragma once

#include <tessera/export.h>

#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <string>

namespace tessera {

struct MetricsLogOptions {
  bool csv = true;          ///< writes `metrics.csv`
  bool tensorboard = true;  ///< writes an event file for TensorBoard

  /// For a run that was resumed: the first step that it will log. Rows of `metrics.csv` of this and
  /// later steps are removed, as they will be written again, and TensorBoard drops its points of
  /// these steps. None: rows are added to those that exist.
  std::optional<int64_t> first_step = std::nullopt;
};

/// Logs numbers of a training run, by step and name, for spreadsheets and for TensorBoard.
///
///     MetricsLog log("runs/one");
///     log.write(step, {{"loss", loss}, {"lr", lr}});
///
/// Only rank 0 of this thread's default world writes; on the others, the calls do nothing. No
/// member is collective, so `values` need be right on rank 0 alone: see `mean_over_ranks()`.
///
/// `metrics.csv` has the columns `step`, `wall_time` (seconds since 1970) and one per name. A name
/// that comes later gets a column then, for which the file is written anew; earlier rows are empty
/// there. The event file has the format of TensorBoard's summaries (TFRecord frames of `Event`
/// messages, each value a scalar): `tensorboard --logdir runs` shows all runs below `runs`. A call
/// returns when its lines are handed to the operating system.
///
/// Throws `c10::ValueError` on rank 0 if the directory can't be made, or if an existing
/// `metrics.csv` is not one of these files, and `c10::Error` if a line can't be written.
class TESSERA_API MetricsLog {
 public:
  explicit MetricsLog(const std::filesystem::path& directory,
                      const MetricsLogOptions& options = {});
  ~MetricsLog();
  MetricsLog(MetricsLog&&) noexcept;
  MetricsLog& operator=(MetricsLog&&) noexcept;

  /// Adds one row. Names must be text of one line, and not empty.
  void write(int64_t step, const std::map<std::string, double>& values);

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;  // null on other ranks than 0
};

}  // namespace tessera
