#include <c10/util/Exception.h>
#include <fmt/format.h>
#include <tessera/planner/traced_moments.h>

#include <algorithm>
#include <cmath>
#include <iterator>
#include <map>
#include <nlohmann/json.hpp>
#include <utility>

#include "base/files/file.h"
#include "base/files/json_text.h"
#include "base/files/text_file.h"
#include "engine/access/residency.h"
#include "planner/moments_of_samples.h"

namespace tessera {
namespace {

// [Note: From samples to moments]
//
// A sample has the most activations since the sample before it. Where a unit is used, a moment
// begins, which lasts until the next one begins; so it has the most of all samples after the first.
// Where a gradient has been made, the moment ends with it: it is that of the operators which made
// the gradient. The tracer counts a gradient as an activation until the model takes it over, and
// the prediction counts it as a gradient of that moment; so its bytes are subtracted.
//
// The loss, and the first operators of backward, belong to the last moment of forward, and count at
// the first moment of backward again, unless backward begins twice in the events: with the loss,
// and with the first gradient.

constexpr int64_t kMostFileBytes = int64_t{1} << 28;
constexpr int64_t kMostRows = int64_t{1} << 40, kMostTracedBytes = int64_t{1} << 59;

void check_rows(const char* function, int64_t rows) {
  TORCH_CHECK_VALUE(rows >= 1 && rows <= kMostRows, "[", function, "] rows must be from 1 to ",
                    kMostRows, "; got ", rows);
}

struct TracedUnit {
  std::string parameter;
  int64_t gradient_nbytes;
};

// The units by name; each has one parameter.
std::map<std::string, TracedUnit> traced_units(const ShardedState& state) {
  std::map<std::string, TracedUnit> units;
  for (const auto& unit : state.units()) {
    const UnitLayout& layout = unit->layout();
    TORCH_CHECK_VALUE(layout.slots.size() == 1,
                      "[traced_step] each unit must have one parameter, or it is not known which "
                      "one is used when; unit '",
                      layout.name, "' has ", layout.slots.size(),
                      ". Shard the model that is traced with plan.unit_bytes = 0");
    const ParamSlot& slot = layout.slots.front();
    units.emplace(
        layout.name,
        TracedUnit{slot.name(), slot.numel * static_cast<int64_t>(c10::elementSize(layout.dtype))});
  }
  return units;
}

// The samples of the last step that has a forward and a whole backward.
std::vector<MemorySample> last_step(const std::vector<MemorySample>& samples) {
  int64_t begun = -1, last = -1;
  for (const MemorySample& sample : samples) {
    if (sample.event == MemoryEvent::kForwardBegin) begun = sample.step;
    if (sample.event == MemoryEvent::kBackwardEnd && begun == sample.step) last = sample.step;
  }
  std::vector<MemorySample> step;
  std::ranges::copy_if(samples, std::back_inserter(step),
                       [&](const MemorySample& sample) { return sample.step == last; });
  return step;
}

class MomentWriter {
 public:
  // `forward_uses`: of units, in the learned order. The first use in backward may come before the
  // first gradient, which is the first event that tells of backward.
  MomentWriter(const std::map<std::string, TracedUnit>& units, size_t forward_uses)
      : units_(units), forward_uses_(forward_uses) {}

  void add(const MemorySample& sample) {
    const auto found = units_.find(sample.unit);
    const bool is_known = found != units_.end();
    const bool is_made = is_known && sample.event == MemoryEvent::kGradientMade;
    if (!moments_.empty()) take(sample, is_made ? found->second.gradient_nbytes : 0);
    if (sample.event == MemoryEvent::kBackwardBegin) {
      enter_backward();
      if (std::exchange(is_told_, true)) begin("the last layer");
    }
    if (is_made) {
      moments_.back().gradients.push_back(found->second.parameter);
      begin(found->second.parameter);
    } else if (is_known && sample.event == MemoryEvent::kUnitUsed) {
      if (sample.unit != std::exchange(last_used_, sample.unit) && ++uses_ > forward_uses_)
        enter_backward();
      begin(found->second.parameter);
      moments_.back().parameters.push_back(found->second.parameter);
    }
  }

  std::vector<ActivationMoment> moments() && { return std::move(moments_); }

 private:
  void take(const MemorySample& sample, int64_t gradient_nbytes) {
    moments_.back().nbytes =
        std::max({moments_.back().nbytes, sample.bytes.other, sample.peak_other - gradient_nbytes});
  }

  // The operators that make the first gradient have begun in the last moment of forward.
  void enter_backward() {
    if (std::exchange(is_backward_, true)) return;
    const int64_t nbytes = moments_.empty() ? 0 : moments_.back().nbytes;
    begin("the loss");
    moments_.back().nbytes = nbytes;
  }

  void begin(const std::string& subject) {
    moments_.push_back(
        {.name = fmt::format("{} at {}", is_backward_ ? "backward" : "forward", subject),
         .backward = is_backward_});
  }

