// Reductions whose messages have another dtype than their result: every process group.
#include <gtest/gtest.h>
#include <tessera/comm/process_group_decorators.h>

#include "support/contract.h"
#include "support/test_device.h"

namespace tessera::testing::message_dtype_test {

struct MessageDtypeContract : ProcessGroupContract {
  Kind kind() const { return std::get<0>(GetParam()); }
  // A c10d backend adds messages up itself, in their dtype.
  bool is_over_c10d() const { return kind() == Kind::kBackend || !tests_on_host(); }

  void SetUp() override {
    if (kind() == Kind::kBackend) TESSERA_ON_HOST_ONLY("Gloo sends tensors in host memory");
  }
};

torch::Tensor values(int64_t numel, torch::ScalarType dtype, int rank) {
  return on_test_device(testing::values(numel, dtype, rank));
}

// The dtypes of the messages and of the result.
constexpr std::pair<at::ScalarType, at::ScalarType> kPairs[] = {{at::kBFloat16, at::kFloat},
                                                                {at::kHalf, at::kFloat},
                                                                {at::kFloat, at::kBFloat16},
                                                                {at::kFloat, at::kHalf}};

TEST_P(MessageDtypeContract, ReduceScatterTakesPiecesScalesAndAccumulates) {
  run([&](ProcessGroup& pg) {
    for (const auto& [dtype, out_dtype] : kPairs) {
      for (const auto& bounds : all_bounds()) {
        for (const bool accumulate : {false, true}) {
          auto sum = on_test_device(torch::zeros({bounds.back()}));
          Cut own;
          for (int r = 0; r < pg.size(); ++r) {
            auto flat = values(bounds.back(), dtype, r);
            Cut of_rank = cut(flat, /*with_undefined=*/r % 2 == 0);
            sum += flat;  // undefined pieces count as zeros
            if (r == pg.rank()) own = of_rank;
          }
          auto out = on_test_device(
              torch::full({bounds[pg.rank() + 1] - bounds[pg.rank()]}, 3.0, out_dtype));
          const auto base =
              accumulate ? out.to(torch::kFloat) : on_test_device(torch::zeros({out.numel()}));
          const auto reduced = base + 0.25 * part(sum, bounds, pg.rank());
          const auto expected = torch::where(part(on_test_device(own.covered), bounds, pg.rank()),
                                             reduced.to(out_dtype), out);
          pg.reduce_scatter(out, std::move(own.pieces), bounds,
                            {.scale = 0.25, .accumulate = accumulate, .dtype = dtype}, kTag)
              ->wait();
          EXPECT_EQ(out.scalar_type(), out_dtype);
          EXPECT_TRUE(torch::equal(out, expected))
              << "rank " << pg.rank() << ' ' << dtype << " to " << out_dtype << bounds;
        }
      }
    }
  });
}

TEST_P(MessageDtypeContract, SumsAreTakenInFloatInTheOrderOfRanksAndRoundedOnce) {
  run([&](ProcessGroup& pg) {
    constexpr int64_t kNumel = 5000;
    constexpr double kScale = 1.0 / 3;
    std::vector<int64_t> bounds(pg.size() + 1);
    for (int r = 0; r <= pg.size(); ++r) bounds[r] = kNumel * r;
    std::vector<std::pair<at::ScalarType, at::ScalarType>> pairs(std::begin(kPairs),
                                                                 std::end(kPairs));
    pairs.emplace_back(at::kBFloat16, at::kBFloat16);
    pairs.emplace_back(at::kHalf, at::kHalf);
    for (const auto& [dtype, out_dtype] : pairs) {
      if (is_over_c10d() && dtype != at::kFloat && pg.size() > 2) continue;
      torch::Tensor sum, own;
      for (int r = 0; r < pg.size(); ++r) {
        auto generator = at::detail::createCPUGenerator(r);
        const auto flat = on_test_device(torch::randn({bounds.back()}, generator).to(dtype));
        sum = sum.defined() ? sum + flat.to(torch::kFloat) : flat.to(torch::kFloat);
        if (r == pg.rank()) own = flat;
      }
      // There, a message comes back in its own dtype.
      if (is_over_c10d()) sum = sum.to(dtype).to(torch::kFloat);
      for (const bool accumulate : {false, true}) {
        auto out = on_test_device(torch::full({kNumel}, 2.0, out_dtype));
        const auto base = out.to(torch::kFloat) * (accumulate ? 1 : 0);
        const auto expected = (base + part(sum, bounds, pg.rank()) * kScale).to(out_dtype);
        pg.reduce_scatter(out, {{0, own, own.numel()}}, bounds,
                          {.scale = kScale, .accumulate = accumulate, .dtype = dtype}, kTag)
            ->wait();
        const bool in_order = !is_over_c10d() || pg.size() <= 2;
        EXPECT_TRUE(in_order ? torch::equal(out, expected)
                             : torch::allclose(out, expected, 1e-2, 1e-2))
            << "rank " << pg.rank() << ' ' << dtype << " to " << out_dtype << ", " << accumulate;
      }
    }
  });
}

TEST_P(MessageDtypeContract, OfNoPieceAtAllNothingIsStored) {
  run([&](ProcessGroup& pg) {
    std::vector<int64_t> bounds(pg.size() + 1);
    for (int r = 0; r <= pg.size(); ++r) bounds[r] = 3 * r;
    for (const auto& [dtype, out_dtype] : kPairs) {
      auto out = on_test_device(torch::full({3}, 7.0, out_dtype));
      pg.reduce_scatter(out, {}, bounds, {.dtype = dtype}, kTag)->wait();
      EXPECT_TRUE(out.eq(7).all().item<bool>());
      // A piece of zeros, without data, on all ranks.
      pg.reduce_scatter(out, {{0, {}, bounds.back()}}, bounds, {.accumulate = true, .dtype = dtype},
                        kTag)
          ->wait();
      EXPECT_TRUE(out.eq(7).all().item<bool>());
      pg.reduce_scatter(out, {{0, {}, bounds.back()}}, bounds, {.dtype = dtype}, kTag)->wait();
      EXPECT_TRUE(out.eq(0).all().item<bool>());
    }
  });
}

TEST_P(MessageDtypeContract, OtherPairsAndOtherPiecesAreRefused) {
  run([&](ProcessGroup& pg) {
    std::vector<int64_t> bounds(pg.size() + 1);
    for (int r = 0; r <= pg.size(); ++r) bounds[r] = 3 * r;
    const auto reduce = [&](at::ScalarType piece, at::ScalarType message,
                            at::ScalarType out_dtype) {
      auto out = on_test_device(torch::zeros({3}, out_dtype));
      const auto flat = on_test_device(torch::zeros({bounds.back()}, piece));
      pg.reduce_scatter(out, {{0, flat, flat.numel()}}, bounds, {.dtype = message}, kTag)->wait();
    };
    for (const auto& [dtype, out_dtype] :
         {std::pair(at::kDouble, at::kFloat), std::pair(at::kFloat, at::kDouble),
          std::pair(at::kBFloat16, at::kHalf), std::pair(at::kLong, at::kFloat),
          std::pair(at::kDouble, at::kBFloat16)}) {
      EXPECT_THROW(reduce(dtype, dtype, out_dtype), c10::NotImplementedError)
          << dtype << " to " << out_dtype;
    }
    EXPECT_THROW(reduce(at::kFloat, at::kBFloat16, at::kFloat), c10::ValueError);
    EXPECT_THROW(reduce(at::kBFloat16, at::kFloat, at::kBFloat16), c10::ValueError);
    reduce(at::kBFloat16, at::kBFloat16, at::kFloat);  // and everything still works
    pg.barrier(kTag);
  });
}

TEST_P(MessageDtypeContract, DecoratorsCountBytesOfMessages) {
  run_world(size(), [&](World& world) {
    const auto counting = counting_process_group(make_process_group(kind(), world));
    const auto tracing = tracing_process_group(counting);
    std::vector<int64_t> bounds(world.size() + 1);
    for (int r = 0; r <= world.size(); ++r) bounds[r] = 10 * r * r;
    const int64_t all = bounds.back(), own = bounds[world.rank() + 1] - bounds[world.rank()];
    for (const auto& [dtype, out_dtype] : kPairs) {
      counting->reset_counts();
      auto out = on_test_device(torch::zeros({own}, out_dtype));
      const auto flat = on_test_device(torch::zeros({all}, dtype));
      tracing->reduce_scatter(out, {{0, flat, all}}, bounds, {.dtype = dtype}, kTag)->wait();
      const auto item = static_cast<int64_t>(c10::elementSize(dtype));
      EXPECT_EQ(counting->counts().reduce_scatter.bytes_sent, (all - own) * item);
      EXPECT_EQ(tracing->records().back().bytes, all * item);
    }
  });
}

TESSERA_CONTRACT(MessageDtypeContract, 1, 2, 3);

}  // namespace tessera::testing::message_dtype_test
