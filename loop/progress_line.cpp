#include <c10/util/Exception.h>
#include <fmt/format.h>
#include <tessera/comm/world.h>
#include <tessera/loop/progress_line.h>
#include <unistd.h>

#include <algorithm>
#include <cmath>
#include <optional>
#include <string>

namespace tessera {
namespace {

using Clock = std::chrono::steady_clock;

constexpr size_t kColumns = 80;
// `tessera run` puts the rank before each line: "[0] ".
constexpr size_t kColumnsOfPrefix = 4;

std::string duration_text(double seconds) {
  const auto whole = static_cast<int64_t>(std::ceil(seconds));
  if (whole < 60) return fmt::format("{} s", whole);
  if (whole < 3600) return fmt::format("{} min {} s", whole / 60, whole % 60);
  const int64_t hours = whole / 3600;
  if (hours < 48) return fmt::format("{} h {} min", hours, whole % 3600 / 60);
  return fmt::format("{} d {} h", hours / 24, hours % 24);
}

std::string pace_text(double seconds_per_step) {
  if (seconds_per_step > 1) return fmt::format("{:.1f} s/step", seconds_per_step);
  return fmt::format("{:.1f} steps/s", 1 / seconds_per_step);
}

}  // namespace

struct ProgressLine::Impl {
  int64_t steps;
  ProgressLineOptions options;
  bool is_terminal;
  std::optional<std::pair<int64_t, Clock::time_point>> start;  // the first step that was shown
  std::optional<Clock::time_point> printed;

  std::string line(int64_t step, std::string_view text, Clock::time_point now) {
    const std::string head =
        fmt::format("step {}/{} {}%", step, steps, steps > 0 ? 100 * step / steps : 100);
    std::string tail;
    if (!start) start = {step, now};
    const std::chrono::duration<double> passed = now - start->second;
    if (step > start->first && passed.count() > 0) {
      const double pace = passed.count() / static_cast<double>(step - start->first);
      tail = "  " + pace_text(pace);
      if (step < steps)
        tail += "  " + duration_text(pace * static_cast<double>(steps - step)) + " left";
    }
    const size_t used = head.size() + tail.size() + 2 + (is_terminal ? 1 : kColumnsOfPrefix);
    const size_t room = used < kColumns ? kColumns - used : 0;
    const std::string middle = text.empty() ? "" : "  " + std::string(text.substr(0, room));
    return head + middle + tail;
  }

  void show(int64_t step, std::string_view text) {
    const Clock::time_point now = Clock::now();
    const bool is_due = is_terminal || !printed || step >= steps || now - *printed >= options.every;
    const std::string shown = line(step, text, now);
    if (!is_due) return;
    printed = now;
    std::fputs((is_terminal ? "\r\033[K" + shown : shown + "\n").c_str(), options.out);
    std::fflush(options.out);
  }
};

ProgressLine::ProgressLine(int64_t steps, const ProgressLineOptions& options) {
  TORCH_CHECK_VALUE(steps >= 0, "[ProgressLine] steps must be 0 or more; got ", steps);
  if (default_process_group()->rank() != 0) return;
  const bool is_terminal = ::isatty(::fileno(options.out)) == 1;
  impl_ = std::make_unique<Impl>(Impl{steps, options, is_terminal, std::nullopt, std::nullopt});
}

ProgressLine::~ProgressLine() {
  if (impl_ && impl_->is_terminal && impl_->printed) std::fputs("\n", impl_->options.out);
}
ProgressLine::ProgressLine(ProgressLine&&) noexcept = default;
ProgressLine& ProgressLine::operator=(ProgressLine&&) noexcept = default;

void ProgressLine::show(int64_t step, std::string_view text) {
  if (impl_) impl_->show(step, text);
}

}  // namespace tessera
