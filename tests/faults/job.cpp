#include "job.h"

#include <algorithm>
#include <utility>

#include "process/launched.h"

namespace tessera {
namespace {

/// The step of the fault, when all ranks have long found their pace.
constexpr int kStep = 20;
/// A rank that notices nothing comes to its end in time; one that the driver does something to
/// never does.
constexpr int kSteps = 200, kStepsUntilKilled = 1'000'000;

}  // namespace

FaultJob::FaultJob(const Cell& of_cell, int number, std::string of_mark)
    : cell(of_cell), mark(std::move(of_mark)), culprit((number + 1) % of_cell.ranks) {
  const Deed deed = cell.fault->deed;
  if (cell.hosts > 1) hosts = std::make_unique<tools::LinkedHosts>(cell.hosts, /*mbit=*/0);
  if (deed == Deed::kSilentPort || deed == Deed::kWebPort) {
    stranger = std::make_unique<Stranger>(deed == Deed::kWebPort);
    port = stranger->port();
  } else {
    reserved = std::make_unique<tools::ReservedPort>(0);
    port = reserved->number();
  }
}

std::map<std::string, std::string> FaultJob::environment_for(int rank) const {
  auto environment = environment_of(rank, cell.ranks, port);
  environment["TESSERA_TIMEOUT"] = std::to_string(timeout_of(cell.fault->kind));
  environment["TESSERA_TRANSPORT"] = cell.transport;
  environment["TESSERA_JOB"] = environment["TESSERA_REPORT_AFTER"] = "";
  environment[mark.substr(0, mark.find('='))] = mark.substr(mark.find('=') + 1);
  if (hosts) {
    const int ranks_of_host = cell.ranks / cell.hosts;
    environment["LOCAL_RANK"] = std::to_string(rank % ranks_of_host);
    environment["LOCAL_WORLD_SIZE"] = std::to_string(ranks_of_host);
    environment["MASTER_ADDR"] = hosts->address(0);
    environment["GLOO_SOCKET_IFNAME"] = tools::LinkedHosts::kInterface;
  }
  return environment;
}

void FaultJob::start(const std::string& scratch, const std::string& name, int job_number) {
  const Deed deed = cell.fault->deed;
  const bool is_endless = deed == Deed::kKill || deed == Deed::kKillInInit || deed == Deed::kStop ||
                          deed == Deed::kLinkDown;
  for (int rank = 0; rank < cell.ranks; ++rank) {
    if (deed == Deed::kStayAway && rank == culprit) continue;
    auto command = hosts ? hosts->on_host(host_of(rank)) : Command();
    command = with(command,
                   {FAULT_WORKER, cell.fault->role, std::to_string(culprit), std::to_string(kStep),
                    std::to_string(is_endless ? kStepsUntilKilled : kSteps), scratch});
    auto environment = environment_for(rank);
    environment["TESSERA_JOB"] = name;
    if (job_number > 0) environment["FAULT_JOB_NUMBER"] = std::to_string(job_number);
    processes.push_back(std::make_unique<WatchedProcess>(command, environment));
    ranks.push_back(rank);
    titles.push_back("rank " + std::to_string(rank) +
                     (job_number > 0 ? " of job " + std::to_string(job_number) : ""));
  }
}

Culprit FaultJob::cause_for(int rank) const {
  switch (cell.fault->deed) {
    case Deed::kSilentPort:
    case Deed::kWebPort:
      return {.other = "\\b" + std::to_string(port) + "\\b"};
    case Deed::kTwoJobs:
    case Deed::kNamelessJobs:
      return {.other = "\\b(another job|" + std::to_string(port) + ")\\b"};
    case Deed::kLinkDown: {  // to a rank, all hosts on the other side are gone
      Culprit others;
      for (int other = 0; other < cell.ranks; ++other) {
        if ((host_of(other) == 0) != (host_of(rank) == 0)) others.ranks.insert(other);
      }
      return others;
    }
    default:
      return {.ranks = {culprit}};
  }
}

}  // namespace tessera
