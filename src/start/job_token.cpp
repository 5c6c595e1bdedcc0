#include "start/job_token.h"

#include "group/environment.h"

namespace tessera {

std::string job_token(const RankInfo& info) {
  if (const auto token = environment("TESSERA_JOB")) return *token;
  if (info.source == "torchrun") {
    const auto id = environment("TORCHELASTIC_RUN_ID");  // "none": the user gave none
    return id && *id != "none" ? *id + ":" + std::to_string(info.master_port) : "";
  }
  if (info.source == "srun") {
    const auto job = environment("SLURM_JOB_ID");
    const auto step = environment({"SLURM_STEP_ID", "SLURM_STEPID"});
    return job && step ? *job + "." + *step : "";
  }
  if (info.source == "mpirun")
    return environment({"OMPI_MCA_ess_base_jobid", "PMIX_NAMESPACE"}).value_or("");
  return "";
}

}  // namespace tessera
