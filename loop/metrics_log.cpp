#include <c10/util/Exception.h>
#include <tessera/comm/world.h>
#include <tessera/loop/metrics_log.h>

#include <chrono>
#include <system_error>

#include "loop/csv_file.h"
#include "loop/event_file.h"

namespace tessera {

struct MetricsLog::Impl {
  Impl(const std::filesystem::path& directory, const MetricsLogOptions& options) {
    std::error_code error;
    std::filesystem::create_directories(directory, error);
    TORCH_CHECK_VALUE(!error, "[MetricsLog] could not make the directory '", directory.string(),
                      "': ", error.message());
    if (options.csv) csv.emplace(directory / "metrics.csv", options.first_step);
    if (options.tensorboard) events.emplace(directory, options.first_step.value_or(-1));
  }

  std::optional<CsvFile> csv;
  std::optional<EventFile> events;
};

MetricsLog::MetricsLog(const std::filesystem::path& directory, const MetricsLogOptions& options) {
  TORCH_CHECK_VALUE(options.csv || options.tensorboard,
                    "[MetricsLog] options.csv or options.tensorboard must be true");
  TORCH_CHECK_VALUE(options.first_step.value_or(0) >= 0,
                    "[MetricsLog] options.first_step must be 0 or more; got ",
                    options.first_step.value_or(0));
  if (default_process_group()->rank() == 0) impl_ = std::make_unique<Impl>(directory, options);
}

MetricsLog::~MetricsLog() = default;
MetricsLog::MetricsLog(MetricsLog&&) noexcept = default;
MetricsLog& MetricsLog::operator=(MetricsLog&&) noexcept = default;

void MetricsLog::write(int64_t step, const std::map<std::string, double>& values) {
  TORCH_CHECK_VALUE(step >= 0, "[MetricsLog] step must be 0 or more; got ", step);
  for (const auto& [name, value] : values)
    TORCH_CHECK_VALUE(!name.empty() && name.find_first_of("\r\n") == std::string::npos,
                      "[MetricsLog] names must be text of one line; got '", name, "'");
  if (!impl_) return;
  const std::chrono::duration<double> now = std::chrono::system_clock::now().time_since_epoch();
  if (impl_->csv) impl_->csv->write(now.count(), step, values);
  if (impl_->events) impl_->events->write(now.count(), step, values);
}

}  // namespace tessera
