// Ranks that meet: how they agree, and which errors they give.
#include "comm/start/arrival.h"

#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <thread>
#include <torch/csrc/distributed/c10d/HashStore.hpp>
#include <torch/csrc/distributed/c10d/PrefixStore.hpp>
#include <utility>
#include <vector>

#include "support/error_of.h"

namespace tessera::arrival_test {

using namespace std::chrono_literals;

Arrival arrival(int rank, int size, const std::string& transport = "auto") {
  return {.rank = rank,
          .name = rank,
          .size = size,
          .host = "id of a",
          .host_name = "a",
          .pid = 100 + rank,
          .transport = transport,
          .backend = "gloo",
          .timeout = 1000};
}

TEST(Arrival, IsReadAsItWasWritten) {
  Arrival sent = arrival(1, 3, "arena");
  sent.endpoint = "10.0.0.1:77";
  sent.launched = {101, {{0, 100, 7}, {1, 101, 0xFFFFFFFFFFFFFFFFull}}};
  const Arrival read = arrival_from_text(to_text(sent));
  EXPECT_EQ(to_text(read), to_text(sent));
  EXPECT_EQ(read.launched.all, sent.launched.all);
  EXPECT_EQ(read.endpoint, sent.endpoint);
  EXPECT_EQ(read.describe(), "rank 1 (process 101 on host a)");
  EXPECT_THROW(arrival_from_text("GET / HTTP/1.1"), c10::ValueError);
  EXPECT_THROW(arrival_from_text("{}"), c10::ValueError);
}

TEST(Attendance, NamesRanksThatAreThereAndThoseThatAreNot) {
  Attendance attendance(arrival(1, 4), {});
  EXPECT_TRUE(attendance.is_first());
  attendance.note(arrival(0, 4));
  EXPECT_FALSE(attendance.is_first());
  EXPECT_EQ(attendance.missing(), (std::vector<int>{2, 3}));
  EXPECT_EQ(attendance.describe(attendance.missing()), "ranks 2, 3");
  EXPECT_EQ(attendance.describe_present(), "ranks 0, 1 are there (hosts a, a)");
  EXPECT_EQ(attendance.own_name(), "rank 1 of 4 (host a)");
  attendance.note(arrival(2, 4));
  attendance.note(arrival(3, 4));
  EXPECT_EQ(attendance.describe_present(), "all ranks are there (hosts a, a, a, a)");
}

TEST(Attendance, NamesRanksOfAPartAsTheWorldDoes) {
  const Attendance attendance(arrival(0, 2), {3, 5});
  EXPECT_EQ(attendance.describe(attendance.missing()), "rank 5");
  EXPECT_EQ(attendance.describe_present(), "rank 3 is there (host a)");
}

// Lets the arrivals come in this order; returns the refusal that each of them gets.
std::vector<std::string> refusals(const std::vector<Arrival>& arrivals) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  std::vector<std::string> result(arrivals.size());
  std::vector<std::jthread> ranks;
  for (size_t i = 0; i < arrivals.size(); ++i) {
    ranks.emplace_back([&, i] {
      Attendance attendance(arrivals[i], {});
      result[i] = arrive(attendance, *store, Deadline(20s));
    });
    while (!store->check({"arrival/" + std::to_string(i + 1)})) std::this_thread::sleep_for(1ms);
  }
  ranks.clear();
  return result;
}

TEST(Arrive, ReturnsWhenAllRanksAreThere) {
  for (const std::string& refusal : refusals({arrival(2, 3), arrival(0, 3), arrival(1, 3)}))
    EXPECT_EQ(refusal, "");
}

TEST(Arrive, RefusesOnAllRanksAtOnce) {
  Arrival twin = arrival(1, 4), nccl = arrival(1, 4);
  twin.pid = 7;
  twin.host_name = "b";
  nccl.backend = "nccl";
  const std::vector<std::pair<std::vector<Arrival>, std::string>> cases = {
      {{arrival(0, 4), arrival(1, 4), twin},
       "rank 1 joined twice: processes 101 on host a and 7 on host b"},
      {{arrival(0, 4), arrival(1, 3)},
       "got 4 for rank 0 (process 100 on host a) and 3 for rank 1 (process 101 on host a)"},
      {{arrival(0, 4), nccl}, "'gloo' for rank 0 (process 100 on host a) and 'nccl' for rank 1"}};
  for (const auto& [arrivals, part] : cases) {
    const auto start = Deadline::Clock::now();
    for (const std::string& refusal : refusals(arrivals)) testing::expect_contains(refusal, {part});
    EXPECT_LT(Deadline::Clock::now() - start, 5s);
  }
}

