// Ranks that fail, leave, come late or do something else, as the others see it: within a second or
// two, although every wait has a timeout of a minute.
#include "comm/watch/watch.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <torch/torch.h>
#include <unistd.h>

#include <cstdlib>
#include <ctime>
#include <fstream>
#include <future>
#include <nlohmann/json.hpp>

#include "comm/group/authentication.h"
#include "comm/group/collective_name.h"
#include "support/error_of.h"
#include "support/run_world.h"
#include "support/scratch_directory.h"

namespace tessera::watch_test {

using namespace std::chrono_literals;

struct Case {
  Transport transport;
  int ranks;
};

std::string name_of(const ::testing::TestParamInfo<Case>& info) {
  return (info.param.transport == Transport::kGloo ? "GlooOn" : "ArenaOn") +
         std::to_string(info.param.ranks);
}

// Returns the error of `fn`.
std::string fails_with(const std::function<void()>& fn) {
  std::string text = "no exception";
  try {
    fn();
  } catch (const c10::DistBackendError& error) {
    text = error.what_without_backtrace();
  }
  return text;
}

void expect_parts(const std::string& text, const std::vector<std::string>& parts) {
  for (const std::string& part : parts) testing::expect_contains(text, {part});
}

// Rank `late` does something else until all other ranks have timed out, of which the errors must
// have `parts`.
void expect_timeouts(World& world, int late, std::atomic<int>& waiting,
                     const std::vector<std::string>& parts) {
  auto& pg = *world.process_group();
  if (world.rank() == late) {
    progress_of(pg)->enter(Phase::kForward);
    while (waiting > 0) std::this_thread::sleep_for(10ms);
    return;
  }
  auto tensor = torch::ones({5});
  const std::string text =
      fails_with([&] { pg.all_reduce(tensor, ReduceOp::kSum, {.subject = "head"})->wait(); });
  --waiting;
  expect_parts(text, parts);
}

class WaitOf : public ::testing::TestWithParam<Case> {
 protected:
  static void run(const std::function<void(World&)>& fn) {
    run_over(GetParam().transport, GetParam().ranks, fn, 60s);
  }
};

const CollectiveTag kHead{.subject = "head", .channel = Channel::kGrads};

TEST_P(WaitOf, ADifferentSizeShowsBothSizes) {
  run([](World& world) {
    auto tensor = torch::ones({world.rank() == 1 ? 7 : 5});
    const std::string text = fails_with(
        [&] { world.process_group()->all_reduce(tensor, ReduceOp::kSum, kHead)->wait(); });
    expect_parts(text, {"unit 'head'", "5 elements of Float"});
    if (world.rank() < 2) expect_parts(text, {"7 elements of Float"});
  });
}

TEST_P(WaitOf, AnotherOrderNamesBothCollectives) {
  run([](World& world) {
    auto tensor = torch::ones({5});
    auto& pg = *world.process_group();
    const CollectiveTag other{.subject = "tail", .channel = Channel::kGrads};
    const std::string text = fails_with(
        [&] { pg.all_reduce(tensor, ReduceOp::kSum, world.rank() == 1 ? other : kHead)->wait(); });
    expect_parts(text, {"'head'", "'tail'"});
  });
}

TEST_P(WaitOf, ACycleNamesItsCollectives) {
  run([](World& world) {
    auto& pg = *world.process_group();
    const CollectiveTag tag{.subject = world.rank() == 1 ? "one" : "other",
                            .channel = world.rank() == 1 ? Channel::kParams : Channel::kControl};
    const std::string text = fails_with([&] { pg.barrier(tag); });
    if (world.rank() < 2) expect_parts(text, {"ranks wait for each other", "'one'", "'other'"});
  });
}

TEST_P(WaitOf, ARankThatHasLeftNamesItsStep) {
  run([](World& world) {
    auto& pg = *world.process_group();
    auto* const progress = progress_of(pg);
    ASSERT_NE(progress, nullptr);
    progress->finish_step(4);
    if (world.rank() == 1) return;
    progress->enter(Phase::kBackward);
    auto tensor = torch::ones({5});
    expect_parts(fails_with([&] { pg.all_reduce(tensor, ReduceOp::kSum, kHead)->wait(); }),
                 {"rank 1 has left in user code of step 5", "in backward of step 5", "'head'"});
  });
}

TEST_P(WaitOf, AnExceptionIsTheCauseOnAllRanks) {
  std::atomic<int> told = 0;
  EXPECT_THROW(run([&](World& world) {
                 if (world.rank() == 1) {
                   progress_of(*world.process_group())->enter(Phase::kForward);
                   throw std::runtime_error("the data is bad");
                 }
                 auto tensor = torch::ones({5});
                 const std::string text = fails_with([&] {
                   world.process_group()->all_reduce(tensor, ReduceOp::kSum, kHead)->wait();
                 });
                 expect_parts(text, {"rank 1: an exception ended it in forward of step 1"});
                 ++told;
               }),
               std::runtime_error);
  EXPECT_EQ(told, GetParam().ranks - 1);
}

TEST_P(WaitOf, ALateRankIsReportedAndNothingFails) {
  ::setenv("TESSERA_REPORT_AFTER", "1", 1);
  ::testing::internal::CaptureStderr();
  const std::clock_t before = std::clock();
  run([](World& world) {
    auto& pg = *world.process_group();
    auto tensor = torch::ones({5});
    pg.barrier({.subject = "first", .channel = Channel::kParams});
    if (world.rank() == 1) {
      progress_of(pg)->enter(Phase::kForward);
      std::this_thread::sleep_for(2s);
    }
    pg.all_reduce(tensor, ReduceOp::kSum, kHead)->wait();
    EXPECT_EQ(tensor[0].item<float>(), static_cast<float>(world.size()));
  });
  const std::string text = ::testing::internal::GetCapturedStderr();
  ::unsetenv("TESSERA_REPORT_AFTER");
  // Processor time, of two seconds: an answer must not be the reason of the next question.
  EXPECT_LT(std::clock() - before, CLOCKS_PER_SEC);
  expect_parts(text,
               {"[tessera] rank 1 is in forward of step 1 since 1 s, last collective barrier #",
                "of unit 'first'", "all_reduce #0 of unit 'head'"});
}

TEST_P(WaitOf, TheTimeoutSaysWhereTheLateRankIs) {
  std::atomic<int> waiting = GetParam().ranks - 1;
  run_over(
      GetParam().transport, GetParam().ranks,
      [&](World& world) {
        expect_timeouts(world, 1, waiting, {"the timeout", "rank 1 is in forward of step 1"});
      },
      2s);
}

TEST_P(WaitOf, AThreadThatIsBusyMayStillIssue) {
  run([](World& world) {
    auto pg = world.process_group();
    // A thread of rank 1 has issued a collective, is busy for longer than a cycle needs, and issues
    // another one, for which rank 0 waits while rank 1's main thread waits for rank 0.
    const CollectiveTag params{.subject = "p", .channel = Channel::kParams};
    const CollectiveTag control{.subject = "c", .channel = Channel::kControl};
    if (world.rank() == 1) {
      std::jthread writer([&] {
        pg->barrier(control);
        std::this_thread::sleep_for(3s);
        pg->barrier(control);
      });
      pg->barrier(params);
    } else {
      pg->barrier(control);
      pg->barrier(control);
      pg->barrier(params);
    }
  });
}

INSTANTIATE_TEST_SUITE_P(Over, WaitOf,
                         ::testing::Values(Case{Transport::kGloo, 2}, Case{Transport::kArena, 2},
                                           Case{Transport::kGloo, 3}, Case{Transport::kArena, 3}),
                         name_of);

TEST(WaitOnTwoHosts, ALateRankIsNamed) {
  std::atomic<int> waiting = 3;
  run_hosts(
      4, by_halves,
      [&](World& world) { expect_timeouts(world, 3, waiting, {"rank 3 is in forward of step 1"}); },
      3s);
}

TEST(WaitOnTwoHosts, ALoneBarrierIsAnotherCollective) {
  const auto train = [](World& world) {
    auto tensor = torch::ones({5});
    auto& pg = *world.process_group();
    const bool is_alone = world.rank() == 2;
    const std::string text = fails_with([&] {
      if (is_alone) {
        pg.barrier({.subject = "alone", .channel = Channel::kGrads});
      } else {
        pg.all_reduce(tensor, ReduceOp::kSum, kHead)->wait();
      }
    });
    expect_parts(text, {"barrier of unit 'alone'",
                        is_alone ? "another collective" : "rank 2 issued another collective"});
  };
  run_hosts(4, by_halves, train, 60s);
}

// Rank 2 finds the others' collective, says so and closes its connections before they have asked.
TEST(WatchOfAnOddRank, IsNamedByTheOthersAlthoughItAccusesThemFirst) {
  const auto train = [](World& world) {
    auto tensor = torch::ones({5});
    auto& pg = *world.process_group();
    if (world.rank() == 2) {
      fails_with([&] { pg.barrier({.subject = "alone", .channel = Channel::kGrads}); });
      return;
    }
    std::this_thread::sleep_for(300ms);
    const std::string text =
        fails_with([&] { pg.all_reduce(tensor, ReduceOp::kSum, kHead)->wait(); });
    expect_parts(text, {"rank 2 issued another collective", "barrier of unit 'alone'"});
  };
  run_over(Transport::kGloo, 4, train, 60s);
}

TEST(WatchOfAPart, NamesRanksOfTheWorld) {
  run_world(3, [](World& world) {
    const auto part = world.new_process_group({1, 2});
    if (!part) return;
    auto tensor = torch::ones({world.rank() == 2 ? 7 : 5});
    const std::string text =
        fails_with([&] { part->all_reduce(tensor, ReduceOp::kSum, kHead)->wait(); });
    expect_parts(text, {"rank " + std::to_string(3 - world.rank()) + " issued another collective"});
  });
}

TEST(FlightFile, HoldsTheRecordOfAFailedWait) {
  const testing::ScratchDirectory scratch;
  ::setenv("TESSERA_FLIGHT_DIR", scratch.path().c_str(), 1);
  run_world(2, [](World& world) {
    auto tensor = torch::ones({world.rank() == 1 ? 7 : 5});
    progress_of(*world.process_group())->enter(Phase::kBackward);
    fails_with([&] { world.process_group()->all_reduce(tensor, ReduceOp::kSum, kHead)->wait(); });
  });
  ::unsetenv("TESSERA_FLIGHT_DIR");
  for (int rank = 0; rank < 2; ++rank) {
    std::ifstream file(std::filesystem::path(scratch.path()) /
                       ("rank_" + std::to_string(rank) + ".json"));
    const auto json = nlohmann::json::parse(file);
    EXPECT_EQ(json["rank"], rank);
    EXPECT_EQ(json["phase"], "backward");
    const auto& last = json["records"].back();
    EXPECT_EQ(last["subject"], "head");
    EXPECT_EQ(last["channel"], "kGrads");
    EXPECT_EQ(last["bytes"], rank == 1 ? 28 : 20);
    EXPECT_TRUE(last["completed_us"].is_null());
    expect_parts(json["reason"], {"5 elements", "7 elements"});
  }
}

TEST(FlightFile, IsAskedForByASignalWhileWorldsAreLeft) {
  const testing::ScratchDirectory scratch;
  ::setenv("TESSERA_FLIGHT_DIR", scratch.path().c_str(), 1);
  const auto meet = [](World& world) { world.process_group()->barrier(kHead); };
  run_world(2, meet);  // from now on the signal is handled
  {
    const std::jthread sender([](const std::stop_token& stop) {
      while (!stop.stop_requested()) ::kill(::getpid(), SIGUSR1);
    });
    for (int i = 0; i < 30; ++i) run_world(2, meet);
  }
  ::unsetenv("TESSERA_FLIGHT_DIR");
  EXPECT_TRUE(std::filesystem::exists(scratch / "rank_0.json"));
}

// Rank 1 of two, whose messages a test writes.
class Forger {
 public:
  explicit Forger(const std::string& secret) {
    auto socket = std::make_unique<Datagrams>("127.0.0.1");
    const std::string own = Watch::endpoint_of(socket.get());
    key_ = hmac_sha256(secret, own.substr(own.rfind(' ') + 1));
    const std::vector<std::string> endpoints{own, socket_.endpoint() + " token"};
    socket_.set_endpoints(endpoints);
    watch_ = Watch::start(std::move(socket), 0, endpoints, {.secret = secret});
    wait_ = watch_->group("world", {0, 1})
                ->begin_wait({.collective = "barrier", .channel = Channel::kControl},
                             [this](const WaitCause& cause) { aborted_.set_value(cause.why); });
  }

