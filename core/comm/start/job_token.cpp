#include "comm/start/job_token.h"

#include <string_view>

#include "comm/group/environment.h"

namespace tessera {
namespace {

constexpr std::string_view kAllocation = "allocation ";

// Not the step: a script may start each rank by an srun of its own.
std::string allocation() {
  for (const char* const name : {"SLURM_JOB_ID", "OMPI_MCA_ess_base_jobid", "PMIX_NAMESPACE"})
    if (const auto value = environment(name)) return std::string(kAllocation) + name + "=" + *value;
  return "";
}

}  // namespace

std::string job_token(const RankInfo& info) {
  if (const auto token = environment("TESSERA_JOB")) return *token;
  if (info.source == "torchrun") {
    const auto id = environment("TORCHELASTIC_RUN_ID");  // "none": the user gave none
    if (id && *id != "none") return *id + ":" + std::to_string(info.master_port);
  }
  if (info.source == "srun") {
    const auto job = environment("SLURM_JOB_ID");
    const auto step = environment({"SLURM_STEP_ID", "SLURM_STEPID"});
    return job && step ? *job + "." + *step : "";
  }
  if (info.source == "mpirun")
    return environment({"OMPI_MCA_ess_base_jobid", "PMIX_NAMESPACE"}).value_or("");
  return allocation();
}

bool may_be_one_job(const std::string& a, const std::string& b) {
  const auto says_little = [](const std::string& token) {
    return token.empty() || token.starts_with(kAllocation);
  };
  if (a == b || !says_little(a) || !says_little(b)) return a == b;
  const size_t end = a.find('=');
  return a.empty() || b.empty() || a.substr(0, end) != b.substr(0, b.find('='));
}

}  // namespace tessera
