// Pipelines of stages whose functions are Python's.
#include <tessera/parallel/pipeline.h>

#include <functional>
#include <map>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "binding.h"

namespace tessera::python {
namespace {

using ActionTuple = std::tuple<char, int64_t, int64_t>;
using ActionLists = std::vector<std::vector<ActionTuple>>;
using StageFunction = std::function<StageTensors(const StageTensors&)>;
using LossFunction = std::function<at::Tensor(const StageTensors&, const StageTensors&)>;

ActionLists actions_of(const PipelineSchedule& schedule) {
  ActionLists result;
  for (const auto& actions : schedule) {
    auto& list = result.emplace_back();
    for (const auto& [part, stage, m] : actions)
      list.emplace_back(static_cast<char>(part), stage, m);
  }
  return result;
}

PipelineSchedule schedule_of(const ActionLists& schedule) {
  PipelineSchedule result;
  for (const auto& actions : schedule) {
    auto& list = result.emplace_back();
    for (const auto& [part, stage, m] : actions)
      list.push_back({static_cast<PipelinePart>(part), stage, m});
  }
  return result;
}

py::dict dict_of(const PipelineCounts& counts) {
  using namespace py::literals;
  return py::dict("ticks"_a = counts.ticks, "busy"_a = counts.busy,
                  "peak_in_flight"_a = counts.peak_in_flight);
}

std::vector<DeviceMesh> mesh_list(const std::vector<const DeviceMesh*>& meshes) {
  std::vector<DeviceMesh> copies;
  for (const DeviceMesh* const mesh : meshes) copies.push_back(*mesh);
  return copies;
}

}  // namespace

void bind_pipeline(py::module_& module) {
  // `kind`: a name that Python has checked.
  module.def("pipeline_schedule", [](const std::string& kind, int64_t places, int64_t micro_batches,
                                     int64_t stages_per_place) {
    if (kind == "gpipe") return actions_of(gpipe_schedule(places, micro_batches));
    if (kind == "1f1b") return actions_of(one_f_one_b_schedule(places, micro_batches));
    if (kind == "zero_bubble") return actions_of(zero_bubble_schedule(places, micro_batches));
    return actions_of(interleaved_schedule(places, stages_per_place, micro_batches));
  });
  module.def("check_schedule", [](const ActionLists& schedule) {
    std::vector<py::dict> counts;
    for (const PipelineCounts& each : check_schedule(schedule_of(schedule)))
      counts.push_back(dict_of(each));
    return counts;
  });
  py::class_<PipelineStage>(module, "PipelineStage")
      .def(py::init([](StageFunction forward, std::optional<ShardedModule> sharded,
                       std::map<std::string, at::Tensor> tied) {
        return PipelineStage{std::move(forward), nullptr, std::move(sharded), std::move(tied)};
      }));
  py::class_<Pipeline>(module, "Pipeline")
      .def(py::init([](std::vector<PipelineStage> stages, const ActionLists& schedule,
                       const std::vector<const DeviceMesh*>& meshes, LossFunction loss) {
        const auto places = mesh_list(meshes);
        PipelineSchedule actions = schedule_of(schedule);
        const Waiting waiting;
        return Pipeline(std::move(stages), std::move(actions), places, {std::move(loss)});
      }))
      .def("step", &Pipeline::step, Waits())
      .def("forward", &Pipeline::forward, Waits())
      .def("counts", [](const Pipeline& pipeline) { return dict_of(pipeline.counts()); });
}

}  // namespace tessera::python
