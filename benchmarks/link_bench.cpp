#include "benchmarks/link_bench.h"

#include <c10/util/Exception.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <functional>
#include <future>
#include <memory>
#include <thread>

#include "benchmarks/worker_process.h"
#include "launcher/environment.h"

namespace tessera::tools {
namespace {

using nlohmann::json;

constexpr int kLinkWarmupSteps = 2;
constexpr std::chrono::seconds kLongestLinkTurn(1800);
constexpr int kFirstPort = 29500;  // the hosts are new: all ports are free
constexpr std::chrono::milliseconds kQuietTime(100);
// The questions of ranks that wait are shorter within that time.
constexpr double kQuietBytes = 20e3;

// Returns the bytes that each host has sent, once nothing moves: less than a few questions, and
// than a quarter of what a link carries.
std::vector<LinkedHosts::Sent> wait_until_quiet(const LinkedHosts& hosts, double mbit) {
  const auto deadline = std::chrono::steady_clock::now() + kLongestLinkTurn;
  const double carried = mbit * 1e6 / 8 * std::chrono::duration<double>(kQuietTime).count();
  const double most = mbit > 0 ? std::min(kQuietBytes, carried / 4) : kQuietBytes;
  for (auto last = hosts.sent();;) {
    std::this_thread::sleep_for(kQuietTime);
    const auto now = hosts.sent();
    bool quiet = true;
    for (size_t host = 0; host < now.size(); ++host)
      quiet &= static_cast<double>(now[host].wire - last[host].wire) < most;
    if (quiet) return now;
    TORCH_CHECK(std::chrono::steady_clock::now() < deadline,
                "[bench link] the links must be quiet ", kLongestLinkTurn.count(),
                " s after a turn; hosts still send");
    last = now;
  }
}

using CommandOfRank = std::function<std::vector<std::string>(int rank)>;

// Processes, one for each rank, on its host.
WorkerProcesses start_on_hosts(const std::string& name, const LinkBenchOptions& options,
                               const LinkedHosts& hosts, int port,
                               const CommandOfRank& command_of) {
  WorkerProcesses workers;
  const LaunchOptions launch = {
      .environment = {{"OMP_NUM_THREADS", "1"}, {"GLOO_SOCKET_IFNAME", LinkedHosts::kInterface}}};
  const int local = options.ranks_per_host;
  for (int rank = 0; rank < options.ranks(); ++rank) {
    const int host = rank / local;
    auto command = hosts.on_host(host);
    std::ranges::copy(command_of(rank), std::back_inserter(command));
    const RankAssignment assignment = {.rank = rank,
                                       .ranks = options.ranks(),
                                       .port = port,
                                       .first_rank = host * local,
                                       .local_ranks = local,
                                       .master = hosts.address(0)};
    workers.push_back(std::make_unique<WorkerProcess>(
        fmt::format("{} process {}", name, rank), command, rank_environment(launch, assignment)));
  }
  return workers;
}

// Trains for a turn, whatever moves on the links.
void train_now(Team& team, int steps, RoleResult& result) {
  auto answers = team.ask("train", steps + 1);
  for (json& rank : answers) {
    rank.at("seconds").erase(0);
    if (rank.contains("parts"))
      for (auto& part : rank["parts"]) part.erase(0);
  }
  result.turns.push_back(std::move(answers));
}

// All that is measured, on hosts of its own.
class LinkMeasurement {
 public:
  explicit LinkMeasurement(const LinkBenchOptions& options)
      : options_(options), hosts_(options.hosts, options.mbit, options.congestion) {
    options_.step.ranks = options.ranks();
    const auto step_team = [&](StepRole role) {
      return add(to_string(role),
                 [&](int rank) { return step_worker_command(options_.step, role, rank); });
    };
    sharded_ = step_team(StepRole::kSharded);
    local_ = step_team(StepRole::kLocal);
    transfer_ = add("transfer", [&](int /*rank*/) -> std::vector<std::string> {
      return {this_program(), "bench", "link-worker"};
    });
    for (const auto& name : options.against) {
      others_.push_back(add(name, [&](int /*rank*/) -> std::vector<std::string> {
        return {options.python,
                "-m",
                "tessera.bench.worker",
                "--system",
                name,
                "--size",
                options.step.size,
                "--level",
                options.step.level,
                "--optimizer",
                options.step.optimizer};
      }));
    }
  }

