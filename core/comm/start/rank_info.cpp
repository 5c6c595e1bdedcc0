// Reads the launchers' environment variables.
#include <c10/util/Exception.h>
#include <tessera/comm/world.h>

#include <cstdlib>
#include <optional>
#include <string>
#include <string_view>

#include "comm/group/environment.h"
#include "comm/message/addresses.h"
#include "comm/start/slurm.h"

namespace tessera {
namespace {

// Ports below the range that Linux assigns by itself, so that one of these is likely to be free.
constexpr int kFirstPort = 20000;
constexpr int kPorts = 12000;

void check_place(const char* name, int value, const char* size_name, int size) {
  TORCH_CHECK_VALUE(size >= 1, "[init] ", size_name, " must be at least 1; got ", size_name, "=",
                    size);
  TORCH_CHECK_VALUE(value >= 0 && value < size, "[init] ", name, " must be from 0 to ", size_name,
                    " - 1; got ", name, "=", value, " with ", size_name, "=", size);
}

// All ranks of a job derive the same port from the job's name.
int port_of_job(std::string_view job) {
  uint32_t hash = 2166136261u;
  for (const char c : job) hash = (hash ^ static_cast<unsigned char>(c)) * 16777619u;
  return kFirstPort + static_cast<int>(hash % kPorts);
}

int master_port(const std::string& job) {
  const auto port = environment_number("MASTER_PORT");
  if (!port) return port_of_job(job);
  TORCH_CHECK_VALUE(*port >= 1 && *port <= 65535,
                    "[init] MASTER_PORT must be from 1 to 65535; got MASTER_PORT=", *port);
  return *port;
}

// For launchers that don't name a master: this host if all ranks are on it, else the job's first
// node.
void find_master(RankInfo& info, const std::string& nodes, const std::string& job) {
  info.master_port = master_port(job);
  if (const auto address = environment("MASTER_ADDR")) {
    info.master_addr = *address;
  } else if (info.local_size == info.size) {
    info.master_addr = "127.0.0.1";
  } else {
    info.master_addr = first_node(nodes);
    TORCH_CHECK_VALUE(!info.master_addr.empty(),
                      "[init] the ranks run on several hosts, so MASTER_ADDR must be set to the "
                      "address of rank 0's host (",
                      info.source, " with ", info.size, " ranks, ", info.local_size,
                      " of them on this host)");
  }
}

void check_local(const RankInfo& info, const char* rank_name, const char* size_name) {
  check_place(rank_name, info.local_rank, size_name, info.local_size);
  TORCH_CHECK_VALUE(info.local_size <= info.size, "[init] ", size_name,
                    " must not be larger than the world; got ", size_name, "=", info.local_size,
                    " in a world of ", info.size);
}

// Reads the variables of torchrun or `tessera run`, or those set by hand.
std::optional<RankInfo> from_rank_variables() {
  const auto rank = environment_number("RANK");
  if (!rank) return std::nullopt;
  const auto size = environment_number("WORLD_SIZE");
  TORCH_CHECK_VALUE(size, "[init] WORLD_SIZE must be set, because RANK is; got RANK=", *rank);
  check_place("RANK", *rank, "WORLD_SIZE", *size);
  RankInfo info{.rank = *rank, .size = *size};
  info.source = environment("TESSERA_RUN")           ? "tessera run"
                : environment("TORCHELASTIC_RUN_ID") ? "torchrun"
                                                     : "environment";
  const auto address = environment("MASTER_ADDR");
  const bool one_host = address && is_loopback(numeric_loopback(*address));
  info.local_size = environment_number("LOCAL_WORLD_SIZE").value_or(one_host ? info.size : 1);
  info.local_rank = environment_number("LOCAL_RANK").value_or(one_host ? info.rank : 0);
  if (!environment("LOCAL_WORLD_SIZE") && info.local_rank >= info.local_size) {
    info.local_size = info.local_rank + 1;  // LOCAL_RANK was given alone
  }
  check_local(info, "LOCAL_RANK", "LOCAL_WORLD_SIZE");
  if (info.size > 1) {
    TORCH_CHECK_VALUE(
        address, "[init] MASTER_ADDR must be set to the address of rank 0's host; got WORLD_SIZE=",
        info.size, " without it");
    TORCH_CHECK_VALUE(environment("MASTER_PORT"),
                      "[init] MASTER_PORT must be set to a free port of MASTER_ADDR=", *address,
                      "; got WORLD_SIZE=", info.size, " without it");
    info.master_addr = *address;
    info.master_port = master_port("");
  }
  return info;
}

std::optional<RankInfo> from_mpirun() {
  const auto rank = environment_number("OMPI_COMM_WORLD_RANK");
  const auto size = environment_number("OMPI_COMM_WORLD_SIZE");
  if (!rank && !size) return std::nullopt;
  TORCH_CHECK_VALUE(rank && size,
                    "[init] OMPI_COMM_WORLD_RANK and OMPI_COMM_WORLD_SIZE must be set together; "
                    "only one of them is");
  check_place("OMPI_COMM_WORLD_RANK", *rank, "OMPI_COMM_WORLD_SIZE", *size);
  RankInfo info{.rank = *rank, .size = *size, .source = "mpirun"};
  info.local_rank = environment_number("OMPI_COMM_WORLD_LOCAL_RANK").value_or(0);
  info.local_size = environment_number("OMPI_COMM_WORLD_LOCAL_SIZE").value_or(info.local_rank + 1);
  check_local(info, "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE");
  if (info.size > 1) {
    const auto job = environment({"OMPI_MCA_ess_base_jobid", "PMIX_NAMESPACE", "SLURM_JOB_ID"})
                         .value_or("mpirun");
    find_master(info, environment("SLURM_JOB_NODELIST").value_or(""), job);
  }
  return info;
}

std::optional<RankInfo> from_srun() {
  const auto rank = environment_number("SLURM_PROCID");
  const auto step = environment({"SLURM_STEP_ID", "SLURM_STEPID"});
  // A batch script is not a task of srun, although it has SLURM_PROCID=0.
  if (!rank || (!step && environment("ENVIRONMENT") == "BATCH")) return std::nullopt;
  const bool has_step_size = environment("SLURM_STEP_NUM_TASKS").has_value();
  const char* const size_name = has_step_size ? "SLURM_STEP_NUM_TASKS" : "SLURM_NTASKS";
  const auto size = environment_number(size_name);
  TORCH_CHECK_VALUE(
      size, "[init] SLURM_NTASKS must be set, because SLURM_PROCID is; got SLURM_PROCID=", *rank);
  check_place("SLURM_PROCID", *rank, size_name, *size);
  RankInfo info{.rank = *rank, .size = *size, .source = "srun"};
  info.local_rank = environment_number("SLURM_LOCALID").value_or(0);
  info.local_size = slurm_tasks_on_this_node(info.size).value_or(info.local_rank + 1);
  check_local(info, "SLURM_LOCALID", "SLURM_TASKS_PER_NODE");
  if (info.size > 1) {
    find_master(info, environment({"SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST"}).value_or(""),
                environment("SLURM_JOB_ID").value_or("srun") + "." + step.value_or(""));
  }
  return info;
}

}  // namespace

RankInfo rank_info_from_environment() {
  for (const auto read : {from_rank_variables, from_mpirun, from_srun}) {
    if (auto info = read()) return *info;
  }
  const auto size = environment_number("WORLD_SIZE");
  TORCH_CHECK_VALUE(!size || *size == 1,
                    "[init] RANK must be set, because WORLD_SIZE is; got WORLD_SIZE=", *size);
  return {.source = "single"};
}

}  // namespace tessera
