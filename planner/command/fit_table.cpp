#include "planner/command/fit_table.h"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>

#include "command/command_line.h"
#include "planner/command/plan_table.h"

namespace tessera::tools {
namespace {

using nlohmann::ordered_json;

std::string size_text(int64_t bytes) { return bytes_text(static_cast<double>(bytes)); }

std::string name_of(at::ScalarType dtype) {
  if (dtype == at::kFloat) return "float32";
  if (dtype == at::kBFloat16) return "bfloat16";
  if (dtype == at::kHalf) return "float16";
  if (dtype == at::kByte) return "8 bits";
  return c10::toString(dtype);
}

at::ScalarType used_dtype(const PlanJob& job) {
  return job.plan.precision.param_dtype.value_or(job.config->dtype);
}

std::string mark_of(bool fits) { return fits ? "*" : " "; }

// The peaks by kind, each summed up as in the rank's report.
constexpr std::pair<const char*, int64_t MemoryBytes::*> kKinds[] = {
    {"  parameters", &MemoryBytes::parameters},
    {"  parameters, gathered for use", &MemoryBytes::gathered},
    {"  gradients, reduced", &MemoryBytes::gradients},
    {"  gradients, whole, on their way", &MemoryBytes::gradients_in_flight},
    {"  optimizer state", &MemoryBytes::optimizer_state},
    {"  master weights", &MemoryBytes::master_weights},
    {"  offloaded", &MemoryBytes::offloaded},
    {"  activations", &MemoryBytes::other}};

const PlannedRank& rank_of(const LevelNeed& need, const PlanJob& job) {
  return job.shares_memory() ? need.shared : need.rank;
}

std::string peak_lines(const FitReport& report, const PlanJob& job) {
  std::string text =
      fmt::format("most memory in a step, on the rank that needs most{}\n",
                  job.shares_memory() ? " (ranks share the memory of their host)" : "");
  for (const auto& [name, member] : kKinds) {
    // On a device, what is offloaded is elsewhere.
    if (member == &MemoryBytes::offloaded && !job.on_cpu) continue;
    text += line_of(name, report.needs, [&, m = member](const LevelNeed& need) {
      return size_text(rank_of(need, job).peak.*m);
    });
  }
  text += line_of("  in all", report.needs,
                  [](const LevelNeed& need) { return size_text(need.device); });
  return text;
}

// The moments of the peaks: one line if all levels have the same.
std::string moment_lines(const FitReport& report, const PlanJob& job) {
  std::vector<std::string> moments;
  for (const LevelNeed& need : report.needs) {
    const std::string& at = rank_of(need, job).peak_at;
    if (at.empty()) return "";
    moments.push_back(at);
  }
  const bool is_one = std::ranges::count(moments, moments.front()) == std::ssize(moments);
  if (is_one) return fmt::format("  reached in: {}\n", moments.front());
  std::string text;
  for (size_t i = 0; i < moments.size(); ++i)
    text += fmt::format("  reached at {} in: {}\n", report.needs[i].level, moments[i]);
  return text;
}

std::string host_lines(const FitReport& report, const PlanJob& job, const MemoryLimits& limits) {
  const bool offloads = job.plan.offload == Offload::kHost;
  if (!limits.host && !offloads && !job.on_cpu) return "";
  std::string text = fmt::format("memory of each host, with {} ranks on it\n", job.hosted());
  if (!job.on_cpu)
    return text + line_of("  offloaded to it", report.needs,
                          [](const LevelNeed& need) { return size_text(need.host); });
  text += line_of("  in all, if ranks send messages", report.needs,
                  [](const LevelNeed& need) { return size_text(need.host_messages); });
  if (job.shares_memory())
    text += line_of("  in all, if they share memory", report.needs,
                    [](const LevelNeed& need) { return size_text(need.host); });
  return text;
}

std::string limits_text(const MemoryLimits& limits) {
  std::vector<std::string> parts;
  if (limits.device) parts.push_back(size_text(*limits.device) + " a rank");
  if (limits.host) parts.push_back(size_text(*limits.host) + " a host");
  return fmt::format("{}", fmt::join(parts, ", "));
}

std::string remedy_lines(const FitReport& report) {
  const auto& remedies = report.remedies;
  const size_t most = remedies.front().options.size();
  const bool helps = std::ranges::any_of(remedies, &Remedy::any_fits);
  std::string text = "\n";
  if (!helps) {
    text += "No change that was tried makes it fit, alone or with others. With each one:\n";
  } else if (most == 1) {
    text += "One change, and the memory then in all (* fits), the cheapest first:\n";
  } else {
    text += fmt::format(
        "{} changes together, and the memory then in all (* fits), the cheapest first:\n", most);
  }
  std::vector<std::string> failing;
  for (size_t i = 0; i < report.needs.size(); ++i)
    if (!report.fits[i]) failing.push_back(report.needs[i].level + " ");
  text += line_of("", failing);
  for (const Remedy& remedy : remedies) {
    const std::string options = fmt::format("  {}", fmt::join(remedy.options, " "));
    std::vector<std::string> cells;
    for (size_t i = 0; i < remedy.needs.size(); ++i)
      cells.push_back(size_text(remedy.needs[i].device) + mark_of(remedy.fits[i]));
    text += options.size() < 34 ? "" : options + "\n";
    text += line_of(options.size() < 34 ? options : "", cells);
    const bool uses_host =
        std::ranges::any_of(remedy.needs, [](const LevelNeed& need) { return need.host > 0; });
    if (uses_host)
      text += line_of("    on each host", remedy.needs,
                      [](const LevelNeed& need) { return size_text(need.host) + " "; });
  }
  return text;
}

// The first level that fits, in the order of levels.
std::string answer(const FitReport& report, const PlanJob& job, const MemoryLimits& limits) {
  const std::string in = limits_text(limits);
  const std::string but = job.knows_activations() ? "" : " (activations are not counted)";
  std::vector<std::string> levels;
  for (size_t i = 0; i < report.needs.size(); ++i)
    if (report.fits[i]) levels.push_back(report.needs[i].level);
  if (!levels.empty())
    return fmt::format("It fits in {} at: {}{}.\n", in, fmt::join(levels, ", "), but);
  for (const Remedy& remedy : report.remedies) {
    for (size_t i = 0; i < remedy.needs.size(); ++i) {
      if (!remedy.fits[i]) continue;
      const LevelNeed& need = remedy.needs[i];
      std::string options = fmt::format("{}", fmt::join(remedy.options, " "));
      if (options.find("--level") == std::string::npos) options += " --level " + need.level;
      return fmt::format("It does not fit in {}{}. It would with\n  {}\nwhich needs {} a rank{}.\n",
                         in, but, options, size_text(need.device),
                         need.host > 0 ? " and " + size_text(need.host) + " a host" : "");
    }
  }
  return fmt::format("It does not fit in {}{}, and no change that was tried makes it fit.\n", in,
                     but);
}

ordered_json need_json(const LevelNeed& need) {
  return {{"level", need.level}, {"device", need.device}, {"host", need.host}};
}

ordered_json need_json(const LevelNeed& need, bool fits) {
  ordered_json json = need_json(need);
  json["fits"] = fits;
  return json;
}

std::string optimizer_assumptions(const PlanJob& job) {
  const auto& precision = job.plan.precision;
  const at::ScalarType made = job.sizes.front().dtype;
  const at::ScalarType used = precision.param_dtype.value_or(made);
  const at::ScalarType updated =
      precision.master_dtype && c10::elementSize(made) < c10::elementSize(*precision.master_dtype)
          ? *precision.master_dtype
          : made;
  std::string text = fmt::format("- Parameters are used in {}. ", name_of(used));
  const auto kept = job.options.state_dtype;
  const std::string state =
      job.options.muon ? "1 tensor of state for each matrix\n  and 2 for each other parameter"
                       : fmt::format("{} tensors of state for each{}{}", job.options.state_tensors,
                                     kept ? ", in " + name_of(*kept) : "",
                                     kept == at::kByte ? " with a float for 256 elements" : "");
  if (updated != used)
    return text + fmt::format("The optimizer updates master weights in {},\n  with {}{}.\n",
                              name_of(updated), state, kept ? "" : ", in that dtype");
  text += fmt::format("The optimizer updates them, with {}.\n", state);
  if (c10::elementSize(used) < c10::elementSize(at::kFloat))
    text += "  There are no master weights; most train with --master-dtype float32.\n";
  return text;
}

int64_t most_activations(const PlanJob& job) {
  int64_t most = job.options.activations;
  for (const ActivationMoment& moment : job.options.moments) most = std::max(most, moment.nbytes);
  return most;
}

std::string activation_assumptions(const PlanJob& job) {
  if (!job.options.moments.empty())
    return fmt::format("- Activations are extrapolated from traced steps: {} at most.\n",
                       size_text(most_activations(job)));
  if (!job.config && job.knows_activations())
    return fmt::format("- Activations have {} at most, and at the same moment as all else.\n",
                       size_text(job.options.activations));
  if (!job.config)
    return "- Activations are not counted: give --batch and --sequence with the model's "
           "config.json,\n"
           "  --traced FILE, or --activations SIZE.\n";
  const ActivationOptions& how = job.activations;
  std::string text = fmt::format("- Activations of {} x {} tokens on each rank, in {}{}.\n",
                                 how.batch, how.sequence, name_of(used_dtype(job)),
                                 how.autocast ? " with autocast to " + name_of(*how.autocast) : "");
  text += how.fused_attention ? "- Attention is one kernel, which keeps no matrix of scores. "
                              : "- Attention keeps a matrix of scores for each head. ";
  text += how.checkpoint ? "Each block runs again in backward.\n" : "No activation checkpoints.\n";
  return text + "- The loss is computed in float32, while the program holds the logits.\n";
}

}  // namespace

bool FitReport::any_fits() const { return std::ranges::find(fits, true) != fits.end(); }

FitReport fit_report(const PlanJob& job, const std::vector<std::string>& levels,
                     const MemoryLimits& limits) {
  FitReport report;
  std::vector<std::string> failing;
  for (const std::string& level : levels) {
    report.needs.push_back(need_of(job, level));
    report.fits.push_back(limits.hold(report.needs.back()));
    if (!report.fits.back()) failing.push_back(level);
  }
  if (failing.empty()) return report;
  report.remedies = find_remedies(
      job,
      {.levels = failing, .may_raise_level = levels.size() == 1, .may_combine = !report.any_fits()},
      limits);
  return report;
}

std::string fit_table(const FitReport& report, const PlanJob& job, const MemoryLimits& limits) {
  std::string text = limits.any() ? answer(report, job, limits) + "\n" : "";
  text += line_of("", report.needs, &LevelNeed::level);
  text += peak_lines(report, job) + moment_lines(report, job) + host_lines(report, job, limits);
  if (!limits.any()) return text;
  std::vector<std::string> fits;
  for (const bool is_fit : report.fits) fits.emplace_back(is_fit ? "yes" : "no");
  text += line_of("fits", fits);
  if (report.remedies.empty()) return text;
  const bool helps = std::ranges::any_of(report.remedies, &Remedy::any_fits);
  if (report.any_fits() && !helps) return text;
  text += remedy_lines(report);
  return text;
}

ordered_json fit_json(const FitReport& report, const MemoryLimits& limits) {
  ordered_json json;
  json["memory"] = limits.device ? ordered_json(*limits.device) : ordered_json();
  json["host_memory"] = limits.host ? ordered_json(*limits.host) : ordered_json();
  json["fits"] = report.any_fits();
  json["levels"] = ordered_json::array();
  for (size_t i = 0; i < report.needs.size(); ++i) {
    json["levels"].push_back(need_json(report.needs[i], report.fits[i]));
    json["levels"].back()["host_messages"] = report.needs[i].host_messages;
  }
  json["changes"] = ordered_json::array();
  for (const Remedy& remedy : report.remedies) {
    ordered_json levels = ordered_json::array();
    for (size_t i = 0; i < remedy.needs.size(); ++i)
      levels.push_back(need_json(remedy.needs[i], remedy.fits[i]));
    json["changes"].push_back({{"options", remedy.options}, {"levels", levels}});
  }
  return json;
}

RankTable rank_table(const PlanJob& job, const std::vector<std::string>& levels,
                     const std::vector<int>& ranks) {
  RankTable table;
  for (const int count : ranks) {
    PlanJob with = job;
    with.options.ranks = count;
    with.options.rank = 0;
    std::vector<LevelNeed> needs;
    for (const std::string& level : levels) needs.push_back(need_of(with, level));
    table.emplace_back(count, std::move(needs));
  }
  return table;
}

std::string rank_table_text(const RankTable& table, const MemoryLimits& limits) {
  std::string text = "most memory of a rank in a step, by number of ranks";
  if (limits.any()) text += fmt::format(" (* fits in {})", limits_text(limits));
  text += "\n" + line_of("", table.front().second, [&](const LevelNeed& need) {
            return need.level + (limits.any() ? " " : "");
          });
  for (const auto& [ranks, needs] : table)
    text += line_of(fmt::format("  {}", ranks), needs, [&](const LevelNeed& need) {
      return size_text(need.device) + (limits.any() ? mark_of(limits.hold(need)) : "");
    });
  return text;
}

ordered_json rank_table_json(const RankTable& table, const MemoryLimits& limits) {
  ordered_json rows = ordered_json::array();
  for (const auto& [ranks, needs] : table) {
    ordered_json levels = ordered_json::array();
    for (const LevelNeed& need : needs)
      levels.push_back(limits.any() ? need_json(need, limits.hold(need)) : need_json(need));
    rows.push_back({{"ranks", ranks}, {"levels", levels}});
  }
  return rows;
}

std::string memory_assumptions(const PlanJob& job) {
  std::string text =
      "\nassumed for the memory:\n"
      "- A step is zero_grad(), one forward, one backward, and the optimizer's step.\n" +
      optimizer_assumptions(job) + activation_assumptions(job);
  if (!job.on_cpu)
    text +=
        "- Not counted on a device: its context (0.3 to 1 GB), workspaces of its libraries, and "
        "gaps\n"
        "  between blocks. Leave 5 to 10 % free.\n";
  return text + "- 1 GB is 1e9 bytes; 1 GiB is 1.07 GB.\n";
}

ordered_json activations_json(const PlanJob& job) {
  if (!job.options.moments.empty()) return {{"traced", most_activations(job)}};
  if (!job.config) return {{"given", job.options.activations}};
  const ActivationOptions& how = job.activations;
  ordered_json json = {{"model_type", job.config->type},
                       {"batch", how.batch},
                       {"sequence", how.sequence},
                       {"dtype", name_of(used_dtype(job))},
                       {"fused_attention", how.fused_attention},
                       {"checkpoint", how.checkpoint},
                       {"device", job.on_cpu ? "cpu" : "gpu"}};
  json["autocast"] = how.autocast ? ordered_json(name_of(*how.autocast)) : ordered_json();
  return json;
}

}  // namespace tessera::tools
