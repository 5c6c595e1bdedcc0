// All-to-alls: every process group.
#include <gtest/gtest.h>
#include <tessera/comm/process_group_decorators.h>

#include "support/contract.h"
#include "support/error_of.h"
#include "support/test_device.h"

namespace tessera::testing::all_to_all_test {

using std::chrono::milliseconds;

using Numel = std::function<int64_t(int sender, int receiver)>;
using Messages = std::vector<torch::Tensor>;

// Pairs of ranks have values of their own: 3 i + 5 sender + receiver modulo 7, minus 3.
torch::Tensor message(int sender, int receiver, int64_t numel, torch::ScalarType dtype) {
  static Sequence numbers([](int64_t length) { return torch::arange(length) * 3 % 7 - 3; });
  const int64_t begin = (5 * sender + receiver) * 5 % 7;  // 3 times 5 is 1, modulo 7
  return on_test_device(numbers.slice(begin, begin + numel, dtype).clone());
}

Messages messages_to_all(const ProcessGroup& pg, const Numel& numel, torch::ScalarType dtype) {
  Messages to;
  for (int r = 0; r < pg.size(); ++r)
    to.push_back(message(pg.rank(), r, numel(pg.rank(), r), dtype));
  return to;
}

Messages places_for_all(const ProcessGroup& pg, const Numel& numel, torch::ScalarType dtype) {
  Messages from;
  for (int r = 0; r < pg.size(); ++r)
    from.push_back(on_test_device(torch::full({numel(r, pg.rank())}, 1, dtype)));
  return from;
}

void expect_received(const ProcessGroup& pg, const Messages& from, const Numel& numel,
                     torch::ScalarType dtype) {
  for (int r = 0; r < pg.size(); ++r) {
    const auto expected = message(r, pg.rank(), numel(r, pg.rank()), dtype);
    if (!from[r].defined()) {
      EXPECT_EQ(expected.numel(), 0);
      continue;
    }
    EXPECT_TRUE(torch::equal(from[r], expected))
        << expected.numel() << " of " << dtype << " from rank " << r << " to " << pg.rank();
  }
}

Numel even(int64_t numel) {
  return [numel](int, int) { return numel; };
}

struct AllToAllContract : ProcessGroupContract {
  Kind kind() const { return std::get<0>(GetParam()); }

  void SetUp() override {
    if (kind() == Kind::kBackend) TESSERA_ON_HOST_ONLY("Gloo sends tensors in host memory");
    if (kind() == Kind::kHosts) TESSERA_ON_HOST_ONLY("hosts send tensors in host memory");
  }

