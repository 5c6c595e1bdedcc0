#pragma once

#include <tessera/comm/world.h>

#include <string>

namespace tessera {

/// Returns a text that all ranks of a job have from their launcher, and no other job has:
/// TESSERA_JOB (`tessera run` sets it), else torchrun's run id with the port, or the job id of srun
/// or mpirun. For ranks that were started by hand, the allocation that they are in; empty without.
std::string job_token(const RankInfo& info);

/// Whether ranks with these tokens may be of one job. Ranks that were started by hand may be in no
/// allocation, or know it by another variable.
bool may_be_one_job(const std::string& a, const std::string& b);

}  // namespace tessera
