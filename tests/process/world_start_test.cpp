// `tessera::init()` in real processes, started by each launcher that it understands and by none.

#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <signal.h>
#include <sys/socket.h>
#include <unistd.h>

#include <chrono>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "launched.h"
#include "launcher/reserved_port.h"
#include "ranks_by_hand.h"

namespace tessera::world_start_test {

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

TEST(LastWords, OfAnUncaughtExceptionReachTheOthers) {
  for (const char* const transport : {"arena", "gloo"}) {
    const ProgramEnd end = run_program(
        {TESSERA_CLI, "run", "-n", "3", WORLD_PROBE, "--throw"},
        {.environment = clean_environment({{"TESSERA_TRANSPORT", transport}}), .limit = kLimit});
    EXPECT_NE(end.status, 0) << end.err;
    for (const char* const rank : {"0", "2"}) {
      const std::string prefix = std::string("[") + rank + "] world_probe: [barrier]";
      const auto line = end.err.find(prefix);
      ASSERT_NE(line, std::string::npos) << end.err;
      EXPECT_NE(
          end.err.find(
              "rank 1: an exception ended it in user code of step 1: the file has 3 bytes too few",
              line),
          std::string::npos)
          << end.err;
    }
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
  const TemporaryDirectory directory;  // as other jobs of Open MPI may run
  const auto end = run_program(
      {TESSERA_MPIRUN, "--allow-run-as-root", "--oversubscribe", "-n", "2", WORLD_PROBE},
      {.environment = clean_environment({{"MASTER_ADDR", "127.0.0.1"},
                                         {"MASTER_PORT", std::to_string(port.number())},
                                         {"TESSERA_TIMEOUT", "20"},
                                         {"TMPDIR", directory.path()}}),
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
}

TEST(WorldStart, EndsTheJobWhenARankDiesBeforeItJoins) {
  const auto end =
      run_program({TESSERA_CLI, "run", "-n", "2", "--grace", "0.3", "sh", "-c",
                   std::string("[ $RANK = 1 ] && kill -9 $$; exec ") + WORLD_PROBE},
                  {.environment = clean_environment({{"TESSERA_TIMEOUT", "20"}}), .limit = kLimit});
  EXPECT_EQ(end.status, 137);
  EXPECT_EQ(last_line(end.err), "tessera run: rank 1 failed first: killed by signal 9 (Killed)");
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

// A server that is no store: it accepts connections, and answers the first bytes with `answer`, if
// it is not empty.
class OtherService {
 public:
  explicit OtherService(std::string answer)
      : answer_(std::move(answer)), listener_(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
    sockaddr_in address{};
    address.sin_family = AF_INET;
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    socklen_t size = sizeof(address);
    auto* const generic = reinterpret_cast<sockaddr*>(&address);
    EXPECT_EQ(::bind(listener_, generic, size), 0);
    EXPECT_EQ(::listen(listener_, 16), 0);
    EXPECT_EQ(::getsockname(listener_, generic, &size), 0);
    port_ = ntohs(address.sin_port);
    serving_ = std::jthread([this] { serve(); });
  }
  ~OtherService() {
    ::shutdown(listener_, SHUT_RDWR);
    serving_.join();
    for (const int fd : accepted_) ::close(fd);
    ::close(listener_);
  }

  int port() const { return port_; }

 private:
  void serve() {
    for (int fd = 0; (fd = ::accept4(listener_, nullptr, nullptr, SOCK_CLOEXEC)) >= 0;) {
      accepted_.push_back(fd);
      if (answer_.empty()) continue;
      char request[64];
      if (::recv(fd, request, sizeof(request), 0) > 0)
        ::send(fd, answer_.data(), answer_.size(), MSG_NOSIGNAL);
      ::shutdown(fd, SHUT_RDWR);
    }
  }

  const std::string answer_;
  const int listener_;
  int port_ = 0;
  std::vector<int> accepted_;
  std::jthread serving_;
};

TEST(WorldStart, AnotherServiceOnThePortIsAnErrorWithinTheTimeout) {
  for (const std::string answer : {"", "HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n"}) {
    const OtherService service(answer);
    RanksByHand ranks(2, {{"MASTER_PORT", std::to_string(service.port())}});
    ranks.start(0), ranks.start(1);
    const auto ends = ranks.wait();
    const std::string port = std::to_string(service.port());
    expect_error(ends[0], {"[init] rank 0 of 2", "port " + port, "another process", "MASTER_PORT"});
    expect_error(ends[1], {"[init] rank 1 of 2", "127.0.0.1:" + port, "timeout 3.0 s"});
    if (answer.empty()) expect_error(ends[1], {"another service has this port"});
  }
}

TEST(WorldStart, ReportsAndNamesTheRanksThatAreMissing) {
  RanksByHand ranks(4, {{"TESSERA_REPORT_AFTER", "1"}});
  ranks.start(0), ranks.start(1);
  const auto ends = ranks.wait();
  expect_error(ends[0], {"[tessera] rank 0 of 4 (host ",
                         "in init() for ranks 2, 3; ranks 0, 1 are there (hosts "});
  for (const ProgramEnd& end : ends)
    expect_error(end, {"in vain for ranks 2, 3, timeout 3.0 s", "ranks 0, 1 are there"});
  EXPECT_FALSE(contains(ends[1].err, "[tessera] rank 1 of 4")) << "one rank reports for all";
}

TEST(WorldStart, NamesARankThatEndsBeforeAllAreThere) {
  RanksByHand ranks(3, {{"TESSERA_TIMEOUT", "60"}, {"TESSERA_REPORT_AFTER", "1"}});
  auto& first = ranks.start(0, {}, {}, /*on_terminal=*/true);
  auto& second = ranks.start(1);
  ASSERT_TRUE(first.wait_for_output("ranks 0, 1 are there")) << first.output();
  second.signal(SIGKILL);
  const std::string name = "rank 1 (process " + std::to_string(second.pid());
  const ProgramEnd end = first.wait();
  EXPECT_EQ(end.status, 1);
  EXPECT_TRUE(contains(end.out, name) && contains(end.out, "has ended")) << end.out;
}

TEST(WorldStart, ARankNumberThatComesTwiceIsAnErrorOnAllRanks) {
  RanksByHand ranks(3, {{"TESSERA_TIMEOUT", "600"}, {"TESSERA_JOB", "blue"}});
  const pid_t other = ranks.start(1).pid(), twin = ranks.start(1).pid();
  ranks.start(0);
  for (const ProgramEnd& end : ranks.wait()) {
    expect_error(end, {"rank 1 joined twice", std::to_string(other), std::to_string(twin)});
  }
}

TEST(WorldStart, DifferentWorldSizesAndTransportsAreErrorsOnAllRanks) {
  RanksByHand sizes(2, {{"TESSERA_TIMEOUT", "60"}});
  sizes.start(0), sizes.start(1, {{"WORLD_SIZE", "3"}, {"LOCAL_WORLD_SIZE", "3"}});
  RanksByHand transports(2, {{"TESSERA_TIMEOUT", "60"}});
  transports.start(0, {{"TESSERA_TRANSPORT", "gloo"}});
  transports.start(1, {{"TESSERA_TRANSPORT", "arena"}});
  for (const ProgramEnd& end : sizes.wait())
    expect_error(end, {"one world size", "2 for rank 0", "3 for rank 1"});
  for (const ProgramEnd& end : transports.wait())
    expect_error(end, {"one transport", "gloo for rank 0", "arena for rank 1"});
}

TEST(WorldStart, OneRankWithGlooMovesAllToIt) {
  RanksByHand ranks(2, {{"TESSERA_TIMEOUT", "30"}});
  ranks.start(0), ranks.start(1, {{"TESSERA_TRANSPORT", "gloo"}, {"TESSERA_TIMEOUT", "25"}});
  const auto ends = ranks.wait();
  for (const ProgramEnd& end : ends) {
    EXPECT_EQ(end.status, 0) << end.err;
    EXPECT_TRUE(contains(end.out, "over gloo")) << end.out;
  }
  EXPECT_TRUE(contains(ends[0].err, "because rank 1 (process ")) << ends[0].err;
  EXPECT_TRUE(contains(ends[0].err, "timeout of all ranks is 25.0 s")) << ends[0].err;
  EXPECT_FALSE(contains(ends[1].err, "because rank 1")) << ends[1].err;
}

TEST(WorldStart, RanksOfAnotherJobAreRefusedAndDisturbNobody) {
  RanksByHand ranks(2, {{"TESSERA_TIMEOUT", "60"}, {"TESSERA_JOB", "blue"}});
  auto& first = ranks.start(0);
  auto& stranger = ranks.start(1, {{"TESSERA_JOB", "red"}});
  expect_error(stranger.wait(), {"[init] 127.0.0.1:" + std::to_string(ranks.port()),
                                 "served by another job", "expected job token 'red', got 'blue'"});
  auto& second = ranks.start(1);
  EXPECT_EQ(first.wait().status, 0);
  EXPECT_EQ(second.wait().status, 0);
}

// Options of a shell that starts ranks of a job of two, which has no name.
ProgramRun::Options nameless_job(int port, const Environment& own = {}) {
  Environment environment = clean_environment(environment_of(0, 2, port));
  for (const char* const name : {"RANK", "LOCAL_RANK", "TESSERA_TRANSPORT"}) environment[name] = "";
  environment["TESSERA_TIMEOUT"] = "20";
  environment.insert(own.begin(), own.end());
  return {.environment = std::move(environment), .limit = kLimit};
}

TEST(WorldStart, JobsWithoutNamesDoNotTrainTogether) {
  const tools::ReservedPort port(0);
  // In one job rank 1 comes late, in the other one rank 0: the ranks that are left could meet.
  const Command job = {"sh", "-c",
                       "for rank in 0 1; do late=0; [ $rank = $LATE_RANK ] && late=6; "
                       "RANK=$rank WORLD_PROBE_LATE=$late $0 --note of-$rank & done; wait",
                       WORLD_PROBE};
  ProgramRun one(job, nameless_job(port.number(), {{"LATE_RANK", "1"}}));
  ProgramRun other(job, nameless_job(port.number(), {{"LATE_RANK", "0"}}));
  const ProgramEnd ends[] = {one.wait(), other.wait()};
  for (const ProgramEnd& end : ends) {
    EXPECT_EQ(end.out, "") << "ranks of two jobs have met";
    EXPECT_TRUE(contains(end.err, "are of two jobs: its launcher has started process ")) << end.err;
    EXPECT_TRUE(contains(end.err, "give all its ranks one TESSERA_JOB")) << end.err;
    size_t errors = 0;
    for (size_t at = 0; (at = end.err.find("world_probe: [init] ", at)) != std::string::npos; ++at)
      ++errors;
    EXPECT_EQ(errors, 2) << "both ranks must fail: " << end.err;
  }
}

TEST(WorldStart, RanksFromTwoShellsWithDifferentArgumentsAreOneJob) {
  const tools::ReservedPort port(0);
  std::vector<std::unique_ptr<ProgramRun>> shells;
  for (const char* const script : {"sleep 9 & RANK=0 $0 --note zero; kill %1",
                                   "export RANK=1; sleep 9 & $0 --note one -v; kill %1"})
    shells.push_back(std::make_unique<ProgramRun>(Command{"bash", "-mc", script, WORLD_PROBE},
                                                  nameless_job(port.number())));
  for (const auto& shell : shells) {
    const ProgramEnd end = shell->wait();
    EXPECT_TRUE(contains(end.out, "sum 3")) << end.out << end.err;
  }
}

TEST(WorldStart, ASecondInitOfAProcessIsRefusedAtOnce) {
  RanksByHand ranks(2, {{"TESSERA_TIMEOUT", "600"}});
  ranks.start(0, {}, {"--twice"}), ranks.start(1, {}, {"--twice"});
  const auto ends = ranks.wait();
  for (int rank = 0; rank < 2; ++rank) {
    const ProgramEnd& end = ends[rank];
    EXPECT_EQ(end.status, 0) << end.err;
    EXPECT_TRUE(contains(end.out, "this one is rank " + std::to_string(rank) + " of 2 already"))
        << end.out;
    EXPECT_TRUE(contains(end.out, "again 3")) << end.out;
  }
}

// The connections of a killed rank close although its child lives.
class ChildOfAKilledRank : public ::testing::TestWithParam<const char*> {};

TEST_P(ChildOfAKilledRank, HasNoneOfItsConnections) {
  RanksByHand ranks(2, {{"TESSERA_TIMEOUT", "600"}, {"TESSERA_TRANSPORT", "gloo"}});
  auto& first = ranks.start(0, {}, {"--child", GetParam()});
  auto& last = ranks.start(1, {}, {"--child", GetParam()});
  ASSERT_TRUE(last.wait_for_output("child ") && first.wait_for_output("rank 0 of 2"));
  std::this_thread::sleep_for(std::chrono::milliseconds(300));  // until the child runs
  last.signal(SIGKILL);
  const ProgramEnd end = first.wait();
  expect_error(end, {"rank 1"});
  const auto children = numbers_after(last.output(), "child");
  ASSERT_EQ(children.size(), 1);
  EXPECT_TRUE(is_running(children[0]));
  ::kill(children[0], SIGKILL);
}

INSTANTIATE_TEST_SUITE_P(All, ChildOfAKilledRank, ::testing::Values("fork", "exec"));

}  // namespace tessera::world_start_test
