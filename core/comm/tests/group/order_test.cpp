// Ranks that issue collectives of equal sizes in different orders must not mix up their tensors.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <set>
#include <string>
#include <vector>

#include "comm/group/collective_form.h"
#include "support/contract.h"
#include "support/error_of.h"

namespace tessera::testing::order_test {

using namespace std::chrono_literals;

constexpr CollectiveTag kFirst{.subject = "first", .channel = Channel::kControl};
constexpr CollectiveTag kLast{.subject = "after first and second", .channel = Channel::kControl};
constexpr CollectiveTag kSecond{.subject = "second", .channel = Channel::kControl};

class OrderOfCollectives : public ::testing::TestWithParam<Kind> {
 protected:
  // `issue` waits for the collective that it issues.
  static void expect_refused(
      const std::function<void(ProcessGroup&, const CollectiveTag&)>& issue) {
    const auto transport = GetParam() == Kind::kArena ? Transport::kArena : Transport::kGloo;
    const auto on_rank = [&](World& world) {
      const auto pg = make_process_group(GetParam(), world);
      const bool is_first = world.rank() == 0;
      try {
        issue(*pg, is_first ? kFirst : kSecond);
        issue(*pg, is_first ? kSecond : kFirst);
        pg->barrier(kLast);  // a mere sender learns it from the others' silence
        ADD_FAILURE() << "rank " << world.rank() << " was told nothing";
      } catch (const c10::DistBackendError& error) {
        const std::string text = error.what_without_backtrace();
        expect_contains(text, {is_first ? "first" : "second"});
      }
    };
    GetParam() == Kind::kHosts ? run_hosts(4, by_halves, on_rank, 500ms)
                               : run_over(transport, 2, on_rank, 500ms);
  }
};

TEST_P(OrderOfCollectives, MustBeTheSameOnAllRanks) {
  expect_refused([](ProcessGroup& pg, const CollectiveTag& tag) {
    pg.all_reduce(torch::ones({100}), ReduceOp::kSum, tag)->wait();
  });
  expect_refused([](ProcessGroup& pg, const CollectiveTag& tag) {
    pg.broadcast(torch::ones({100}), 0, tag)->wait();
  });
  expect_refused([](ProcessGroup& pg, const CollectiveTag& tag) {
    std::vector<int64_t> bounds{0};
    for (int r = 0; r < pg.size(); ++r) bounds.push_back(bounds.back() + 8);
    pg.all_gather(torch::zeros({bounds.back()}), torch::ones({8}), bounds, tag)->wait();
  });
  expect_refused([](ProcessGroup& pg, const CollectiveTag& tag) {
    std::vector<int64_t> bounds{0};
    for (int r = 0; r < pg.size(); ++r) bounds.push_back(bounds.back() + 8);
    const auto flat = torch::ones({bounds.back()});
    pg.reduce_scatter(torch::zeros({8}), {{0, flat, flat.numel()}}, bounds, {}, tag)->wait();
  });
  expect_refused([](ProcessGroup& pg, const CollectiveTag& tag) {
    std::vector<at::Tensor> from, to;
    for (int r = 0; r < pg.size(); ++r) {
      from.push_back(torch::zeros({8}));
      to.push_back(torch::ones({8}));
    }
    pg.all_to_all(from, to, tag)->wait();
  });
}

TEST_P(OrderOfCollectives, CountsTheOperatorsOfReductions) {
  expect_refused([](ProcessGroup& pg, const CollectiveTag& tag) {
    const auto op = tag.subject == kFirst.subject ? ReduceOp::kMax : ReduceOp::kSum;
    pg.all_reduce(torch::ones({100}), op, {"first and second", Channel::kGrads})->wait();
  });
}

INSTANTIATE_TEST_SUITE_P(All, OrderOfCollectives,
                         ::testing::Values(Kind::kGloo, Kind::kBackend, Kind::kArena, Kind::kHosts),
                         [](const auto& info) { return kind_name(info.param); });

TEST(CollectiveForm, TellsWhatIsExchanged) {
  const CollectiveTag tag{.subject = "blocks.3", .channel = Channel::kGrads};
  const std::vector<int64_t> parts{0, 2, 6};
  EXPECT_EQ(form_of(AllReduce{torch::ones({100}), ReduceOp::kMax}, tag).text(),
            "all_reduce of unit 'blocks.3': 100 elements of Float, max");
  EXPECT_EQ(form_of(AllGather{torch::ones({6}), {}, parts}, tag).text(),
            "all_gather of unit 'blocks.3': 6 elements of Float, parts of 2, 4");
  EXPECT_EQ(form_of(Broadcast{torch::ones({6}), 1}, tag).text(),
            "broadcast of unit 'blocks.3': 6 elements of Float, from rank 1");
}

TEST(CollectiveForm, DiffersWithEachOfItsParts) {
  const CollectiveTag tag{.subject = "blocks.3", .channel = Channel::kGrads};
  const auto flat = torch::ones({6});
  const std::vector<int64_t> some{0, 2, 6}, others{0, 4, 6};
  std::set<uint64_t> fingerprints{
      form_of(AllGather{flat, {}, some}, tag).fingerprint(),
      form_of(AllGather{flat, {}, others}, tag).fingerprint(),
      form_of(AllGather{flat.to(torch::kInt), {}, some}, tag).fingerprint(),
      form_of(AllGather{flat, {}, some}, {"blocks.4", Channel::kGrads}).fingerprint(),
      form_of(AllGather{flat, {}, some}, {"blocks.3", Channel::kParams}).fingerprint(),
      form_of(AllReduce{flat, ReduceOp::kSum}, tag).fingerprint(),
      form_of(AllReduce{flat, ReduceOp::kMin}, tag).fingerprint(),
      form_of(Broadcast{flat, 0}, tag).fingerprint(),
      form_of(Broadcast{flat, 1}, tag).fingerprint(),
  };
  EXPECT_EQ(fingerprints.size(), 9);
}

}  // namespace tessera::testing::order_test
