#pragma once

#include <tessera/world.h>

#include <string>

namespace tessera {

/// Returns a text that all ranks of a job have from their launcher, and no other job has:
/// TESSERA_JOB (`tessera run` sets it), else torchrun's run id with the port, or the job id of srun
/// or mpirun. Empty if the launcher gives none.
std::string job_token(const RankInfo& info);

}  // namespace tessera
