// The environments of the launchers, and the world as an object.
#include <arpa/inet.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <stdlib.h>
#include <sys/socket.h>
#include <tessera/comm/process_group_decorators.h>
#include <tessera/comm/world.h>
#include <torch/torch.h>
#include <unistd.h>

#include <map>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "comm/start/job_token.h"
#include "comm/start/slurm.h"
#include "comm/start/store_listener.h"
#include "support/error_of.h"
#include "support/models.h"

extern char** environ;

namespace tessera::world_test {

using namespace std::chrono_literals;

/// Replaces all variables that the library reads, and restores them in the end.
class Environment {
 public:
  explicit Environment(const std::map<std::string, std::string>& variables) {
    for (char** entry = environ; *entry != nullptr; ++entry) {
      const std::string text = *entry;
      const std::string name = text.substr(0, text.find('='));
      for (const char* prefix : {"RANK", "WORLD_SIZE", "LOCAL_", "MASTER_", "TESSERA_", "OMPI_",
                                 "PMIX_", "SLURM_", "TORCHELASTIC_", "ENVIRONMENT"}) {
        if (name.rfind(prefix, 0) == 0) {
          saved_[name] = text.substr(name.size() + 1);
        }
      }
    }
    for (const auto& [name, value] : saved_) {
      unsetenv(name.c_str());
    }
    for (const auto& [name, value] : variables) {
      setenv(name.c_str(), value.c_str(), 1);
      set_.push_back(name);
    }
  }

  ~Environment() {
    for (const auto& name : set_) {
      unsetenv(name.c_str());
    }
    for (const auto& [name, value] : saved_) {
      setenv(name.c_str(), value.c_str(), 1);
    }
  }

