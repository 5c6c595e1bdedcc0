#include "run_nodes.h"

#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdlib>
#include <sstream>
#include <stdexcept>
#include <tuple>
#include <utility>

namespace tessera::tools {
namespace {

/// That of torchrun, too.
constexpr int kDefaultMasterPort = 29500;
constexpr const char* kGroup = "Several hosts";

void require(bool holds, const std::string& option, const std::string& reason) {
  if (!holds) throw CLI::ValidationError(option, reason);
}

std::vector<int> numbers_of(const std::string& list) {
  std::vector<int> numbers;
  std::istringstream items(list);
  for (std::string item; std::getline(items, item, ',');) {
    int number = 0;
    require(CLI::detail::lexical_cast(item, number) && number >= 1 && number <= 65536,
            "--node-ranks", fmt::format("expected numbers from 1 to 65536, got '{}'", list));
    numbers.push_back(number);
  }
  return numbers;
}

/// Returns the number of this node from the variables of those that start one program a node; -1:
/// there is none.
int node_rank_of_environment() {
  for (const char* name :
       {"OMPI_COMM_WORLD_RANK", "PMIX_RANK", "SLURM_PROCID", "JOB_COMPLETION_INDEX"}) {
    const char* const text = std::getenv(name);
    int number = 0;
    if (text && CLI::detail::lexical_cast(std::string(text), number) && number >= 0) return number;
  }
  return -1;
}

/// Runs `read`, and passes the reason of a text that it refuses on as that of `option`.
template <class Read>
auto value_of(const char* option, Read read) {
  try {
    return read();
  } catch (const std::invalid_argument& error) {
    throw CLI::ValidationError(option, error.what());
  }
}

/// Returns the address of --master, and the port that it or --master-port names; 0: none does.
std::pair<std::string, int> master_of(const NodeArguments& arguments, const LaunchOptions& launch) {
  const auto [master, port] =
      value_of("--master", [&] { return parse_master(arguments.master, 0); });
  require(port == 0 || launch.master_port == 0, "--master-port",
          "--master names a port, too; expected one of them");
  return {master, std::max(port, launch.master_port)};
}

std::vector<int> ranks_of_nodes(const NodeArguments& arguments, const LaunchOptions& launch) {
  if (arguments.node_ranks.empty()) {
    // Their default, the number of cores, may differ between the nodes.
    require(launch.ranks > 0, "--nodes", "expected -n, the number of ranks on each node");
    return std::vector<int>(arguments.nodes, launch.ranks);
  }
  require(launch.ranks == 0, "--node-ranks", "it stands in place of -n; expected one of them");
  std::vector<int> ranks = numbers_of(arguments.node_ranks);
  require(
      static_cast<int>(ranks.size()) == arguments.nodes, "--node-ranks",
      fmt::format("expected a number for each of {} nodes, got {}", arguments.nodes, ranks.size()));
  return ranks;
}

/// An empty text would count as an option that was not given.
std::string not_empty(const std::string& text) { return text.empty() ? "expected a text" : ""; }

void refuse_without_nodes(const NodeArguments& arguments) {
  require(arguments.node_rank < 0, "--node-rank", "expected --nodes, too");
  require(arguments.node_ranks.empty(), "--node-ranks", "expected --nodes, too");
  require(arguments.master.empty(), "--master",
          "a job on one machine is on 127.0.0.1; expected --nodes or --hosts, too");
  require(arguments.job.empty(), "--job",
          "a job on one machine gets a text of its own; expected --nodes, too");
}

void refuse_without_hosts(const NodeArguments& arguments) {
  require(arguments.ssh.empty(), "--ssh", "no host is connected; expected --hosts, too");
  require(arguments.environment_names.empty(), "--env",
          "ranks of this machine get all variables; expected --hosts, too");
}

void refuse_with_hosts(const NodeArguments& arguments) {
  constexpr const char* kReason =
      "--hosts starts the launchers of all nodes, and numbers them itself; expected one of both";
  require(arguments.nodes == 0, "--nodes", kReason);
  require(arguments.node_rank < 0, "--node-rank", kReason);
  require(arguments.node_ranks.empty(), "--node-ranks", kReason);
  require(arguments.job.empty(), "--job", kReason);
}

}  // namespace

void add_node_options(CLI::App& run, NodeArguments& arguments) {
  const auto add = [&](const char* name, auto& value, const char* help, const char* type) {
    return run.add_option(name, value, help)->type_name(type)->group(kGroup)->check(not_empty);
  };
  add("--hosts", arguments.hosts,
      "Start the ranks on these hosts, so many on each: mpirun starts this launcher there",
      "HOST:RANKS,...");
  add("--ssh", arguments.ssh,
      "Program that mpirun starts in place of ssh; host and command line are added", "COMMAND");
  add("--env", arguments.environment_names,
      "Pass this variable on to the hosts, besides TESSERA_* and OMP_NUM_THREADS; repeatable",
      "NAME[=VALUE]")
      ->multi_option_policy(CLI::MultiOptionPolicy::TakeAll)
      ->allow_extra_args(false);
  add("--nodes", arguments.nodes,
      "This launcher is one of N, each started by hand or a scheduler with the same options", "N")
      ->check(CLI::Range(1, 65536));
  add("--node-rank", arguments.node_rank, "The number of this launcher, from 0", "K")
      ->check(CLI::Range(0, 65535));
  add("--master", arguments.master,
      "Address of node 0 or of the first host, and the port of rank 0 (default 29500)",
      "HOST[:PORT]");
  add("--node-ranks", arguments.node_ranks, "Ranks of each node where they differ, in place of -n",
      "N,...");
  add("--job", arguments.job,
      "A text by which the ranks know their job (default: HOST:PORT of --master)", "TEXT");
}

std::optional<NodePlace> node_place(NodeArguments arguments, const LaunchOptions& launch) {
  if (!arguments.hosts.empty()) return std::nullopt;
  refuse_without_hosts(arguments);
  if (arguments.nodes == 0) {
    refuse_without_nodes(arguments);
    return std::nullopt;
  }
  require(!arguments.master.empty(), "--nodes", "expected --master, the address of node 0");
  if (arguments.node_rank < 0) arguments.node_rank = node_rank_of_environment();
  require(arguments.node_rank >= 0, "--nodes",
          "expected --node-rank, the number of this node, or a variable of mpirun, srun or a "
          "Kubernetes job that tells it");
  require(
      arguments.node_rank < arguments.nodes, "--node-rank",
      fmt::format("expected less than --nodes {}, got {}", arguments.nodes, arguments.node_rank));
  NodePlace place{.ranks = ranks_of_nodes(arguments, launch),
                  .node = arguments.node_rank,
                  .job = arguments.job};
  std::tie(place.master, place.port) = master_of(arguments, launch);
  if (place.port == 0) place.port = kDefaultMasterPort;
  return place;
}

std::optional<HostsOptions> hosts_options(const NodeArguments& arguments,
                                          const LaunchOptions& launch) {
  if (arguments.hosts.empty()) return std::nullopt;
  refuse_with_hosts(arguments);
  require(
      launch.interrupt_grace == LaunchOptions().interrupt_grace, "--interrupt-grace",
      "mpirun ends what it started a second after SIGTERM; expected --nodes, by srun or by hand");
  HostsOptions options{.launch = launch};
  options.hosts = value_of("--hosts", [&] { return parse_hosts(arguments.hosts, launch.ranks); });
  options.environment_names = arguments.environment_names;
  options.ssh = arguments.ssh;
  for (const Host& host : options.hosts)
    require(host.name.find_first_of("@:") == std::string::npos, "--hosts",
            fmt::format("mpirun takes names and IPv4 addresses; give the user or the address of {} "
                        "in ~/.ssh/config",
                        host.name));
  if (!arguments.master.empty())
    std::tie(options.master, options.launch.master_port) = master_of(arguments, launch);
  return options;
}

}  // namespace tessera::tools
