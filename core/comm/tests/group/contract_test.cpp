// The contract of all process groups, checked for each implementation and for 1 to 4 ranks.
#include "support/contract.h"

#include <gtest/gtest.h>

#include "support/models.h"
#include "support/test_device.h"

namespace tessera::testing::contract_test {

// On a device, the worlds' process groups pass each collective to its backend.
struct ProcessGroupContract : testing::ProcessGroupContract {
  void SetUp() override {
    const Kind kind = std::get<0>(GetParam());
    if (kind == Kind::kBackend) TESSERA_ON_HOST_ONLY("Gloo sends tensors in host memory");
    if (kind == Kind::kHosts) TESSERA_ON_HOST_ONLY("hosts send tensors in host memory");
  }
};

torch::Tensor values(int64_t numel, torch::ScalarType dtype, int rank) {
  return on_test_device(testing::values(numel, dtype, rank));
}

TEST_P(ProcessGroupContract, AllGatherConcatenatesTheShards) {
  run([&](ProcessGroup& pg) {
    for (const auto& bounds : all_bounds()) {
      for (const auto dtype : kDtypes) {
        const auto expected = values(bounds.back(), dtype, 0);
        auto flat = on_test_device(torch::full({bounds.back()}, 77, dtype));
        auto shard = part(expected, bounds, pg.rank()).clone();
        pg.all_gather(flat, shard, bounds, kTag)->wait_inputs();
        EXPECT_TRUE(torch::equal(flat, expected)) << "rank " << pg.rank() << ' ' << dtype << bounds;
      }
    }
  });
}

TEST_P(ProcessGroupContract, AllGatherWorksInPlace) {
  run([&](ProcessGroup& pg) {
    for (const auto& bounds : all_bounds()) {
      const auto expected = values(bounds.back(), torch::kFloat, 0);
      auto flat = on_test_device(torch::zeros({bounds.back()}));
      part(flat, bounds, pg.rank()).copy_(part(expected, bounds, pg.rank()));
      pg.all_gather(flat, part(flat, bounds, pg.rank()), bounds, kTag)->wait();
      EXPECT_TRUE(torch::equal(flat, expected)) << "rank " << pg.rank() << bounds;
    }
  });
}

TEST_P(ProcessGroupContract, ReduceScatterSumsAndScales) {
  run([&](ProcessGroup& pg) {
    for (const auto& bounds : all_bounds()) {
      for (const auto dtype : kDtypes) {
        auto sum = on_test_device(torch::zeros({bounds.back()}, dtype));
        for (int r = 0; r < pg.size(); ++r) {
          sum += values(bounds.back(), dtype, r);
        }
        const auto flat = values(bounds.back(), dtype, pg.rank());
        auto out = torch::full_like(part(flat, bounds, pg.rank()), 5);
        const double scale = dtype == torch::kInt64 ? 2.0 : 0.5;
        pg.reduce_scatter(out, {{0, flat, flat.numel()}}, bounds, {.scale = scale}, kTag)->wait();
        const auto expected =
            part(sum, bounds, pg.rank()) * on_test_device(torch::tensor(scale, dtype));
        EXPECT_TRUE(torch::equal(out, expected)) << "rank " << pg.rank() << ' ' << dtype << bounds;
      }
    }
  });
}

TEST_P(ProcessGroupContract, ReduceScatterTakesPiecesAndAccumulates) {
  run([&](ProcessGroup& pg) {
    for (const auto& bounds : all_bounds()) {
      for (const bool accumulate : {false, true}) {
        auto sum = on_test_device(torch::zeros({bounds.back()}));
        std::vector<Piece> pieces;
        torch::Tensor covered;
        for (int r = 0; r < pg.size(); ++r) {
          auto flat = values(bounds.back(), torch::kFloat, r);
          Cut pieces_of_rank = cut(flat, /*with_undefined=*/r % 2 == 0);
          sum += flat;
          if (r == pg.rank()) {
            pieces = pieces_of_rank.pieces;
          }
          covered = pieces_of_rank.covered;
        }
        auto out = on_test_device(torch::full({bounds[pg.rank() + 1] - bounds[pg.rank()]}, 3.0));
        const auto base = accumulate ? out.clone() : torch::zeros_like(out);
        const auto expected = torch::where(part(on_test_device(covered), bounds, pg.rank()),
                                           base + 0.25 * part(sum, bounds, pg.rank()), out);
        pg.reduce_scatter(out, std::move(pieces), bounds, {.scale = 0.25, .accumulate = accumulate},
                          kTag)
            ->wait();
        EXPECT_TRUE(torch::equal(out, expected)) << "rank " << pg.rank() << bounds;
      }
    }
  });
}

TEST_P(ProcessGroupContract, ReduceScatterGathersItsSumsOrIsRefused) {
  const Kind kind = std::get<0>(GetParam());
  run([&](ProcessGroup& pg) {
    const bool gathers = pg.transport().gathers_sums();
    if (tests_on_host()) {
      EXPECT_EQ(gathers, kind != Kind::kBackend && (kind != Kind::kArena || pg.size() == 1));
    }
    for (const auto& bounds : all_bounds()) {
      for (const auto& [dtype, out_dtype] :
           {std::pair(torch::kFloat, torch::kFloat), std::pair(torch::kDouble, torch::kDouble),
            std::pair(torch::kBFloat16, torch::kFloat)}) {
        for (const bool accumulate : {false, true}) {
          auto sum = on_test_device(torch::zeros({bounds.back()}, out_dtype));
          Cut own;
          for (int r = 0; r < pg.size(); ++r) {
            const auto flat = values(bounds.back(), dtype, r).clone();
            Cut of_rank = cut(flat, /*with_undefined=*/r % 2 == 0);
            sum += flat;
            if (r == pg.rank()) own = of_rank;
          }
          // In the gaps between pieces, each rank's own values stay and are gathered.
          auto all = on_test_device(torch::full({bounds.back()}, 3.0, out_dtype));
          const auto expected =
              torch::where(on_test_device(own.covered), 0.25 * sum + (accumulate ? 3 : 0), all);
          const auto reduce = [&] {
            pg.reduce_scatter(
                  part(all, bounds, pg.rank()), std::move(own.pieces), bounds,
                  {.scale = 0.25, .accumulate = accumulate, .dtype = dtype, .gather_into = all},
                  kTag)
                ->wait();
          };
          if (gathers) {
            reduce();
            EXPECT_TRUE(torch::equal(all, expected))
                << "rank " << pg.rank() << ' ' << dtype << bounds;
            all.fill_(-1);  // is allowed now
          } else {
            expect_error([&] { reduce(); }, {"[reduce_scatter]", "`gather_into`", "all_gather()"});
          }
        }
      }
    }
  });
}

TEST_P(ProcessGroupContract, RefusesAGatherIntoMemoryThatDoesNotFit) {
  run([&](ProcessGroup& pg) {
    std::vector<int64_t> bounds(pg.size() + 1);
    for (int r = 0; r <= pg.size(); ++r) bounds[r] = 256 * r;
    const auto all = on_test_device(torch::zeros({bounds.back()}));
    const auto reduce = [&](const torch::Tensor& out, ReduceScatterOptions options) {
      return [&pg, &bounds, out, options = std::move(options)] {
        pg.reduce_scatter(out, {}, bounds, options, kTag);
      };
    };
    const auto own = part(all, bounds, pg.rank());
    expect_error(reduce(own.clone(), {.gather_into = all}), {"`out`", "place in `gather_into`"});
    expect_error(reduce(own, {.gather_into = own.slice(0, 1)}), {"`gather_into`", "elements"});
    expect_error(reduce(own, {.gather_into = all.to(torch::kDouble)}), {"`gather_into`", "dtype"});
    expect_error(reduce(own, {.encoding = Encoding::kInt8, .gather_into = all}),
                 {"`gather_into`", "encoding"});
  });
}

TEST_P(ProcessGroupContract, AllReduceSumsAndCompares) {
  run([&](ProcessGroup& pg) {
    const int n = pg.size();
    for (const int64_t numel : {0, 1, 5, 3000, 1'000'003}) {
      for (const auto dtype : kDtypes) {
        const auto own = values(numel, dtype, pg.rank());
        auto sum = own.clone(), largest = own.clone(), smallest = own.clone();
        std::vector<WorkPtr> works{pg.all_reduce(sum, ReduceOp::kSum, kTag),
                                   pg.all_reduce(largest, ReduceOp::kMax, kTag),
                                   pg.all_reduce(smallest, ReduceOp::kMin, kTag)};
        for (const auto& work : works) {
          work->wait();
        }
        auto expected = torch::zeros_like(own);
        for (int r = 0; r < n; ++r) {
          expected += values(numel, dtype, r);
        }
        EXPECT_TRUE(torch::equal(sum, expected)) << numel << ' ' << dtype;
        EXPECT_TRUE(torch::equal(largest, values(numel, dtype, n - 1))) << numel << ' ' << dtype;
        EXPECT_TRUE(torch::equal(smallest, values(numel, dtype, 0))) << numel << ' ' << dtype;
      }
    }
  });
}

TEST_P(ProcessGroupContract, BroadcastCopiesFromEachRoot) {
  run([&](ProcessGroup& pg) {
    for (int root = 0; root < pg.size(); ++root) {
      for (const int64_t numel : {0, 1, 500'000}) {
        auto tensor = values(numel, torch::kDouble, pg.rank());
        pg.broadcast(tensor, root, kTag)->wait();
        EXPECT_TRUE(torch::equal(tensor, values(numel, torch::kDouble, root)));
      }
    }
  });
}

// A tensor that LibTorch only marks as negated: its memory holds the opposite values.
torch::Tensor noted(const torch::Tensor& tensor) { return at::_neg_view(-tensor); }

TEST_P(ProcessGroupContract, NegatedAndConjugatedTensorsAreSentAndReceivedAsTheirValues) {
  run([&](ProcessGroup& pg) {
    const std::vector<int64_t> bounds = all_bounds()[1];
    const auto whole = values(bounds.back(), torch::kFloat, 0);
    const auto own = part(whole, bounds, pg.rank());
    const auto sum = whole * pg.size() + pg.size() * (pg.size() - 1) / 2;
    const auto flat = noted(torch::full_like(whole, 77));
    pg.all_gather(flat, noted(own), bounds, kTag)->wait();
    EXPECT_TRUE(torch::equal(flat, whole)) << flat << whole;
    const auto z = torch::complex(whole, whole + 1), all = torch::zeros_like(z).conj();
    const auto conjugate = torch::conj(part(z.conj().resolve_conj(), bounds, pg.rank()));
    ASSERT_TRUE(conjugate.is_conj() && all.is_conj());
    pg.all_gather(all, conjugate, bounds, kTag)->wait();
    EXPECT_TRUE(torch::equal(all.resolve_conj(), z));
    const auto term = whole + pg.rank(), out = noted(torch::zeros_like(own));
    pg.reduce_scatter(out, {{0, noted(term), term.numel()}}, bounds, {}, kTag)->wait();
    EXPECT_TRUE(torch::equal(out, part(sum, bounds, pg.rank()))) << out;
    for (const ReduceOp op : {ReduceOp::kSum, ReduceOp::kMax}) {
      const auto reduced = noted(term);
      pg.all_reduce(reduced, op, kTag)->wait();
      EXPECT_TRUE(torch::equal(reduced, op == ReduceOp::kSum ? sum : whole + pg.size() - 1));
    }
    const auto copied = noted(term);
    pg.broadcast(copied, pg.size() - 1, kTag)->wait();
    EXPECT_TRUE(torch::equal(copied, whole + pg.size() - 1));
    std::vector<at::Tensor> from, to;
    for (int r = 0; r < pg.size(); ++r) {
      from.push_back(noted(on_test_device(torch::zeros({3}))));
      to.push_back(noted(on_test_device(torch::full({3}, 10. * pg.rank() + r))));
    }
    pg.all_to_all(from, to, kTag)->wait();
    for (int r = 0; r < pg.size(); ++r)
      EXPECT_TRUE(torch::equal(from[r], on_test_device(torch::full({3}, 10. * r + pg.rank()))))
          << from[r];
  });
}

// The gradients of functions that are constant, as `sgn()` is, have no memory.
TEST_P(ProcessGroupContract, ZerosWithoutMemoryAreSentAsZeros) {
  run([&](ProcessGroup& pg) {
    const std::vector<int64_t> bounds = all_bounds()[1];
    const auto ones = on_test_device(torch::ones({bounds.back()}));
    const auto zeros = [&](const at::Tensor& like) {
      return at::_efficientzerotensor(like.sizes(), like.options());
    };
    const auto own = part(ones, bounds, pg.rank());
    const bool is_zero = pg.rank() == 0;
    const auto flat = ones.clone();
    pg.all_gather(flat, zeros(own), bounds, kTag)->wait();
    EXPECT_TRUE(torch::equal(flat, torch::zeros_like(flat)));
    const auto out = own.clone();
    pg.reduce_scatter(out, {{0, is_zero ? zeros(ones) : ones, ones.numel()}}, bounds, {}, kTag)
        ->wait();
    EXPECT_TRUE(torch::equal(out, own * (pg.size() - 1)));
    std::vector<at::Tensor> from, to;
    for (int r = 0; r < pg.size(); ++r) {
      from.push_back(on_test_device(torch::ones({3})));
      to.push_back(zeros(from.back()));
    }
    pg.all_to_all(from, to, kTag)->wait();
    for (const at::Tensor& message : from)
      EXPECT_TRUE(torch::equal(message, torch::zeros_like(message)));
  });
}

TEST_P(ProcessGroupContract, BarrierWaitsForTheLastRank) {
  std::atomic<int> arrived{0};
  run([&](ProcessGroup& pg) {
    if (pg.rank() == pg.size() - 1) {
      std::this_thread::sleep_for(std::chrono::milliseconds(100));
    }
    ++arrived;
    pg.barrier(kTag);
    EXPECT_EQ(arrived, pg.size());
  });
}

TEST_P(ProcessGroupContract, AllGatherBytesReturnsEachRanksText) {
  run([&](ProcessGroup& pg) {
    const auto text = [](int rank) { return std::string(rank * 1000 % 1999, 'a' + rank); };
    const auto all = all_gather_bytes(pg, text(pg.rank()), kTag);
    ASSERT_EQ(all.size(), static_cast<size_t>(pg.size()));
    for (int r = 0; r < pg.size(); ++r) {
      EXPECT_EQ(all[r], text(r));
    }
  });
}

TEST_P(ProcessGroupContract, CompletionCanBePolled) {
  run([&](ProcessGroup& pg) {
    auto flat = on_test_device(torch::zeros({pg.size() * 1000}));
    auto shard = on_test_device(torch::ones({1000}));
    std::vector<int64_t> bounds(pg.size() + 1);
    for (int r = 0; r <= pg.size(); ++r) {
      bounds[r] = 1000 * r;
    }
    auto out = on_test_device(torch::zeros({1000}));
    const auto input = torch::ones_like(flat);
    auto number = on_test_device(torch::ones({1})),
         other = on_test_device(torch::full({7}, pg.rank()));
    const std::vector<WorkPtr> works{
        pg.all_gather(flat, shard, bounds, kTag),
        pg.reduce_scatter(out, {{0, input, input.numel()}}, bounds, {}, kTag),
        pg.all_reduce(number, ReduceOp::kSum, kTag), pg.broadcast(other, 0, kTag)};
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(20);
    for (const auto& work : works) {
      while (!work->is_completed() && std::chrono::steady_clock::now() < deadline) {
        std::this_thread::yield();
      }
      EXPECT_TRUE(work->is_completed());
      work->wait();
    }
    EXPECT_EQ(out.sum().item<double>(), 1000.0 * pg.size());
    EXPECT_EQ(flat.sum().item<double>(), 1000.0 * pg.size());
    EXPECT_EQ(number.item<double>(), pg.size());
    EXPECT_EQ(other.sum().item<double>(), 0);
  });
}

TEST_P(ProcessGroupContract, RefusesWrongArgumentsOnThisRank) {
  run([&](ProcessGroup& pg) {
    const int n = pg.size();
    std::vector<int64_t> bounds(n + 1);
    for (int r = 0; r <= n; ++r) {
      bounds[r] = 4 * r;
    }
    auto flat = on_test_device(torch::zeros({4 * n}));
    auto shard = on_test_device(torch::zeros({4}));
    auto gaps = on_test_device(torch::zeros({8})).slice(0, 0, 8, 2);
    const auto long_bounds = std::vector<int64_t>(n + 2, 0);
    EXPECT_THROW(pg.all_gather(flat, shard, long_bounds, kTag), c10::ValueError);
    EXPECT_THROW(pg.all_gather(flat, gaps, bounds, kTag), c10::ValueError);
    EXPECT_THROW(pg.all_gather(flat, on_test_device(torch::zeros({5})), bounds, kTag),
                 c10::ValueError);
    EXPECT_THROW(pg.all_gather(flat, shard.to(torch::kDouble), bounds, kTag), c10::ValueError);
    EXPECT_THROW(pg.all_gather(torch::Tensor(), shard, bounds, kTag), c10::ValueError);
    EXPECT_THROW(pg.reduce_scatter(shard, {{4 * n, shard, 4}}, bounds, {}, kTag), c10::ValueError);
    EXPECT_THROW(pg.reduce_scatter(shard, {{0, shard, 3}}, bounds, {}, kTag), c10::ValueError);
    EXPECT_THROW(pg.all_reduce(gaps, ReduceOp::kSum, kTag), c10::ValueError);
    EXPECT_THROW(pg.broadcast(shard, n, kTag), c10::ValueError);
    pg.barrier(kTag);  // and everything still works
  });
}

TESSERA_CONTRACT(ProcessGroupContract, 1, 2, 3, 4);

INSTANTIATE_TEST_SUITE_P(SeveralHosts, ProcessGroupContract,
                         ::testing::Combine(::testing::Values(Kind::kHosts),
                                            ::testing::Values(4, 6)),
                         [](const auto& info) {
                           return "Hosts" + std::to_string(std::get<1>(info.param)) + "Ranks";
                         });

}  // namespace tessera::testing::contract_test