  const std::map<std::string, TracedUnit>& units_;
  const size_t forward_uses_;
  std::string last_used_;
  size_t uses_ = 0;
  bool is_backward_ = false, is_told_ = false;
  std::vector<ActivationMoment> moments_;
};

ActivationMoment moment_from(const nlohmann::json& value) {
  return {.name = value.at("name").get<std::string>(),
          .backward = value.at("backward").get<bool>(),
          .parameters = value.at("parameters").get<std::vector<std::string>>(),
          .gradients = value.at("gradients").get<std::vector<std::string>>(),
          .nbytes = whole_number(value.at("nbytes"), "'nbytes'", 0, kMostTracedBytes)};
}

TracedStep step_from(const nlohmann::json& value) {
  TracedStep step{.rows = whole_number(value.at("rows"), "'rows'", 1, kMostRows)};
  for (const auto& moment : value.at("moments")) step.moments.push_back(moment_from(moment));
  return step;
}

bool are_alike(const std::vector<ActivationMoment>& a, const std::vector<ActivationMoment>& b) {
  return std::ranges::equal(a, b, [](const ActivationMoment& x, const ActivationMoment& y) {
    return x.name == y.name && x.backward == y.backward && x.parameters == y.parameters &&
           x.gradients == y.gradients;
  });
}

}  // namespace

std::vector<ActivationMoment> moments_of(ShardedState& state,
                                         const std::vector<MemorySample>& samples) {
  const auto units = traced_units(state);
  MomentWriter writer(units, state.residency().order().forward.size());
  for (const MemorySample& sample : last_step(samples)) {
    writer.add(sample);
    if (sample.event == MemoryEvent::kBackwardEnd) break;
  }
  return std::move(writer).moments();
}

TracedStep traced_step(const ShardedModule& module, const MemoryTracer& tracer, int64_t rows) {
  check_rows("traced_step", rows);
  ShardedState& state = *module.state();
  TORCH_CHECK_VALUE(state.mesh().size() == 1,
                    "[traced_step] the model must be on one rank, where nothing is sent while "
                    "activations are measured; it is on ",
                    state.mesh().size());
  TORCH_CHECK_VALUE(tracer.knows_other(),
                    "[traced_step] activations are not known: the process has a CPU allocator of "
                    "its own, or the device's allocator keeps no statistics");
  TracedStep step{.rows = rows, .moments = moments_of(state, tracer.samples())};
  TORCH_CHECK_VALUE(
      !step.moments.empty(),
      "[traced_step] the tracer has recorded no step with a forward and a backward of this model");
  return step;
}

std::vector<ActivationMoment> traced_moments(const std::vector<TracedStep>& steps, int64_t rows) {
  check_rows("traced_moments", rows);
  TORCH_CHECK_VALUE(steps.size() == 1 || steps.size() == 2,
                    "[traced_moments] one step or two are expected; got ", steps.size());
  for (const TracedStep& step : steps) check_rows("traced_moments", step.rows);
  // No rows, no bytes.
  TracedStep nothing{.rows = 0, .moments = steps.front().moments};
  for (ActivationMoment& moment : nothing.moments) moment.nbytes = 0;
  const TracedStep& one = steps.size() == 1 ? nothing : steps.front();
  const TracedStep& other = steps.back();
  TORCH_CHECK_VALUE(one.rows != other.rows,
                    "[traced_moments] two steps must differ in rows; both have ", one.rows);
  TORCH_CHECK_VALUE(are_alike(one.moments, other.moments),
                    "[traced_moments] two steps must use the same parameters in the same order; "
                    "trace the same program twice");
  const double share =
      static_cast<double>(rows - one.rows) / static_cast<double>(other.rows - one.rows);
  std::vector<ActivationMoment> moments = other.moments;
  for (size_t i = 0; i < moments.size(); ++i) {
    const auto from = static_cast<double>(one.moments[i].nbytes);
    const double nbytes = from + share * (static_cast<double>(moments[i].nbytes) - from);
    moments[i].nbytes =
        std::llround(std::clamp(nbytes, 0.0, static_cast<double>(kMostTracedBytes)));
  }
  return moments;
}

void write_traced_steps(const std::string& path, const std::vector<TracedStep>& steps) {
  auto list = nlohmann::json::array();
  for (const TracedStep& step : steps) {
    auto moments = nlohmann::json::array();
    for (const ActivationMoment& moment : step.moments)
      moments.push_back({{"name", moment.name},
                         {"backward", moment.backward},
                         {"parameters", moment.parameters},
                         {"gradients", moment.gradients},
                         {"nbytes", moment.nbytes}});
    list.push_back({{"rows", step.rows}, {"moments", moments}});
  }
  write_text_file("write_traced_steps", path, list.dump() + "\n");
}

std::vector<TracedStep> read_traced_steps(const std::string& path) {
  return naming_file("read_traced_steps", path, "must be a file of write_traced_steps()", [&] {
    const auto list = parse_json(File::open_file(path).read_all(kMostFileBytes));
    TORCH_CHECK_VALUE(list.is_array(), "a list of steps is expected; got ", list.type_name());
    std::vector<TracedStep> steps;
    for (const auto& value : list) steps.push_back(step_from(value));
    return steps;
  });
}

}  // namespace tessera
