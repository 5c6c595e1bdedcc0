// `tessera::init()` in real processes, started by each launcher that it understands and by none.

#include <gtest/gtest.h>

#include "launch/reserved_port.h"
#include "launched.h"

namespace tessera {
namespace world_start_test {

/// Loading LibTorch takes its time on a busy machine.
constexpr std::chrono::seconds kLimit{100};
/// Far below the timeout that is used without TESSERA_TIMEOUT, ten minutes.
constexpr double kSoon = 45;

using Environment = std::map<std::string, std::string>;

/// Removes variables that a launcher around the tests may have set; then sets `variables`.
Environment clean_environment(const Environment& variables = {}) {
  Environment environment;
  for (const char* name : {"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR",
                           "MASTER_PORT", "TESSERA_RUN", "OMPI_COMM_WORLD_RANK",
                           "OMPI_COMM_WORLD_SIZE", "SLURM_PROCID", "SLURM_NTASKS"}) {
    environment[name] = "";
  }
  environment["OMP_NUM_THREADS"] = "1";
  for (const auto& [name, value] : variables) environment[name] = value;
  return environment;
}

ProgramEnd probe_world(const Environment& variables) {
  return run_program({WORLD_PROBE}, {.environment = clean_environment(variables), .limit = kLimit});
}

void expect_world(const ProgramEnd& end, int size, const std::string& launcher) {
  EXPECT_EQ(end.status, 0) << end.out << end.err;
  for (int rank = 0; rank < size; ++rank) {
    const std::string text = std::to_string(rank);
    EXPECT_TRUE(contains(end.out, "rank " + text + " of " + std::to_string(size) + ", local rank " +
                                      text + ", started by " + launcher + ", sum " +
                                      std::to_string(size * (size + 1) / 2)))
        << end.out << end.err;
  }
}

TEST(WorldStart, IsAWorldOfOneWithoutLauncher) { expect_world(probe_world({}), 1, "single"); }

TEST(WorldStart, ErrorsShowTheFramesOfTheStackOnRequest) {
  const auto end_of = [](const std::string& shows) {
    return run_program({WORLD_PROBE, "expected 3, got 4"},
                       {.environment = clean_environment({{"TORCH_SHOW_CPP_STACKTRACES", shows}}),
                        .limit = kLimit});
  };
  for (const char* shows : {"", "0", "1"}) {
    const auto end = end_of(shows);
    EXPECT_EQ(end.status, 1);
    EXPECT_TRUE(contains(end.err, "expected 3, got 4")) << end.err;
    EXPECT_EQ(contains(end.err, "frame #"), shows == std::string("1")) << end.err;
  }
}

TEST(WorldStart, WorksUnderTesseraRun) {
  const auto end =
      run_program({TESSERA_CLI, "run", "-n", "3", WORLD_PROBE},
                  {.environment = clean_environment({{"TESSERA_TIMEOUT", "20"}}), .limit = kLimit});
  expect_world(end, 3, "tessera run");
}

TEST(WorldStart, WorksUnderTorchrun) {
  if (std::string(TESSERA_PYTHON).empty()) GTEST_SKIP() << "no Python with torch was found";
  const auto end =
      run_program({TESSERA_PYTHON, "-m", "torch.distributed.run", "--standalone",
                   "--nproc-per-node", "2", "--no-python", WORLD_PROBE},
                  {.environment = clean_environment({{"TESSERA_TIMEOUT", "20"}}), .limit = kLimit});
  if (contains(end.err, "No module named 'torch'"))
    GTEST_SKIP() << TESSERA_PYTHON << " has no torch";
  expect_world(end, 2, "torchrun");
}

TEST(WorldStart, WorksUnderMpirun) {
  if (std::string(TESSERA_MPIRUN).empty()) GTEST_SKIP() << "mpirun was not found at configure time";
  const tools::ReservedPort port(0);
  const auto end = run_program(
      {TESSERA_MPIRUN, "--allow-run-as-root", "--oversubscribe", "-n", "2", WORLD_PROBE},
      {.environment = clean_environment({{"MASTER_ADDR", "127.0.0.1"},
                                         {"MASTER_PORT", std::to_string(port.number())},
                                         {"TESSERA_TIMEOUT", "20"}}),
       .limit = kLimit});
  expect_world(end, 2, "mpirun");
}

TEST(WorldStart, RefusesARankThatIsNotBelowTheWorldSize) {
  const auto end = probe_world({{"RANK", "3"},
                                {"WORLD_SIZE", "2"},
                                {"MASTER_ADDR", "127.0.0.1"},
                                {"MASTER_PORT", "29500"},
                                {"TESSERA_TIMEOUT", "20"}});
  EXPECT_EQ(end.status, 1);
  EXPECT_TRUE(contains(end.err, "RANK")) << end.err;
  EXPECT_TRUE(contains(end.err, "WORLD_SIZE")) << end.err;
  EXPECT_TRUE(contains(end.err, "3")) << end.err;
  EXPECT_LT(end.seconds, kSoon) << "the contradiction is seen without waiting for anybody";
}

TEST(WorldStart, NamesTheAddressThatItCannotReach) {
  const tools::ReservedPort port(0);  // no process listens on it
  for (const std::string rank : {"0", "1"}) {
    const auto end = probe_world({{"RANK", rank},
                                  {"WORLD_SIZE", "2"},
                                  {"MASTER_ADDR", "127.0.0.1"},
                                  {"MASTER_PORT", std::to_string(port.number())},
                                  {"TESSERA_TIMEOUT", "2"}});
    EXPECT_EQ(end.status, 1) << "rank " << rank;
    EXPECT_TRUE(contains(end.err, "127.0.0.1") && contains(end.err, std::to_string(port.number())))
        << "rank " << rank << ": " << end.err;
    EXPECT_LT(end.seconds, kSoon) << "rank " << rank;
  }
}

TEST(WorldStart, NamesAnAddressOutsideThisMachineThatItCannotReach) {
  const auto end = probe_world({{"RANK", "1"},
                                {"WORLD_SIZE", "2"},
                                {"MASTER_ADDR", "192.0.2.1"},  // reserved for documentation
                                {"MASTER_PORT", "29500"},
                                {"TESSERA_TIMEOUT", "2"}});
  EXPECT_EQ(end.status, 1);
  EXPECT_TRUE(contains(end.err, "192.0.2.1")) << end.err;
  EXPECT_LT(end.seconds, kSoon);
}

TEST(WorldStart, EndsTheJobWhenARankDiesBeforeItJoins) {
  const auto end =
      run_program({TESSERA_CLI, "run", "-n", "2", "--grace", "0.3", "sh", "-c",
                   std::string("[ $RANK = 1 ] && kill -9 $$; exec ") + WORLD_PROBE},
                  {.environment = clean_environment({{"TESSERA_TIMEOUT", "20"}}), .limit = kLimit});
  EXPECT_EQ(end.status, 137);
  EXPECT_EQ(last_line(end.err), "tessera run: rank 1 failed first: killed by signal 9 (Killed)");
  EXPECT_LT(end.seconds, kSoon);
}

TEST(WorldStart, LogsTheTransportOnceIfAsked) {
  const auto run = [](const Environment& variables) {
    Environment environment = variables;
    environment["TESSERA_TIMEOUT"] = "20";
    return run_program({TESSERA_CLI, "run", "-n", "2", WORLD_PROBE},
                       {.environment = clean_environment(environment), .limit = kLimit});
  };
  const auto text = [](const ProgramEnd& end) { return end.out + end.err; };
  const auto end = run({{"TORCH_CPP_LOG_LEVEL", "INFO"}, {"TESSERA_TRANSPORT", "gloo"}});
  EXPECT_EQ(end.status, 0) << text(end);
  const std::string line = "2 ranks; transport: gloo";
  const size_t found = text(end).find(line);
  ASSERT_NE(found, std::string::npos) << text(end);
  EXPECT_EQ(text(end).find(line, found + 1), std::string::npos) << text(end);
  EXPECT_EQ(text(run({})).find("transport:"), std::string::npos);
}

}  // namespace world_start_test
}  // namespace tessera
