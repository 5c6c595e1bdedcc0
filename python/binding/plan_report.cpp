// The cost of a plan, from sizes alone.
#include <tessera/planner/plan_report.h>

#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "binding.h"
#include "plan.h"

namespace tessera::python {
namespace {

py::dict to_python(const PlannedRank& rank) {
  py::dict result;
  result["rank"] = rank.rank;
  result["memory"] = to_dict(rank.memory);
  result["kept"] = rank.kept();
  result["bytes_sent"] = rank.traffic.bytes_sent();
  return result;
}

// A parameter's names, shape and dtype, and whether it is trained.
using Size = std::tuple<std::vector<std::string>, std::vector<int64_t>, at::ScalarType, bool>;

py::dict report(const std::vector<Size>& sizes, const py::dict& plan, int ranks, int replicas,
                int rank, int state_tensors, const std::optional<at::ScalarType>& state_dtype,
                bool shares_memory) {
  std::vector<ParameterSize> parameters;
  for (const auto& [names, shape, dtype, trainable] : sizes)
    parameters.push_back({names, shape, dtype, trainable});
  const ShardPlan wanted = plan_of(plan);
  PlanReport report;
  {
    const Waiting waiting;  // backward runs, which must not hold Python's lock
    report = plan_report(parameters, wanted,
                         {.ranks = ranks,
                          .replicas = replicas,
                          .rank = rank,
                          .state_tensors = state_tensors,
                          .state_dtype = state_dtype,
                          .shares_memory = shares_memory});
  }
  py::list units;
  for (const PlannedUnit& unit : report.units)
    units.append(py::make_tuple(unit.name, unit.numel, unit.nbytes, unit.trainable));
  py::dict result;
  result["parameters"] = report.parameters;
  result["units"] = units;
  result["rank"] = to_python(report.rank);
  result["fullest"] = to_python(report.fullest);
  result["busiest"] = to_python(report.busiest);
  result["zero_paper_bytes"] = report.zero_paper_bytes;
  return result;
}

}  // namespace

void bind_plan_report(py::module_& module) { module.def("plan_report", &report); }

}  // namespace tessera::python
