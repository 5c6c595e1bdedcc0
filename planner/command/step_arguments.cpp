#include "planner/command/step_arguments.h"

#include <c10/util/Exception.h>

#include <string>

#include "planner/command/quantity.h"

namespace tessera::tools {

void StepArguments::add_to(CLI::App& plan) {
  const auto count = [&](const char* name, std::optional<int>& value, const char* description) {
    plan.add_option(name, value, description)->check(CLI::Range(1, 1 << 20))->type_name("N");
  };
  count("--hosts", hosts_, "Hosts that the ranks are on, for the time of a step");
  count("--ranks-per-host", ranks_per_host_, "Ranks on each (default: --ranks / --hosts, or 1)");
  link_ = add_quantity(plan, "--link", options_.link_bandwidth, bandwidth_of, "BANDWIDTH",
                       "Of each host's link, such as 200Mbit, 10Gbit or unlimited");
  compute_ = add_quantity(plan, "--compute", options_.compute_seconds, seconds_of, "SECONDS",
                          "Of forward and backward on one rank alone; predicts the time of a step");
  const auto detail = [&](const char* name, double& value, double (*parse)(const std::string&),
                          const char* type, const char* description) {
    add_quantity(plan, name, value, parse, type, description)->needs(compute_);
  };
  detail("--optimizer-seconds", options_.optimizer_seconds, seconds_of, "SECONDS",
         "Of the optimizer's step for the whole model on one rank (default 0: it is in --compute)");
  detail("--link-latency", options_.link_latency, seconds_of, "SECONDS",
         "Of a message over the link, such as 0.1ms (default 0)");
  detail("--host-link", options_.host_bandwidth, bandwidth_of, "BANDWIDTH",
         "Of a rank in its host's shared memory (default unlimited)");
  detail(
      "--link-processor", options_.processor_seconds_per_byte,
      [](const std::string& text) { return seconds_of(text) / 1e9; }, "SECONDS",
      "Processor time of a rank for each GB that it sends (default 0)");
}

std::optional<StepTimeOptions> StepArguments::options(std::optional<int> ranks) const {
  if (compute_->count() == 0) {
    TORCH_CHECK_VALUE(!hosts_ && link_->count() == 0,
                      "--link and --hosts need --compute, the seconds of forward and backward");
    return std::nullopt;
  }
  StepTimeOptions options = options_;
  options.hosts = hosts_.value_or(1);
  if (ranks_per_host_) {
    options.ranks_per_host = *ranks_per_host_;
  } else if (ranks) {
    TORCH_CHECK_VALUE(*ranks % options.hosts == 0, "--ranks must be a multiple of --hosts; got ",
                      *ranks, " ranks on ", options.hosts, " hosts");
    options.ranks_per_host = *ranks / options.hosts;
  }
  TORCH_CHECK_VALUE(!ranks || int64_t{options.hosts} * options.ranks_per_host == *ranks,
                    "--ranks must be --hosts x --ranks-per-host; got ", *ranks, ", and ",
                    options.hosts, " x ", options.ranks_per_host);
  TORCH_CHECK_VALUE(
      options.hosts == 1 || link_->count() > 0,
      "several hosts need --link, the bandwidth between them (or `--link unlimited`)");
  TORCH_CHECK_VALUE(
      options.hosts > 1 || (link_->count() == 0 && options.link_latency == 0 &&
                            options.processor_seconds_per_byte == 0),
      "--link, --link-latency and --link-processor need several hosts: one host has no link");
  TORCH_CHECK_VALUE(options.ranks_per_host > 1 || options.host_bandwidth == 0,
                    "--host-link needs several ranks on each host: one alone shares no memory");
  return options;
}

int StepArguments::ranks_per_host(int ranks) const {
  return ranks_per_host_.value_or(ranks / hosts_.value_or(1));
}

}  // namespace tessera::tools