 private:
  std::map<std::string, std::string> saved_;
  std::vector<std::string> set_;
};

struct Launch {
  std::string name;
  std::map<std::string, std::string> environment;
  RankInfo expected;
};

class RankInfoFrom : public ::testing::TestWithParam<Launch> {};

TEST_P(RankInfoFrom, Environment) {
  Environment environment(GetParam().environment);
  const RankInfo info = rank_info_from_environment();
  const RankInfo& expected = GetParam().expected;
  EXPECT_EQ(info.rank, expected.rank);
  EXPECT_EQ(info.size, expected.size);
  EXPECT_EQ(info.local_rank, expected.local_rank);
  EXPECT_EQ(info.local_size, expected.local_size);
  EXPECT_EQ(info.master_addr, expected.master_addr);
  EXPECT_EQ(info.source, expected.source);
  if (expected.master_port >= 0) {
    EXPECT_EQ(info.master_port, expected.master_port);
  } else {
    EXPECT_GE(info.master_port, 20000);
    EXPECT_LE(info.master_port, 52000);
  }
}

const Launch kLaunches[] = {
    {"Nothing", {}, {0, 1, 0, 1, "", 0, "single"}},
    {"Torchrun",
     {{"RANK", "5"},
      {"WORLD_SIZE", "8"},
      {"LOCAL_RANK", "1"},
      {"LOCAL_WORLD_SIZE", "4"},
      {"MASTER_ADDR", "node7"},
      {"MASTER_PORT", "29511"},
      {"TORCHELASTIC_RUN_ID", "none"}},
     {5, 8, 1, 4, "node7", 29511, "torchrun"}},
    {"TesseraRun",
     {{"RANK", "1"},
      {"WORLD_SIZE", "2"},
      {"LOCAL_RANK", "1"},
      {"LOCAL_WORLD_SIZE", "2"},
      {"MASTER_ADDR", "127.0.0.1"},
      {"MASTER_PORT", "29511"},
      {"TESSERA_RUN", "1"}},
     {1, 2, 1, 2, "127.0.0.1", 29511, "tessera run"}},
    {"RankByHandOnOneHost",
     {{"RANK", "1"}, {"WORLD_SIZE", "3"}, {"MASTER_ADDR", "localhost"}, {"MASTER_PORT", "1"}},
     {1, 3, 1, 3, "localhost", 1, "environment"}},
    {"RankByHandAcrossHosts",
     {{"RANK", "1"}, {"WORLD_SIZE", "3"}, {"MASTER_ADDR", "10.0.0.1"}, {"MASTER_PORT", "65535"}},
     {1, 3, 0, 1, "10.0.0.1", 65535, "environment"}},
    {"AWorldOfOneByHand", {{"RANK", "0"}, {"WORLD_SIZE", "1"}}, {0, 1, 0, 1, "", 0, "environment"}},
    {"MpirunOnOneHost",
     {{"OMPI_COMM_WORLD_RANK", "2"},
      {"OMPI_COMM_WORLD_SIZE", "4"},
      {"OMPI_COMM_WORLD_LOCAL_RANK", "2"},
      {"OMPI_COMM_WORLD_LOCAL_SIZE", "4"},
      {"OMPI_MCA_ess_base_jobid", "2416640001"}},
     {2, 4, 2, 4, "127.0.0.1", -1, "mpirun"}},
    {"MpirunInsideSlurm",
     {{"OMPI_COMM_WORLD_RANK", "2"},
      {"OMPI_COMM_WORLD_SIZE", "4"},
      {"OMPI_COMM_WORLD_LOCAL_RANK", "0"},
      {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"},
      {"SLURM_PROCID", "1"},
      {"SLURM_NTASKS", "2"},
      {"SLURM_JOB_NODELIST", "gpu[07-08]"}},
     {2, 4, 0, 2, "gpu07", -1, "mpirun"}},
    {"MpirunWithMaster",
     {{"OMPI_COMM_WORLD_RANK", "2"},
      {"OMPI_COMM_WORLD_SIZE", "4"},
      {"OMPI_COMM_WORLD_LOCAL_RANK", "0"},
      {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"},
      {"MASTER_ADDR", "head"},
      {"MASTER_PORT", "4000"}},
     {2, 4, 0, 2, "head", 4000, "mpirun"}},
    {"Srun",
     {{"SLURM_PROCID", "5"},
      {"SLURM_NTASKS", "6"},
      {"SLURM_LOCALID", "1"},
      {"SLURM_NODEID", "2"},
      {"SLURM_TASKS_PER_NODE", "2(x3)"},
      {"SLURM_JOB_ID", "991"},
      {"SLURM_STEP_ID", "0"},
      {"SLURM_JOB_NODELIST", "other,node[03-05]"},
      {"SLURM_STEP_NODELIST", "node[03-05]"}},
     {5, 6, 1, 2, "node03", -1, "srun"}},
    {"SrunOnOneNode",
     {{"SLURM_PROCID", "1"},
      {"SLURM_NTASKS", "2"},
      {"SLURM_LOCALID", "1"},
      {"SLURM_NNODES", "1"},
      {"SLURM_JOB_NODELIST", "node03"}},
     {1, 2, 1, 2, "127.0.0.1", -1, "srun"}},
    {"TheShellOfAnAllocation",
     {{"SLURM_NTASKS", "8"}, {"SLURM_JOB_ID", "991"}, {"SLURM_JOB_NODELIST", "node[03-05]"}},
     {0, 1, 0, 1, "", 0, "single"}},
    {"TheScriptOfABatchJob",
     {{"SLURM_PROCID", "0"}, {"SLURM_NTASKS", "8"}, {"ENVIRONMENT", "BATCH"}},
     {0, 1, 0, 1, "", 0, "single"}},
};

INSTANTIATE_TEST_SUITE_P(Launchers, RankInfoFrom, ::testing::ValuesIn(kLaunches),
                         [](const auto& info) { return info.param.name; });

struct Contradiction {
  std::string name;
  std::map<std::string, std::string> environment;
  std::vector<std::string> named;  // parts of the message
};

class ContradictoryEnvironment : public ::testing::TestWithParam<Contradiction> {};

TEST_P(ContradictoryEnvironment, IsRefusedByName) {
  Environment environment(GetParam().environment);
  try {
    rank_info_from_environment();
    FAIL() << "no exception";
  } catch (const c10::ValueError& error) {
    const std::string text = error.what_without_backtrace();
    for (const auto& part : GetParam().named) {
      testing::expect_contains(text, {part});
    }
  }
}

const Contradiction kContradictions[] = {
    {"RankNotBelowTheSize",
     {{"RANK", "2"}, {"WORLD_SIZE", "2"}, {"MASTER_ADDR", "a"}, {"MASTER_PORT", "1"}},
     {"RANK=2", "WORLD_SIZE=2"}},
    {"NegativeRank", {{"RANK", "-1"}, {"WORLD_SIZE", "2"}}, {"RANK=-1"}},
    {"NoSize", {{"RANK", "1"}}, {"WORLD_SIZE", "RANK=1"}},
    {"NoRank", {{"WORLD_SIZE", "4"}}, {"RANK", "WORLD_SIZE=4"}},
    {"SizeZero", {{"RANK", "0"}, {"WORLD_SIZE", "0"}}, {"WORLD_SIZE=0"}},
    {"TextForANumber", {{"RANK", "one"}, {"WORLD_SIZE", "2"}}, {"RANK=one", "number"}},
    {"HalfANumber", {{"RANK", "1"}, {"WORLD_SIZE", "2x"}}, {"WORLD_SIZE=2x"}},
    {"NoMaster", {{"RANK", "1"}, {"WORLD_SIZE", "2"}}, {"MASTER_ADDR"}},
    {"NoPort",
     {{"RANK", "1"}, {"WORLD_SIZE", "2"}, {"MASTER_ADDR", "a"}},
     {"MASTER_PORT", "MASTER_ADDR=a"}},
    {"PortOutOfRange",
     {{"RANK", "1"}, {"WORLD_SIZE", "2"}, {"MASTER_ADDR", "a"}, {"MASTER_PORT", "70000"}},
     {"MASTER_PORT=70000"}},
    {"LocalRankNotBelowTheLocalSize",
     {{"RANK", "1"},
      {"WORLD_SIZE", "4"},
      {"LOCAL_RANK", "2"},
      {"LOCAL_WORLD_SIZE", "2"},
      {"MASTER_ADDR", "a"},
      {"MASTER_PORT", "1"}},
     {"LOCAL_RANK=2", "LOCAL_WORLD_SIZE=2"}},
    {"LocalSizeAboveTheSize",
     {{"RANK", "1"},
      {"WORLD_SIZE", "2"},
      {"LOCAL_RANK", "1"},
      {"LOCAL_WORLD_SIZE", "4"},
      {"MASTER_ADDR", "a"},
      {"MASTER_PORT", "1"}},
     {"LOCAL_WORLD_SIZE=4"}},
    {"MpirunWithoutSize", {{"OMPI_COMM_WORLD_RANK", "1"}}, {"OMPI_COMM_WORLD_SIZE"}},
    {"MpirunAcrossHostsWithoutMaster",
     {{"OMPI_COMM_WORLD_RANK", "1"},
      {"OMPI_COMM_WORLD_SIZE", "4"},
      {"OMPI_COMM_WORLD_LOCAL_RANK", "1"},
      {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"}},
     {"MASTER_ADDR", "mpirun"}},
    {"SrunRankNotBelowTheSize",
     {{"SLURM_PROCID", "4"}, {"SLURM_NTASKS", "4"}},
     {"SLURM_PROCID=4", "SLURM_NTASKS=4"}},
};

INSTANTIATE_TEST_SUITE_P(All, ContradictoryEnvironment, ::testing::ValuesIn(kContradictions),
                         [](const auto& info) { return info.param.name; });

TEST(RankInfo, DerivesOnePortPerJob) {
  const auto port = [](const std::string& job) {
    Environment environment({{"OMPI_COMM_WORLD_RANK", "0"},
                             {"OMPI_COMM_WORLD_SIZE", "1"},
                             {"OMPI_COMM_WORLD_LOCAL_SIZE", "1"},
                             {"PMIX_NAMESPACE", job}});
    setenv("OMPI_COMM_WORLD_SIZE", "2", 1);
    setenv("OMPI_COMM_WORLD_LOCAL_SIZE", "2", 1);
    return rank_info_from_environment().master_port;
  };
  EXPECT_EQ(port("prterun-a-17@1"), port("prterun-a-17@1"));
  EXPECT_NE(port("prterun-a-17@1"), port("prterun-a-18@1"));
}

TEST(JobToken, IsTheLaunchersNameOfTheJob) {
  const auto token = [](const std::map<std::string, std::string>& variables, const char* source) {
    Environment environment(variables);
    return job_token({.master_port = 77, .source = source});
  };
  EXPECT_EQ(token({{"TESSERA_JOB", "x1"}, {"SLURM_JOB_ID", "9"}}, "tessera run"), "x1");
  EXPECT_EQ(token({{"TORCHELASTIC_RUN_ID", "none"}}, "torchrun"), "");
  EXPECT_EQ(token({{"TORCHELASTIC_RUN_ID", "me"}}, "torchrun"), "me:77");
  EXPECT_EQ(token({{"SLURM_JOB_ID", "9"}, {"SLURM_STEP_ID", "2"}}, "srun"), "9.2");
  EXPECT_EQ(token({{"OMPI_MCA_ess_base_jobid", "55"}}, "mpirun"), "55");
  EXPECT_EQ(token({}, "environment"), "");
  EXPECT_EQ(token({{"SLURM_JOB_ID", "9"}, {"SLURM_STEP_ID", "2"}}, "environment"),
            "allocation SLURM_JOB_ID=9")
      << "started by hand, perhaps in a step of its own";
}

TEST(JobToken, OfRanksByHandDiffersInAllocationsOnly) {
  const std::string nine = "allocation SLURM_JOB_ID=9", ten = "allocation SLURM_JOB_ID=10";
  EXPECT_TRUE(may_be_one_job("", ""));
  EXPECT_TRUE(may_be_one_job("x1", "x1"));
  EXPECT_TRUE(may_be_one_job(nine, nine));
  EXPECT_TRUE(may_be_one_job(nine, "")) << "started by ssh from inside";
  EXPECT_TRUE(may_be_one_job("allocation PMIX_NAMESPACE=9", ten));
  EXPECT_FALSE(may_be_one_job(nine, ten));
  EXPECT_FALSE(may_be_one_job("", "x1"));
  EXPECT_FALSE(may_be_one_job("x1", nine));
}

TEST(StoreListener, IsOnLoopbackIfTheMasterIs) {
  const auto address = [](const std::string& master) {
    const int fd = open_store_listener({.size = 2, .master_addr = master, .master_port = 21986});
    sockaddr_storage storage{};
    socklen_t size = sizeof(storage);
    ::getsockname(fd, reinterpret_cast<sockaddr*>(&storage), &size);
    ::close(fd);
    return storage.ss_family == AF_INET
               ? static_cast<int64_t>(
                     ntohl(reinterpret_cast<const sockaddr_in*>(&storage)->sin_addr.s_addr))
               : -1;
  };
  EXPECT_EQ(address("127.0.0.1"), INADDR_LOOPBACK);
  EXPECT_EQ(address("localhost"), INADDR_LOOPBACK);
  EXPECT_LE(address("some-host"), 0) << "all interfaces";
}

TEST(Slurm, FindsTheFirstNodeOfAList) {
  EXPECT_EQ(first_node("node[03-05,9],x"), "node03");
  EXPECT_EQ(first_node("x,node[1-2]"), "x");
  EXPECT_EQ(first_node("a[1-2]b[07,09]c"), "a1b07c");
  EXPECT_EQ(first_node("one"), "one");
  EXPECT_EQ(first_node(""), "");
  EXPECT_EQ(first_node("broken[1"), "");
}

TEST(Slurm, ReadsTasksPerNode) {
  EXPECT_EQ(count_of_node("2(x3),1", 0), 2);
  EXPECT_EQ(count_of_node("2(x3),1", 2), 2);
  EXPECT_EQ(count_of_node("2(x3),1", 3), 1);
  EXPECT_EQ(count_of_node("2(x3),1", 4), std::nullopt);
  EXPECT_EQ(count_of_node("nonsense", 0), std::nullopt);
}

TEST(World, IsTheDefaultOfItsThreadWhileItLives) {
  run_world(3, [](World& world) {
    EXPECT_EQ(default_process_group(), world.process_group());
    EXPECT_EQ(default_process_group()->rank(), world.rank());
    EXPECT_EQ(default_process_group()->backend_name(), "gloo");
  });
  EXPECT_EQ(default_process_group()->size(), 1);
}

TEST(World, MovesWithItsDefault) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  {
    World outer = init(store, 0, 1);
    {
      World inner = init(store, 0, 1);
      outer = std::move(inner);
    }
    EXPECT_EQ(default_process_group(), outer.process_group());
    {
      World newer = init(store, 0, 1);
      EXPECT_EQ(default_process_group(), newer.process_group());
    }
    EXPECT_EQ(default_process_group(), outer.process_group());
  }
}

TEST(World, KnowsWhichRanksShareTheHost) {
  run_world(3, [](World& world) {
    EXPECT_EQ(world.local_rank(), world.rank());
    EXPECT_EQ(world.info().local_size, 3);
    EXPECT_EQ(world.info().source, "spawn");
  });
}

TEST(World, CanBeJoinedAgainThroughTheSameStore) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  const auto join_twice = [&](int rank) {
    for (int round = 0; round < 2; ++round) {
      World world = init(store, rank, 2, {.timeout = 20s});
      auto number = torch::ones({1});
      world.process_group()->all_reduce(number, ReduceOp::kSum, {.subject = "x"})->wait();
      EXPECT_EQ(number.item<float>(), 2);
    }
  };
  std::thread other([&] { join_twice(1); });
  join_twice(0);
  other.join();
}

TEST(World, ClosesItsProcessGroupForAllWhoHoldIt) {
  std::mutex mutex;
  std::vector<ProcessGroupPtr> held;
  run_world(2, [&](World& world) {
    std::lock_guard lock(mutex);
    held.push_back(world.process_group());
    world.set_process_group(counting_process_group(world.process_group()));
  });
  for (const auto& process_group : held) {
    EXPECT_EQ(process_group->size(), 2);
    EXPECT_THROW(process_group->barrier({.subject = "late"}), c10::DistBackendError);
  }
}

TEST(World, OfOneNeedsNobody) {
  Environment environment({});
  const World world = init();
  EXPECT_EQ(world.size(), 1);
  EXPECT_EQ(world.process_group()->backend_name(), "single");
  world.store()->set("key", "value");
  EXPECT_EQ(world.store()->get_to_str("key"), "value");
}

TEST(World, RefusesAProcessGroupOfOtherRanks) {
  run_world(2, [](World& world) {
    EXPECT_THROW(world.set_process_group(single_process_group()), c10::ValueError);
    EXPECT_THROW(world.set_process_group(nullptr), c10::ValueError);
  });
}

TEST(Init, RefusesUnknownBackendsAndTimeouts) {
  Environment environment({});
  EXPECT_THROW(static_cast<void>(init({.backend = "smoke"})), c10::ValueError);
  // c10d has these, and LibTorch's packages do not.
  for (const char* const name : {"mpi", "ucc"})
    testing::expect_error(
        [&] { static_cast<void>(init({.backend = name})); },
        {std::string("can't be ") + name, "LibTorch's packages are built without"});
  EXPECT_THROW(static_cast<void>(init({.timeout = -1s})), c10::ValueError);
  const auto store = c10::make_intrusive<c10d::HashStore>();
  EXPECT_THROW(static_cast<void>(init(store, 2, 2)), c10::ValueError);
  EXPECT_THROW(static_cast<void>(init(nullptr, 0, 1)), c10::ValueError);
  setenv("TESSERA_TIMEOUT", "soon", 1);
  EXPECT_THROW(static_cast<void>(init()), c10::ValueError);
  setenv("TESSERA_TIMEOUT", "0", 1);
  EXPECT_THROW(static_cast<void>(init()), c10::ValueError);
  unsetenv("TESSERA_TIMEOUT");
}

void expect_network_error(const std::function<void()>& fn, const std::vector<std::string>& parts) {
  const auto start = std::chrono::steady_clock::now();
  try {
    fn();
    ADD_FAILURE() << "no exception";
  } catch (const c10::DistNetworkError& error) {
    const std::string text = error.what_without_backtrace();
    for (const auto& part : parts) {
      testing::expect_contains(text, {part});
    }
  }
  EXPECT_LT(std::chrono::steady_clock::now() - start, 15s);
}

TEST(Init, NamesTheAddressThatItCouldNotReach) {
  Environment environment({{"RANK", "1"},
                           {"WORLD_SIZE", "2"},
                           {"MASTER_ADDR", "127.0.0.1"},
                           {"MASTER_PORT", "1"},
                           {"TESSERA_TIMEOUT", "2"}});
  expect_network_error([] { static_cast<void>(init()); },
                       {"[init] rank 1 of 2", "127.0.0.1:1", "MASTER_ADDR", "2.0 s"});
}

TEST(Init, NamesAnUnknownHost) {
  Environment environment({{"RANK", "1"},
                           {"WORLD_SIZE", "2"},
                           {"MASTER_ADDR", "no-such-host.invalid"},
                           {"MASTER_PORT", "29500"}});
  expect_network_error([] { static_cast<void>(init({.timeout = 2s})); },
                       {"no-such-host.invalid:29500"});
}

TEST(Init, SaysThatAnotherRankDoesNotCome) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  expect_network_error([&] { static_cast<void>(init(store, 0, 2, {.timeout = 1s})); },
                       {"[init] rank 0 of 2", "1.0 s", "in vain for rank 1"});
  Environment environment(
      {{"RANK", "0"}, {"WORLD_SIZE", "2"}, {"MASTER_ADDR", "127.0.0.1"}, {"MASTER_PORT", "21987"}});
  expect_network_error([] { static_cast<void>(init({.timeout = 1s})); },
                       {"[init] rank 0 of 2", "127.0.0.1:21987"});
}

TEST(Nccl, IsRefusedWithoutCuda) {
  if (torch::cuda::is_available()) GTEST_SKIP() << "LibTorch has CUDA here";
  EXPECT_THROW(registered_process_group("nccl", c10::make_intrusive<c10d::HashStore>(), 0, 1, 1s),
               c10::NotImplementedError);
}

}  // namespace tessera::world_test
