#include "planner/command/memory_arguments.h"

#include <c10/util/Exception.h>
#include <fmt/format.h>
#include <tessera/planner/traced_moments.h>

#include <charconv>
#include <filesystem>
#include <sstream>

#include "planner/command/quantity.h"

namespace tessera::tools {
namespace {

constexpr int kMostRanks = 1 << 20;

int rank_count(const std::string& text) {
  int count = 0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), count);
  TORCH_CHECK_VALUE(
      error == std::errc() && end == text.data() + text.size() && count >= 1 && count <= kMostRanks,
      "--table must be followed by numbers of ranks such as 4,8,16, or by nothing and stand behind "
      "FILE; got '",
      text, "'");
  return count;
}

}  // namespace

void MemoryArguments::add_to(CLI::App& plan) {
  const auto size = [&](const char* name, auto& value, const char* text) {
    return add_quantity(plan, name, value, bytes_of, "SIZE", text);
  };
  size("--memory", limits_.device, "That each rank has, such as 24GB or 80GiB: does the job fit?");
  size("--host-memory", limits_.host, "That each host has, for its --ranks-per-host");
  plan.add_option("--device", device_,
                  "Ranks compute on a gpu each (default), or on the cpu of their host")
      ->check(CLI::IsMember(std::vector<std::string>{"gpu", "cpu"}))
      ->type_name("");
  auto* given = size("--activations", activations_, "Of a rank, at their peak");
  auto* traced = plan.add_option("--traced", traced_,
                                 "Activations over time: a file of write_traced_steps(), of steps "
                                 "of the same model with few rows")
                     ->type_name("PATH")
                     ->excludes(given);
  auto* rows = plan.add_option("--rows", rows_, "Of a rank's batch, for --traced")
                   ->type_name("N")
                   ->needs(traced);
  traced->needs(rows);
  const auto count = [&](const char* name, std::optional<int64_t>& value, const char* text) {
    return plan.add_option(name, value, text)
        ->check(CLI::Range(1, 1 << 30))
        ->type_name("N")
        ->excludes(given)
        ->excludes(traced);
  };
  count("--batch", batch_, "Sequences of a forward on each rank, for a model with a config.json");
  auto* sequence = count("--sequence", sequence_, "Tokens of each; activations are then estimated");
  plan.add_option("--attention", attention_,
                  "fused: in one kernel (default); math: with a matrix of scores for each head")
      ->check(CLI::IsMember(std::vector<std::string>{"fused", "math"}))
      ->type_name("")
      ->needs(sequence);
  plan.add_flag("--checkpoint-activations", checkpoint_,
                "Each block of the model is run again in backward")
      ->needs(sequence);
  plan.add_option("--autocast", autocast_, "Operators compute in this dtype under autocast")
      ->type_name("DTYPE")
      ->needs(sequence);
  table_option_ =
      plan.add_option("--table", table_, "Memory over numbers of ranks: 4,8,16 (default 1 to 1024)")
          ->type_name("[RANKS]")
          ->expected(0, 1);
}

std::vector<int> MemoryArguments::table_ranks() const {
  std::vector<int> ranks;
  if (table_option_->count() == 0) return ranks;
  // Without a value, CLI11 leaves the text empty or a truth value.
  if (table_.empty() || table_ == "true") {
    for (int count = 1; count <= 1024; count *= 2) ranks.push_back(count);
    return ranks;
  }
  std::istringstream text(table_);
  for (std::string part; std::getline(text, part, ',');) ranks.push_back(rank_count(part));
  return ranks;
}

void MemoryArguments::apply(PlanJob& job, const std::string& path) const {
  job.on_cpu = device_ == "cpu";
  job.options.activations = activations_;
  if (!traced_.empty()) job.options.moments = traced_moments(read_traced_steps(traced_), rows_);
  TORCH_CHECK_VALUE(!batch_ || sequence_, "--batch needs --sequence, the tokens of each sequence");
  if (!sequence_) return;
  namespace fs = std::filesystem;
  const bool is_described = !path.empty() && (fs::path(path).extension() == ".json" ||
                                              fs::exists(fs::path(path) / "config.json"));
  TORCH_CHECK_VALUE(is_described,
                    "--sequence needs a model with a config.json, from which activations are "
                    "estimated; give --activations in its place");
  job.config = read_transformer_config(path);
  // The description of a model says more than its files of tensors: which tensors are used when.
  job.sizes = parameter_sizes(*job.config);
  job.activations = {.batch = batch_.value_or(1),
                     .sequence = *sequence_,
                     .fused_attention = attention_ == "fused",
                     .checkpoint = checkpoint_};
  if (!autocast_.empty()) job.activations.autocast = parse_dtype(autocast_);
}

}  // namespace tessera::tools