  LinkResult measure() {
    const auto prepare = [](Team& team) { return team.ask("prepare", kLinkWarmupSteps); };
    result_.sharded.role.prepared = prepare(*sharded_);
    result_.transport = result_.sharded.role.prepared.front().at("transport");
    result_.local.prepared = prepare(*local_);
    for (const auto& other : others_) result_.others[other->name()].role.prepared = prepare(*other);
    for (int round = 0; round < options_.step.rounds; ++round) measure_round(round);
    return std::move(result_);
  }

 private:
  std::unique_ptr<Team> add(const std::string& name, const CommandOfRank& command_of) {
    return std::make_unique<Team>(
        name, start_on_hosts(name, options_, hosts_, kFirstPort + teams_++, command_of));
  }

  // Trains for a turn, and counts the bytes of the host that sends most. Returns a text.
  std::string train(Team& team, LinkResult::Job& job) {
    const int steps = options_.step.steps;
    const auto before = wait_until_quiet(hosts_, options_.mbit);
    train_now(team, steps, job.role);
    const auto after = wait_until_quiet(hosts_, options_.mbit);
    LinkedHosts::Sent most;
    for (size_t host = 0; host < after.size(); ++host) {
      const int64_t wire = after[host].wire - before[host].wire;
      if (wire > most.wire) most = {wire, after[host].payload - before[host].payload};
    }
    job.wire_nbytes.push_back(static_cast<double>(most.wire) / (steps + 1));
    job.payload_nbytes.push_back(static_cast<double>(most.payload) / (steps + 1));
    return fmt::format("{} {:.4f} s, {:.2f} MB", team.name(), job.role.turn_medians().back(),
                       job.wire_nbytes.back() / 1e6);
  }

  // Returns the seconds in which each rank sends `nbytes` to the next host.
  double transfer(double nbytes) {
    double seconds = 0;
    for (const auto& rank : transfer_->ask("transfer", std::llround(nbytes)))
      seconds = std::max(seconds, rank.at("seconds").get<double>());
    return seconds;
  }

  void measure_round(int round) {
    const int steps = options_.step.steps;
    std::vector<std::string> texts = {train(*sharded_, result_.sharded)};
    const double nbytes = result_.sharded.payload_nbytes.back() / options_.ranks_per_host;
    result_.transfer_seconds.push_back(transfer(nbytes));
    texts.push_back(fmt::format("transfer {:.4f} s", result_.transfer_seconds.back()));
    wait_until_quiet(hosts_, options_.mbit);
    train_now(*local_, steps, result_.local);
    texts.push_back(fmt::format("local {:.4f} s", result_.local.turn_medians().back()));
    auto beside = std::async(std::launch::async, [&] { return transfer(nbytes * (steps + 1)); });
    train_now(*local_, steps, result_.beside);
    result_.beside_seconds.push_back(beside.get() / (steps + 1));
    texts.push_back(fmt::format("both at once {:.4f} s and {:.4f} s", result_.beside_seconds.back(),
                                result_.beside.turn_medians().back()));
    for (const auto& other : others_) texts.push_back(train(*other, result_.others[other->name()]));
    show_progress("link", fmt::format("round {} of {}: {}", round + 1, options_.step.rounds,
                                      fmt::join(texts, "; ")));
  }

  LinkBenchOptions options_;
  LinkedHosts hosts_;
  LinkResult result_;
  int teams_ = 0;
  std::unique_ptr<Team> sharded_, local_, transfer_;
  std::vector<std::unique_ptr<Team>> others_;
};

}  // namespace

int bench_link(const LinkBenchOptions& options) {
  step_bench_plan(options.step);  // refuses what does not exist, before hosts are made
  show_progress(
      "link",
      fmt::format("{} at {}, {} hosts with {} ranks each, {}: {} warm-up steps", options.step.size,
                  options.step.level, options.hosts, options.ranks_per_host,
                  options.mbit > 0 ? fmt::format("{} Mbit/s", options.mbit) : "no limit",
                  kLinkWarmupSteps));
  const auto report = link_report(options, LinkMeasurement(options).measure());
  fmt::print("{}\n", options.step.json ? report.dump() : link_table(report));
  return 0;
}

}  // namespace tessera::tools