TEST(Arrive, RefusesARankThatTheLauncherOfAnotherOneHasStartedAsAnotherProcess) {
  Arrival first = arrival(0, 3), own = arrival(1, 3);
  first.processes = own.processes = "pid:[1]";
  Arrival foreign = own, unknown = own;
  first.launched = {100, {{0, 100, 1}, {1, 101, 1}}};
  own.launched = {101, first.launched.all};
  foreign.launched = {201, {{0, 200, 1}, {1, 201, 1}}};
  unknown.launched = {201, {}};
  const std::string refusal = refusals({first, foreign, arrival(2, 3)})[2];
  for (const char* const part : {"are of two jobs: its launcher has started process 101 as rank 1",
                                 "MASTER_ADDR:MASTER_PORT", "one TESSERA_JOB"})
    testing::expect_contains(refusal, {part});
  EXPECT_EQ(refusals({unknown, first, arrival(2, 3)})[0], refusals({first, unknown})[0]);
  EXPECT_EQ(refusals({own, first, arrival(2, 3)})[0], "");
  foreign.processes = "pid:[2]";  // the numbers are of other processes there
  EXPECT_EQ(refusals({foreign, first, arrival(2, 3)})[0], "");
}

TEST(RankProcesses, ContradictOnlyIfTheyMust) {
  const auto is_refused = [](const std::vector<RankProcess>& all, int rank, int64_t pid) {
    return !contradiction_of({10, all}, rank, pid).empty();
  };
  const RankProcess own{0, 10, 7};
  EXPECT_FALSE(is_refused({}, 1, 11)) << "nothing is known";
  EXPECT_FALSE(is_refused({own}, 1, 11)) << "each rank has a launcher of its own";
  EXPECT_FALSE(is_refused({own, {1, 11, 7}}, 1, 11));
  EXPECT_FALSE(is_refused({own, {1, 11, 8}, {2, 12, 7}}, 1, 11)) << "arguments differ by rank";
  EXPECT_FALSE(is_refused({own, {1, 11, 7}, {1, 12, 9}}, 1, 11)) << "beside another program";
  EXPECT_TRUE(is_refused({own, {1, 11, 7}, {1, 12, 9}}, 1, 12)) << "is that other program";
  EXPECT_TRUE(is_refused({own, {1, 11, 8}}, 1, 12)) << "of another launcher";
  EXPECT_TRUE(is_refused({own, {1, 11, 7}, {1, 12, 7}}, 1, 12)) << "started twice";
  EXPECT_TRUE(is_refused({own, {1, 11, 8}, {1, 12, 8}}, 1, 11)) << "with arguments of its own";
}

TEST(Arrive, RefusesARankThatComesAfterAllWereThere) {
  const auto refused = refusals({arrival(0, 2), arrival(1, 2), arrival(1, 2)});
  EXPECT_EQ(refused[0], "");
  EXPECT_EQ(refused[1], "");
  testing::expect_contains(refused[2], {"rank 1 joined twice"});
}

TEST(Agreement, TakesTheTransportThatARankAsksFor) {
  const auto of = [](std::vector<std::string> transports) {
    std::vector<Arrival> arrivals;
    for (const std::string& transport : transports)
      arrivals.push_back(arrival(static_cast<int>(arrivals.size()),
                                 static_cast<int>(transports.size()), transport));
    return agree(arrivals);
  };
  EXPECT_EQ(of({"auto", "auto"}).transport, Transport::kAuto);
  EXPECT_TRUE(of({"gloo", "gloo"}).warnings.empty());
  EXPECT_EQ(of({"auto", "arena"}).transport, Transport::kArena);
  EXPECT_TRUE(of({"auto", "arena"}).warnings.empty());
  const Agreement gloo = of({"auto", "auto", "gloo"});
  EXPECT_EQ(gloo.transport, Transport::kGloo);
  ASSERT_EQ(gloo.warnings.size(), 1);
  testing::expect_contains(gloo.warnings[0], {"rank 2 (process 102 on host a)"});
  const std::string refusal = of({"auto", "arena", "gloo"}).refusal;
  testing::expect_contains(refusal,
                           {"gloo for rank 2 (process 102 on host a) and arena for rank 1"});
}

TEST(Agreement, TakesTheLeastTimeout) {
  std::vector<Arrival> arrivals = {arrival(0, 2), arrival(1, 2)};
  arrivals[1].timeout = 500;
  const Agreement agreement = agree(arrivals);
  EXPECT_EQ(agreement.timeout, 500ms);
  EXPECT_EQ(agreement.warnings.size(), 1);
}

TEST(Agreement, SeesOneHostByItsNameOrByTheLauncher) {
  std::vector<Arrival> arrivals = {arrival(0, 2), arrival(1, 2)};
  EXPECT_TRUE(agree(arrivals).one_host);
  arrivals[1].host = "id of b";
  EXPECT_FALSE(agree(arrivals).one_host);
  arrivals[0].local_size = arrivals[1].local_size = 2;
  EXPECT_TRUE(agree(arrivals).one_host);
}

// Stops a rank as soon as it has given the others its address for the connections.
class StopsBeforeConnecting : public c10d::PrefixStore {
 public:
  using c10d::PrefixStore::PrefixStore;
  using c10d::PrefixStore::set;
  void set(const std::string& key, const std::vector<uint8_t>& value) override {
    c10d::PrefixStore::set(key, value);
    if (key.find("world/") != std::string::npos) std::this_thread::sleep_for(8s);
  }
};

