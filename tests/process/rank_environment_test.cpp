// The environment of a rank of `tessera run`.

#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sched.h>
#include <sys/socket.h>
#include <unistd.h>

#include <set>
#include <sstream>

#include "launched.h"
#include "launcher/cores.h"
#include "launcher/reserved_port.h"

namespace tessera::rank_environment_test {

Command print_variables(const std::vector<std::string>& names) {
  Command flags;
  for (const std::string& name : names) flags.insert(flags.end(), {"--env", name});
  return flags;
}

TEST(RankEnvironment, TellsEachRankItsPlace) {
  const tools::ReservedPort reserved(0);
  const std::string port = std::to_string(reserved.number());
  const auto end = run_program(
      launched({"-n", "3", "--master-port", port},
               print_variables({"RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE",
                                "MASTER_ADDR", "MASTER_PORT", "TESSERA_RUN", "TESSERA_RESTART"})));
  EXPECT_EQ(end.status, 0) << end.err;
  for (const std::string rank : {"0", "1", "2"}) {
    const std::string prefix = "[" + rank + "] ";
    EXPECT_TRUE(contains(end.out, prefix + "RANK=" + rank + "\n")) << end.out;
    EXPECT_TRUE(contains(end.out, prefix + "LOCAL_RANK=" + rank + "\n"));
    for (const std::string& same :
         std::vector<std::string>{"WORLD_SIZE=3", "LOCAL_WORLD_SIZE=3", "MASTER_ADDR=127.0.0.1",
                                  "MASTER_PORT=" + port, "TESSERA_RUN=1", "TESSERA_RESTART=0"}) {
      EXPECT_TRUE(contains(end.out, prefix + same + "\n")) << same;
    }
  }
}

TEST(RankEnvironment, GivesJobsThatRunAtOnceDifferentPorts) {
  const Command command = launched({"-n", "1"}, {"--env", "MASTER_PORT", "--sleep", "0.5"});
  ProgramRun first(command);
  ProgramRun second(command);
  EXPECT_NE(first.wait().out, second.wait().out);
}

TEST(RankEnvironment, RefusesAPortThatIsListenedOn) {
  const int listener = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t size = sizeof(address);
  ASSERT_EQ(::bind(listener, reinterpret_cast<sockaddr*>(&address), size), 0);
  ASSERT_EQ(::listen(listener, 1), 0);
  ::getsockname(listener, reinterpret_cast<sockaddr*>(&address), &size);
  const std::string port = std::to_string(ntohs(address.sin_port));

  const auto end =
      run_program(launched({"-n", "2", "--master-port", port}, {"--print", "started"}));
  ::close(listener);
  EXPECT_EQ(end.status, 1);
  EXPECT_TRUE(contains(end.err, "port " + port)) << end.err;
  EXPECT_TRUE(contains(end.err, "Address already in use"));
  EXPECT_EQ(end.out, "");
}

TEST(RankEnvironment, SetsThreadsAndHeapOnlyWhereTheUserDidNot) {
  const Command command =
      launched({"-n", "1"}, print_variables({"OMP_NUM_THREADS", "MALLOC_MMAP_MAX_",
                                             "MALLOC_TRIM_THRESHOLD_", "MALLOC_TOP_PAD_"}));
  const auto ours = run_program(command, {.environment = {{"OMP_NUM_THREADS", ""}}});
  EXPECT_FALSE(contains(ours.out, "(unset)")) << ours.out;
  EXPECT_TRUE(contains(ours.out, "MALLOC_MMAP_MAX_=0\n"));

  const auto users =
      run_program(command, {.environment = {{"OMP_NUM_THREADS", "7"}, {"MALLOC_MMAP_MAX_", "9"}}});
  EXPECT_TRUE(contains(users.out, "OMP_NUM_THREADS=7\n")) << users.out;
  EXPECT_TRUE(contains(users.out, "MALLOC_MMAP_MAX_=9\n"));

  const auto tuned = run_program(
      command, {.environment = {{"GLIBC_TUNABLES", "glibc.malloc.trim_threshold=1000000"}}});
  EXPECT_TRUE(contains(tuned.out, "MALLOC_TRIM_THRESHOLD_=(unset)\n")) << tuned.out;
}

TEST(RankEnvironment, LeavesTheHeapAloneIfAsked) {
  const auto end = run_program(
      launched({"-n", "1", "--default-malloc"}, print_variables({"MALLOC_TRIM_THRESHOLD_"})));
  EXPECT_TRUE(contains(end.out, "MALLOC_TRIM_THRESHOLD_=(unset)")) << end.out;
}

TEST(RankEnvironment, HidesAnOuterTorchrun) {
  const auto end =
      run_program(launched({"-n", "1"}, print_variables({"TORCHELASTIC_USE_AGENT_STORE", "RANK"})),
                  {.environment = {{"TORCHELASTIC_USE_AGENT_STORE", "True"}, {"RANK", "5"}}});
  EXPECT_TRUE(contains(end.out, "TORCHELASTIC_USE_AGENT_STORE=(unset)")) << end.out;
  EXPECT_TRUE(contains(end.out, "RANK=0\n"));
}

TEST(RankEnvironment, StartsOneRankPerCoreByDefault) {
  const auto end = run_program(launched({}, {"--env", "WORLD_SIZE"}));
  const std::string expected =
      "WORLD_SIZE=" + std::to_string(tools::available_cores().usable) + "\n";
  EXPECT_TRUE(contains(end.out, expected)) << end.out;
}

TEST(RankEnvironment, GivesEachRankItsOwnCores) {
  if (tools::available_cores().usable < 2) GTEST_SKIP() << "needs two cores";
  const auto end = run_program(launched({"-n", "2", "--bind", "cores"}, {"--cores"}));
  std::istringstream lines(end.out);
  std::set<int> seen;
  size_t total = 0;
  for (std::string line; std::getline(lines, line);) {
    std::istringstream words(line);
    std::string prefix, word;
    words >> prefix >> word;
    for (int id = 0; words >> id; ++total) seen.insert(id);
  }
  EXPECT_EQ(total, tools::available_cores().ids.size() / 2 * 2) << end.out;
  EXPECT_EQ(seen.size(), total) << "a core was given to two ranks:\n" << end.out;
}

TEST(RankEnvironment, BindsNothingIfAskedOrIfRanksOutnumberCores) {
  const auto cores = tools::available_cores().ids;
  std::string all = "cores";
  for (int id : std::set<int>(cores.begin(), cores.end())) all += " " + std::to_string(id);
  const auto unbound = run_program(launched({"-n", "2", "--bind", "none"}, {"--cores"}));
  EXPECT_TRUE(contains(unbound.out, "[1] " + all + "\n")) << unbound.out;

  const std::string many = std::to_string(cores.size() + 1);
  const auto crowded = run_program(launched({"-n", many}, {"--cores"}));
  EXPECT_TRUE(contains(crowded.out, "[1] " + all + "\n")) << crowded.out;
}

TEST(CoreSlice, IsEqualAndDisjointAndLeavesTheRest) {
  const std::vector<int> ids = {0, 4, 1, 5, 2};
  EXPECT_EQ(tools::core_slice(ids, 0, 2), (std::vector<int>{0, 4}));
  EXPECT_EQ(tools::core_slice(ids, 1, 2), (std::vector<int>{1, 5}));
  EXPECT_EQ(tools::core_slice(ids, 4, 5), (std::vector<int>{2}));
}

}  // namespace tessera::rank_environment_test
