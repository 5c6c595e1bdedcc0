#pragma once

#include <string>

namespace tessera::tools {

/// Returns 128 random bits as a text: one that no other job has, by which ranks tell theirs from
/// others, or one that nobody else knows.
std::string random_job_token();

/// Returns the text for one start of a job: that of `job` itself at first, another for each
/// restart.
std::string job_token(const std::string& job, int attempt);

}  // namespace tessera::tools