TEST(Init, EndsInTimeIfARankStopsBeforeItConnects) {
  for (const Transport transport : {Transport::kGloo, Transport::kAuto}) {
    const auto keys = c10::make_intrusive<c10d::HashStore>();
    const c10::intrusive_ptr<c10d::Store> store =
        c10::make_intrusive<c10d::PrefixStore>("job", keys);
    const c10::intrusive_ptr<c10d::Store> stops =
        c10::make_intrusive<StopsBeforeConnecting>("job", keys);
    const auto expect_late = [transport](const c10::intrusive_ptr<c10d::Store>& own, int rank) {
      const Deadline deadline(2s);
      try {
        static_cast<void>(init(own, rank, 3, {.timeout = 2s, .transport = transport}));
        ADD_FAILURE() << "no exception";
      } catch (const c10::DistNetworkError& error) {
        const std::string text = error.what_without_backtrace();
        testing::expect_contains(text,
                                 {"could not connect to all other ranks", "all ranks are there"});
      }
      EXPECT_LT(deadline.waited(), 3s);
    };
    std::vector<std::jthread> ranks;
    for (int rank = 0; rank < 3; ++rank)
      ranks.emplace_back([=] { expect_late(rank == 1 ? stops : store, rank); });
  }
}

TEST(Init, RefusesDifferentTransportsOnAllRanks) {
  const auto store = c10::make_intrusive<c10d::HashStore>();
  std::vector<std::jthread> ranks;
  for (int rank = 0; rank < 2; ++rank)
    ranks.emplace_back([=] {
      const auto transport = rank == 0 ? Transport::kGloo : Transport::kArena;
      EXPECT_THROW(
          static_cast<void>(init(store, rank, 2, {.timeout = 20s, .transport = transport})),
          c10::DistNetworkError);
    });
}

// Counts the requests that a rank makes, each of which a server would have to answer.
class CountsRequests : public c10d::PrefixStore {
 public:
  using c10d::PrefixStore::PrefixStore;
  void set(const std::string& key, const std::vector<uint8_t>& value) override {
    ++requests;
    PrefixStore::set(key, value);
  }
  std::vector<uint8_t> get(const std::string& key) override {
    ++requests;
    return PrefixStore::get(key);
  }
  int64_t add(const std::string& key, int64_t value) override {
    ++requests;
    return PrefixStore::add(key, value);
  }
  bool check(const std::vector<std::string>& keys) override {
    ++requests;
    return PrefixStore::check(keys);
  }
  std::vector<std::vector<uint8_t>> multiGet(const std::vector<std::string>& keys) override {
    ++requests;
    return PrefixStore::multiGet(keys);
  }

  int requests = 0;
};

// The store answers all ranks: two requests for each pair of ranks would be 32 million.
TEST(Arrive, AsksForManyRanksAtOnce) {
  constexpr int kRanks = 4096;
  const auto store = c10::make_intrusive<c10d::HashStore>();
  CountsRequests counting("ranks", store);
  for (int rank = 0; rank + 1 < kRanks; ++rank) {
    const auto number = counting.add("arrivals", 1);
    static_cast<c10d::Store&>(counting).set("arrival/" + std::to_string(number),
                                            to_text(arrival(rank, kRanks)));
  }
  counting.requests = 0;
  Attendance last(arrival(kRanks - 1, kRanks), {});
  EXPECT_EQ(arrive(last, counting, Deadline(60s)), "");
  EXPECT_TRUE(last.missing().empty());
  EXPECT_LE(counting.requests, 3 + 2 * kRanks / 256);
}

// All ranks that wait together ask a store no more often than a few do.
TEST(Arrive, AsksSeldomWhereManyRanksWait) {
  CountsRequests counting("ranks", c10::make_intrusive<c10d::HashStore>());
  Attendance first(arrival(0, 4096), {});
  EXPECT_THROW(arrive(first, counting, Deadline(500ms)), c10::DistNetworkError);
  EXPECT_LE(counting.requests, 12);
}

// A rank that has its number, but has not written its facts.
TEST(Arrive, ReadsThoseBeforeARankThatIsLate) {
  CountsRequests counting("ranks", c10::make_intrusive<c10d::HashStore>());
  c10d::Store& store = counting;
  for (int rank = 0; rank < 8; ++rank) {
    const auto number = store.add("arrivals", 1);
    if (rank != 5) store.set("arrival/" + std::to_string(number), to_text(arrival(rank, 9)));
  }
  Attendance last(arrival(8, 9), {});
  EXPECT_THROW(arrive(last, counting, Deadline(300ms)), c10::DistNetworkError);
  EXPECT_EQ(last.missing(), (std::vector<int>{5, 6, 7}));
}

}  // namespace tessera::arrival_test
