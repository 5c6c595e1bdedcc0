#pragma once

#include <string>

namespace tessera::tools {

/// Returns a text that no other job has, for the ranks to tell their job from others.
std::string random_job_token();

/// Returns the text for one start of a job: that of `job` itself at first, another for each
/// restart.
std::string job_token(const std::string& job, int attempt);

}  // namespace tessera::tools
