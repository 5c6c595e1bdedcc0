#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <string_view>
#include <utility>

#include "trace/memory_timeline.h"

namespace tessera {
namespace {

// Sizes of the picture, and of the plot in it.
constexpr double kWidth = 1120, kHeight = 540;
constexpr double kLeft = 84, kTop = 78, kPlotWidth = 800, kPlotHeight = 320;
constexpr double kLabelDistance = 13;  // between unit labels
constexpr size_t kMostLetters = 28;
constexpr int kTicks = 5;

// Distinct in hue and in lightness, on white as on black.
constexpr std::array<const char*, 8> kColors = {"#4477aa", "#2f5578", "#228833", "#8a8a8a",
                                                "#ccbb44", "#ee8844", "#66ccee", "#bb5588"};

constexpr std::string_view kStyle = R"(<style>
svg { background: #ffffff; color: #1a1a1a; }
text { fill: currentColor; font: 12px system-ui, sans-serif; }
.title { font-size: 15px; font-weight: 600; }
.small { font-size: 10px; }
.line { stroke: currentColor; fill: none; }
.grid { stroke: currentColor; opacity: 0.15; }
.most { stroke: currentColor; fill: none; opacity: 0.6; stroke-dasharray: 3 2; }
@media (prefers-color-scheme: dark) { svg { background: #16181c; color: #e8e8e8; } }
</style>
)";

std::string escaped(std::string_view text) {
  std::string result;
  for (const char c : text) {
    result += c == '&'   ? "&amp;"
              : c == '<' ? "&lt;"
              : c == '>' ? "&gt;"
                         : std::string(1, static_cast<unsigned char>(c) < 0x20 ? ' ' : c);
  }
  return result;
}

// Shortens a name to `kMostLetters` letters at most: its beginning and its end.
std::string shortened(const std::string& name) {
  if (name.size() <= kMostLetters) return name;
  constexpr size_t kEnd = kMostLetters / 2;
  return name.substr(0, kMostLetters - kEnd - 3) + "..." + name.substr(name.size() - kEnd);
}

std::string text_at(double x, double y, const std::string& text, const char* attributes = "") {
  return fmt::format("<text x=\"{:.1f}\" y=\"{:.1f}\" {}>{}</text>\n", x, y, attributes,
                     escaped(text));
}

// The distance of ticks: 1, 2 or 5 times a power of ten, times a power of 1024, so that `kTicks` of
// them reach `most`.
int64_t tick_bytes(int64_t most) {
  double unit = 1;
  while (static_cast<double>(most) / kTicks >= 1024 * unit) unit *= 1024;
  const double wanted = static_cast<double>(most) / kTicks / unit;
  for (const double step : {1., 2., 5., 10., 20., 50., 100., 200., 500.}) {
    if (step >= wanted) return static_cast<int64_t>(step * unit);
  }
  return static_cast<int64_t>(1024 * unit);
}

class Picture {
 public:
  explicit Picture(const MemoryTimeline& timeline)
      : timeline_(timeline), samples_(timeline.samples), peak_(*peak_of(samples_)) {
    begin_us_ = samples_.front().time_us;
    length_us_ = std::max<int64_t>(samples_.back().time_us - begin_us_, 1);
    tick_ = tick_bytes(std::max<int64_t>(peak_.peak_total, 1));
    top_ = tick_ * (peak_.peak_total / tick_ + 1);
  }

  std::string draw() {
    text_ = fmt::format(
        "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {0} {1}\" width=\"{0}\" "
        "height=\"{1}\">\n{2}",
        kWidth, kHeight, kStyle);
    draw_title();
    draw_areas();
    draw_axes();
    draw_phases();
    draw_units();
    draw_legend();
    draw_peak();
    return text_ + "</svg>\n";
  }

 private:
  double x(int64_t time_us) const {
    return kLeft +
           kPlotWidth * static_cast<double>(time_us - begin_us_) / static_cast<double>(length_us_);
  }
  double y(int64_t nbytes) const {
    return kTop + kPlotHeight * (1 - static_cast<double>(nbytes) / static_cast<double>(top_));
  }
  static int64_t bytes_of(const MemorySample& sample, size_t kind) {
    return std::max<int64_t>(sample.bytes.*kMemoryKinds[kind].bytes, 0);
  }
  bool has(size_t kind) const {
    return std::any_of(samples_.begin(), samples_.end(),
                       [&](const MemorySample& sample) { return bytes_of(sample, kind) > 0; });
  }

  void draw_title() {
    text_ += text_at(
        kLeft, 24, fmt::format("Memory of rank {}, step {}", timeline_.rank, samples_.back().step),
        "class=\"title\"");
    std::string rest = fmt::format(
        "at most {}, {} of them of the model; {:.1f} ms", readable_bytes(peak_.peak_total),
        readable_bytes(peak_.bytes.model()), 1e-3 * static_cast<double>(length_us_));
    if (!timeline_.knows_other) rest += "; activations are not known";
    text_ += text_at(kLeft, 42, rest);
  }

  // Returns the points of the upper edge of the first `kinds` kinds, from left to right. The edge
  // keeps each value until the next sample.
  std::vector<std::pair<double, double>> edge_of(size_t kinds) const {
    std::vector<std::pair<double, double>> points;
    for (const MemorySample& sample : samples_) {
      int64_t sum = 0;
      for (size_t i = 0; i < kinds; ++i) sum += bytes_of(sample, i);
      const double at = x(sample.time_us);
      if (!points.empty()) points.emplace_back(at, points.back().second);
      points.emplace_back(at, y(sum));
    }
    return points;
  }

  static std::string path(const std::vector<std::pair<double, double>>& points) {
    std::string text;
    for (const auto& [at, height] : points)
      text += fmt::format("{}{:.1f} {:.1f}", text.empty() ? "M" : " L", at, height);
    return text;
  }

  void draw_areas() {
    for (size_t kind = 0; kind < kMemoryKinds.size(); ++kind) {
      if (!has(kind)) continue;
      auto points = edge_of(kind + 1);
      const auto below = edge_of(kind);
      points.insert(points.end(), below.rbegin(), below.rend());
      text_ += fmt::format("<path d=\"{} Z\" fill=\"{}\"><title>{}</title></path>\n", path(points),
                           kColors[kind], kMemoryKinds[kind].name);
    }
    text_ += fmt::format("<path class=\"most\" d=\"{}\"/>\n", path(most_between()));
  }

  // The peak that a sample records belongs to the time before the sample.
  std::vector<std::pair<double, double>> most_between() const {
    std::vector<std::pair<double, double>> points;
    for (size_t i = 0; i < samples_.size(); ++i) {
      const int64_t before = i > 0 ? samples_[i - 1].bytes.total() : 0;
      const double height = y(std::max<int64_t>({samples_[i].peak_total, before, 0}));
      if (i > 0) points.emplace_back(x(samples_[i - 1].time_us), height);
      points.emplace_back(x(samples_[i].time_us), height);
    }
    return points;
  }

  void draw_axes() {
    for (int64_t nbytes = 0; nbytes <= top_; nbytes += tick_) {
      text_ += fmt::format(
          "<line class=\"grid\" x1=\"{0}\" x2=\"{1}\" y1=\"{2:.1f}\" y2=\"{2:.1f}\"/>\n", kLeft,
          kLeft + kPlotWidth, y(nbytes));
      text_ += text_at(kLeft - 8, y(nbytes) + 4, readable_bytes(nbytes), "text-anchor=\"end\"");
    }
    text_ += fmt::format("<path class=\"line\" d=\"M{0} {1} L{0} {2} L{3} {2}\"/>\n", kLeft, kTop,
                         kTop + kPlotHeight, kLeft + kPlotWidth);
  }

  void draw_phases() {
    for (const MemorySpan& span : spans_of(samples_)) {
      if (!span.unit.empty()) continue;
      const double begin = x(span.begin_us), end = x(span.end_us);
      text_ += fmt::format(
          "<path class=\"line\" d=\"M{0:.1f} {1} L{0:.1f} {2} L{3:.1f} {2} L{3:.1f} {1}\"/>\n",
          begin, kTop - 6, kTop - 12, end);
      if (end - begin > 40)
        text_ += text_at((begin + end) / 2, kTop - 16, span.name, "text-anchor=\"middle\"");
    }
  }

  // Marks where use reaches a unit; where marks are dense, not each is labelled.
  void draw_units() {
    double last = -kLabelDistance;
    const double bottom = kTop + kPlotHeight;
    for (const MemorySample& sample : samples_) {
      if (sample.event != MemoryEvent::kUnitUsed) continue;
      const double at = x(sample.time_us);
      text_ += fmt::format(
          "<line class=\"line\" x1=\"{0:.1f}\" x2=\"{0:.1f}\" y1=\"{1}\" "
          "y2=\"{2}\"><title>{3}</title></line>\n",
          at, bottom, bottom + 4, escaped(sample.unit));
      if (at - last < kLabelDistance) continue;
      last = at;
      text_ += text_at(at, bottom + 12, shortened(sample.unit),
                       fmt::format("class=\"small\" text-anchor=\"end\" transform=\"rotate(-50 "
                                   "{:.1f} {:.1f})\"",
                                   at, bottom + 12)
                           .c_str());
    }
  }

  void draw_legend() {
    const double left = kLeft + kPlotWidth + 24;
    double top = kTop + 4;
    for (size_t i = kMemoryKinds.size(); i-- > 0;) {
      if (!has(i)) continue;
      text_ += fmt::format("<rect x=\"{}\" y=\"{}\" width=\"14\" height=\"14\" fill=\"{}\"/>\n",
                           left, top, kColors[i]);
      text_ += text_at(left + 20, top + 11, kMemoryKinds[i].name);
      top += 22;
    }
    text_ += fmt::format("<line class=\"most\" x1=\"{0}\" x2=\"{1}\" y1=\"{2}\" y2=\"{2}\"/>\n",
                         left, left + 14, top + 7);
    text_ += text_at(left + 20, top + 11, "most in between");
  }

  // The label goes beside the point, on the side where there is room.
  void draw_peak() {
    const double at = x(peak_.time_us), height = y(peak_.peak_total);
    const bool is_left = at < kLeft + kPlotWidth / 2;
    text_ += fmt::format(
        "<circle cx=\"{:.1f}\" cy=\"{:.1f}\" r=\"4\" fill=\"none\" class=\"line\"/>\n", at, height);
    const std::string cause =
        fmt::format("peak: {}{}{}", memory_event_name(peak_.event),
                    peak_.unit.empty() ? "" : ", unit ", shortened(peak_.unit));
    text_ += text_at(at + (is_left ? 8 : -8), height - 6, cause,
                     is_left ? "text-anchor=\"start\"" : "text-anchor=\"end\"");
  }

  const MemoryTimeline& timeline_;
  const std::vector<MemorySample>& samples_;
  const MemorySample& peak_;
  int64_t begin_us_ = 0, length_us_ = 1, tick_ = 1, top_ = 1;
  std::string text_;
};

}  // namespace

std::string memory_svg(const MemoryTimeline& timeline) {
  if (timeline.samples.empty()) {
    return "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 200 40\"><text x=\"8\" "
           "y=\"24\">no samples</text></svg>\n";
  }
  return Picture(timeline).draw();
}

}  // namespace tessera