  // Even, uneven, with some empty, only to the next rank, only from one rank, empty, and so long
  // that they take several messages.
  std::vector<Numel> all_numels() const {
    const int n = size();
    return {even(16),
            [](int s, int r) { return 7 * s * s + 3 * r + 1; },
            [](int s, int r) { return (s + r) % 2 == 0 ? 0 : 5 + r; },
            [n](int s, int r) { return r == (s + 1) % n ? 9 : 0; },
            [n](int s, int) { return s == n - 1 ? 50'000 : 0; },
            even(0),
            [](int s, int r) { return 300'001 + 200'000 * s + 1000 * r; }};
  }
};

TEST_P(AllToAllContract, EachRankReceivesWhatEachSendsIt) {
  run([&](ProcessGroup& pg) {
    for (const auto& numel : all_numels()) {
      for (const auto dtype : {torch::kInt64, torch::kFloat, torch::kBFloat16, torch::kBool}) {
        auto from = places_for_all(pg, numel, dtype);
        const auto to = messages_to_all(pg, numel, dtype);
        pg.all_to_all(from, to, kTag)->wait_inputs();
        expect_received(pg, from, numel, dtype);
        for (int r = 0; r < pg.size(); ++r)
          EXPECT_TRUE(torch::equal(to[r], message(pg.rank(), r, to[r].numel(), dtype)));
      }
    }
  });
}

TEST_P(AllToAllContract, UndefinedAndEmptyTensorsStandForNothing) {
  run([&](ProcessGroup& pg) {
    const Numel numel = [](int s, int r) { return s < r ? 1000 * s + r : 0; };
    auto from = places_for_all(pg, numel, torch::kDouble);
    auto to = messages_to_all(pg, numel, torch::kDouble);
    for (auto* const messages : {&from, &to}) {
      for (int r = 0; r < pg.size(); ++r) {
        // The dtype and shape of an empty message do not matter.
        if ((*messages)[r].numel() == 0)
          // On a device, a rank must not pass undefined tensors alone.
          (*messages)[r] = r % 2 == 0 && (tests_on_host() || r != pg.rank())
                               ? torch::Tensor()
                               : on_test_device(torch::zeros({3, 0}, torch::kInt32));
      }
    }
    pg.all_to_all(from, to, kTag)->wait();
    for (int r = 0; r < pg.rank(); ++r) {
      EXPECT_TRUE(
          torch::equal(from[r], message(r, pg.rank(), numel(r, pg.rank()), torch::kDouble)));
    }
    if (tests_on_host() || pg.size() == 1) {
      pg.all_to_all(Messages(pg.size()), Messages(pg.size()), kTag)->wait_inputs();
    } else {  // nothing shows over which connection
      EXPECT_THROW(pg.all_to_all(Messages(pg.size()), Messages(pg.size()), kTag), c10::ValueError);
    }
  });
}

TEST_P(AllToAllContract, OwnMessageMayBeInPlace) {
  run([&](ProcessGroup& pg) {
    for (const int64_t numel : {0, 3, 400'000}) {
      auto to = messages_to_all(pg, even(numel), torch::kFloat);
      auto from = places_for_all(pg, even(numel), torch::kFloat);
      from[pg.rank()] = to[pg.rank()];
      pg.all_to_all(from, to, kTag)->wait();
      expect_received(pg, from, even(numel), torch::kFloat);
    }
  });
}

// Messages may be parts of one tensor, and one part may go to all ranks.
TEST_P(AllToAllContract, MessagesMayBeViewsAndTheSameForAll) {
  run([&](ProcessGroup& pg) {
    const int64_t n = 60'000;
    const auto all = on_test_device(torch::zeros({pg.size() * n}));
    const auto shard = on_test_device(torch::full({n + 2}, pg.rank() + 1.0F)).slice(0, 1, n + 1);
    Messages from;
    for (int r = 0; r < pg.size(); ++r) from.push_back(all.slice(0, r * n, (r + 1) * n));
    pg.all_to_all(from, Messages(pg.size(), shard), kTag)->wait();
    EXPECT_TRUE(torch::equal(
        all,
        on_test_device(torch::arange(1, pg.size() + 1).repeat_interleave(n).to(torch::kFloat))));
  });
}

TEST_P(AllToAllContract, InputsMayBeOverwrittenAfterWaitInputs) {
  run([&](ProcessGroup& pg) {
    std::vector<Messages> received;
    auto to = messages_to_all(pg, even(70'000), torch::kInt64);
    for (int round = 0; round < 6; ++round) {
      if (round % pg.size() == pg.rank()) std::this_thread::sleep_for(milliseconds(5));
      for (auto& tensor : to) tensor.fill_(100 * round + pg.rank());
      received.push_back(places_for_all(pg, even(70'000), torch::kInt64));
      pg.all_to_all(received.back(), to, kTag)->wait_inputs();
    }
    for (int round = 0; round < 6; ++round) {
      for (int r = 0; r < pg.size(); ++r)
        EXPECT_TRUE(received[round][r].eq(100 * round + r).all().item<bool>());
    }
  });
}

// Other collectives share its channel, and each rank has an order of its own among channels.
TEST_P(AllToAllContract, KeepsItsPlaceAmongOtherCollectives) {
  run([&](ProcessGroup& pg) {
    constexpr int kRounds = 12;
    std::vector<WorkPtr> works;
    std::vector<std::pair<Messages, Numel>> received;
    Messages sums;
    const auto issue = [&](Channel channel) {
      const CollectiveTag tag{.subject = "mixed", .channel = channel};
      for (int i = 0; i < kRounds; ++i) {
        const Numel numel = [i](int s, int r) { return 2000 * (i % 4) + 10 * s + r; };
        received.emplace_back(places_for_all(pg, numel, torch::kFloat), numel);
        works.push_back(
            pg.all_to_all(received.back().first, messages_to_all(pg, numel, torch::kFloat), tag));
        sums.push_back(on_test_device(torch::full({5}, i)));
        works.push_back(pg.all_reduce(sums.back(), ReduceOp::kSum, tag));
      }
    };
    const Channel channels[] = {Channel::kParams, Channel::kGrads, Channel::kControl};
    for (int k = 0; k < 3; ++k) issue(channels[pg.has_channels() ? (k + pg.rank()) % 3 : k]);
    for (auto work = works.rbegin(); work != works.rend(); ++work) (*work)->wait();
    for (const auto& [from, numel] : received) expect_received(pg, from, numel, torch::kFloat);
    for (size_t i = 0; i < sums.size(); ++i)
      EXPECT_EQ(sums[i][4].item<int64_t>(), static_cast<int64_t>(i % kRounds) * pg.size());
  });
}

TEST_P(AllToAllContract, CompletionCanBePolled) {
  run([&](ProcessGroup& pg) {
    auto from = places_for_all(pg, even(1000), torch::kFloat);
    const auto work = pg.all_to_all(from, messages_to_all(pg, even(1000), torch::kFloat), kTag);
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(20);
    while (!work->is_completed() && std::chrono::steady_clock::now() < deadline)
      std::this_thread::yield();
    EXPECT_TRUE(work->is_completed());
    work->wait();
    expect_received(pg, from, even(1000), torch::kFloat);
  });
}

void expect_refused(ProcessGroup& pg, const Messages& from, const Messages& to,
                    const std::string& why) {
  try {
    pg.all_to_all(from, to, kTag);
    ADD_FAILURE() << "accepted where \"" << why << "\" was expected";
  } catch (const c10::ValueError& error) {
    const std::string text = error.what_without_backtrace();
    for (const std::string& part :
         {std::string("[all_to_all] "), why, "rank " + std::to_string(pg.rank()) + " of "})
      expect_contains(text, {part});
  }
}

Messages with(Messages messages, size_t rank, torch::Tensor tensor) {
  messages[rank] = std::move(tensor);
  return messages;
}

TEST_P(AllToAllContract, RefusesWrongArgumentsOnThisRank) {
  run([&](ProcessGroup& pg) {
    const size_t n = pg.size(), own = pg.rank(), last = n - 1;
    const auto from = places_for_all(pg, even(6), torch::kFloat);
    const auto to = messages_to_all(pg, even(6), torch::kFloat);
    expect_refused(pg, Messages(n + 1), to, "an entry for each rank");
    expect_refused(pg, from, Messages(n - 1), "an entry for each rank");
    expect_refused(pg, {}, {}, "an entry for each rank");
    expect_refused(pg, from, with(to, last, on_test_device(torch::zeros({6}, torch::kDouble))),
                   "one dtype");
    expect_refused(pg, with(from, 0, on_test_device(torch::zeros({6}, torch::kInt64))), to,
                   "one dtype");
    expect_refused(pg, from, with(to, last, on_test_device(torch::zeros({12})).slice(0, 0, 12, 2)),
                   "1-D and contiguous");
    expect_refused(pg, with(from, 0, on_test_device(torch::zeros({2, 3}))), to,
                   "1-D and contiguous");
    if (tests_on_host())  // the simulated device has no sparse tensors
      expect_refused(pg, from, with(to, 0, torch::zeros({6}).to_sparse()), "dense");
    expect_refused(pg, from, with(to, own, on_test_device(torch::zeros({7}))), "message to itself");
    expect_refused(pg, with(from, own, torch::Tensor()), to, "message to itself");
    pg.barrier(kTag);  // and everything still works
    pg.all_to_all(from, to, kTag)->wait();
    expect_received(pg, from, even(6), torch::kFloat);
  });
}

TEST_P(AllToAllContract, RefusesWhatOverlaps) {
  run([&](ProcessGroup& pg) {
    const size_t own = pg.rank();
    const auto from = places_for_all(pg, even(6), torch::kFloat);
    const auto to = messages_to_all(pg, even(6), torch::kFloat);
    const auto memory = on_test_device(torch::zeros({12}));
    expect_refused(pg, with(from, own, memory.slice(0, 0, 6)), with(to, own, memory.slice(0, 1, 7)),
                   "may overlap");
    if (pg.size() > 1) {
      const size_t other = own == 0 ? 1 : 0;
      expect_refused(pg, with(from, other, to[own]), to, "may overlap");
      expect_refused(pg, with(from, other, to[other]), to, "may overlap");
      expect_refused(pg, with(from, other, from[own]), to, "may overlap");
    }
    pg.barrier(kTag);
  });
}

TEST_P(AllToAllContract, DecoratorsCountAndRecord) {
  const auto transport = kind() == Kind::kArena ? Transport::kArena : Transport::kGloo;
  run_over(transport, size(), [&](World& world) {
    const auto counting = counting_process_group(make_process_group(kind(), world));
    const auto tracing = tracing_process_group(counting);
    const Numel numel = [](int s, int r) { return 100 * s + 10 * r; };
    int64_t own = numel(world.rank(), world.rank()) * 2, all = 0;
    for (int r = 0; r < world.size(); ++r) all += numel(world.rank(), r) * 2;
    for (int calls = 1; calls <= 2; ++calls) {
      auto from = places_for_all(*tracing, numel, torch::kBFloat16);
      tracing->all_to_all(from, messages_to_all(*tracing, numel, torch::kBFloat16), kTag)->wait();
      expect_received(*tracing, from, numel, torch::kBFloat16);
      const CollectiveCounts counts = counting->counts();
      EXPECT_EQ(counts.all_to_all.calls, calls);
      EXPECT_EQ(counts.all_to_all.bytes_sent,
                kind() == Kind::kArena && tests_on_host() && size() > 1 ? 0 : calls * (all - own));
      EXPECT_EQ(counts.calls(), calls);
      EXPECT_EQ(counts.bytes_sent(), counts.all_to_all.bytes_sent);
    }
    EXPECT_THROW(tracing->all_to_all({}, Messages(1), kTag), c10::ValueError);
    EXPECT_EQ(counting->counts().calls(), 2);
    const CollectiveRecord record = tracing->records()[1];
    EXPECT_EQ(record.name, "all_to_all");
    EXPECT_EQ(record.subject, "contract");
    EXPECT_EQ(record.channel, Channel::kGrads);
    EXPECT_EQ(record.bytes, all);
    EXPECT_GE(record.completed_us, record.issued_us);
  });
}

TEST_P(AllToAllContract, FaultsAreInjected) {
  run([&](ProcessGroup& pg) {
    // A wrapper of the same ranks: all of them fail, and go on, together.
    const auto faulty = fault_process_group(ProcessGroupPtr(&pg, [](ProcessGroup*) {}),
                                            {{.name = "all_to_all", .nth = 1}});
    const auto exchange = [&] {
      auto from = places_for_all(pg, even(4), torch::kFloat);
      faulty->all_to_all(from, messages_to_all(pg, even(4), torch::kFloat), kTag)->wait();
      expect_received(pg, from, even(4), torch::kFloat);
    };
    exchange();
    EXPECT_THROW(exchange(), c10::DistBackendError);
    exchange();
  });
}

TESSERA_CONTRACT(AllToAllContract, 1, 2, 3, 4);

struct AllToAllOnHosts : AllToAllContract {};

TEST_P(AllToAllOnHosts, EachRankReceivesWhatEachSendsIt) {
  run([&](ProcessGroup& pg) {
    for (const auto& numel : all_numels()) {
      auto from = places_for_all(pg, numel, torch::kFloat);
      pg.all_to_all(from, messages_to_all(pg, numel, torch::kFloat), kTag)->wait();
      expect_received(pg, from, numel, torch::kFloat);
    }
  });
}

INSTANTIATE_TEST_SUITE_P(SeveralHosts, AllToAllOnHosts,
                         ::testing::Combine(::testing::Values(Kind::kHosts),
                                            ::testing::Values(4, 6)),
                         [](const auto& info) {
                           return std::to_string(std::get<1>(info.param)) + "Ranks";
                         });

// The message that rank 0 sends to rank 1, and the one that rank 1 expects.
struct Disagreement {
  std::string name;
  torch::Tensor sent, expected;
};

class AllToAllDisagreement : public ::testing::TestWithParam<std::tuple<Kind, Disagreement>> {};

// No rank may accept a message that does not match, and at least one gets an error; where the ranks
// can compare beforehand, all get one, and go on.
TEST_P(AllToAllDisagreement, IsAnErrorThatNamesTheCollective) {
  TESSERA_ON_HOST_ONLY("the backend of a device checks messages itself");
  const auto& [kind, disagreement] = GetParam();
  const bool all_are_told = kind != Kind::kGloo;
  std::atomic<int> returned{0}, failed{0};
  run_over(
      kind == Kind::kArena ? Transport::kArena : Transport::kGloo, 2,
      [&](World& world) {
        const auto made = make_process_group(kind, world);
        auto& pg = *made;
        Messages from(2), to(2);
        const auto expected = disagreement.expected;
        if (world.rank() == 0) to[1] = disagreement.sent;
        if (world.rank() == 1 && expected.defined()) from[0] = expected.clone();
        try {
          pg.all_to_all(from, to, {.subject = "x", .channel = Channel::kParams})->wait();
        } catch (const c10::DistBackendError& error) {
          const std::string text = error.what_without_backtrace();
          for (const std::string& part : {std::string("[all_to_all] unit 'x'"),
                                          "rank " + std::to_string(world.rank()) + " of 2",
                                          std::string(all_are_told ? "rank 0 sends " : "timeout")})
            expect_contains(text, {part});
          ++failed;
        }
        if (world.rank() == 1 && expected.defined()) {
          EXPECT_TRUE(torch::equal(from[0], expected));
        }
        if (all_are_told) {
          auto next = places_for_all(pg, even(3), torch::kFloat);
          pg.all_to_all(next, messages_to_all(pg, even(3), torch::kFloat), kTag)->wait();
          expect_received(pg, next, even(3), torch::kFloat);
        }
        ++returned;
        while (returned < 2) std::this_thread::sleep_for(milliseconds(5));
      },
      milliseconds(700));
  EXPECT_GE(failed, all_are_told ? 2 : 1);
}

INSTANTIATE_TEST_SUITE_P(
    All, AllToAllDisagreement,
    ::testing::Combine(
        ::testing::Values(Kind::kGloo, Kind::kBackend, Kind::kArena),
        ::testing::Values(
            Disagreement{"TooLong", torch::ones({5}), torch::zeros({4})},
            Disagreement{"TooShort", torch::ones({4}), torch::zeros({5})},
            Disagreement{"ShorterByAMessage", torch::ones({1 << 18}), torch::zeros({1 << 19})},
            Disagreement{"NotExpected", torch::ones({5}), torch::Tensor()},
            Disagreement{"NotSent", torch::Tensor(), torch::zeros({5})},
            Disagreement{"OfAnotherDtype", torch::ones({5}), torch::zeros({5}, torch::kInt32)})),
    [](const auto& info) {
      return kind_name(std::get<0>(info.param)) + std::get<1>(info.param).name;
    });

}  // namespace tessera::testing::all_to_all_test