  static std::string farewell(int64_t number, const std::string& why) {
    return to_text(
        {number, 1,
         Farewell{.cause = {1, why, Evidence::kReported}, .issued = {{"world", {0, 0, 0}}}}});
  }

  const std::string& key() const { return key_; }
  void send(const std::string& key, const std::string& text) {
    socket_.send(0, authenticated(key, "", text));
  }
  // What ended the wait; empty: nothing within this time.
  std::string heard_within(std::chrono::seconds time) {
    return why_.wait_for(time) == std::future_status::ready ? why_.get() : "";
  }

 private:
  Datagrams socket_{"127.0.0.1"};
  std::string key_;
  std::shared_ptr<Watch> watch_;
  std::promise<std::string> aborted_;
  std::future<std::string> why_ = aborted_.get_future();
  std::shared_ptr<void> wait_;
};

TEST(WatchOfAForger, IgnoresAFarewellThatCountsNotAllChannels) {
  Forger forger("");
  std::string text = to_text({0, 1, Farewell{.issued = {{"world", {9, 9, 9}}}}});
  text.replace(text.find("[9,9,9]"), 7, "[0]");
  forger.send(forger.key(), text);
  EXPECT_EQ(forger.heard_within(1s), "");
  forger.send(forger.key(), Forger::farewell(1, "bad"));
  EXPECT_EQ(forger.heard_within(10s), "bad") << "a true farewell is heard";
}

TEST(WatchOfAForger, IgnoresWhatNoHolderOfTheSecretWroteAndWhatCameBefore) {
  Forger forger("secret");
  forger.send("", Forger::farewell(5, "without a code"));
  forger.send(hmac_sha256("", "token"), Forger::farewell(5, "with another key"));
  const std::string question = to_text({5, 1, Question{}});
  forger.send(forger.key(), question);
  forger.send(forger.key(), Forger::farewell(5, "with a number that has come"));
  forger.send(forger.key(), to_text({6, 0, Farewell{.cause = {1, "in the watch's own name"}}}));
  EXPECT_EQ(forger.heard_within(1s), "");
  forger.send(forger.key(), Forger::farewell(6, "true"));
  EXPECT_EQ(forger.heard_within(10s), "true");
}

}  // namespace tessera::watch_test
