// Elements that are sent in 8 bits, or rounded: the codec, and the collectives that use it.
#include "comm/group/encoding.h"

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <tessera/comm/process_group_decorators.h>

#include "comm/group/capability.h"
#include "support/models.h"
#include "support/test_device.h"

namespace tessera::encoding_test {

constexpr CollectiveTag kTag{"encoded", Channel::kGrads};
constexpr Encoding kBlocks[] = {Encoding::kInt8, Encoding::kFloat8};

// Values of many magnitudes, with zeros and a block of zeros.
torch::Tensor values(int64_t numel, at::ScalarType dtype = at::kFloat, int seed = 0) {
  auto generator = at::detail::createCPUGenerator(seed);
  auto x = torch::randn({numel}, generator) *
           torch::pow(10, torch::randint(-3, 3, {(numel + 99) / 100}, generator)
                              .repeat_interleave(100)
                              .narrow(0, 0, numel));
  if (numel > 600) x.narrow(0, 256, 256).zero_();
  return x.to(dtype);
}

torch::Tensor magnitude_of_blocks(const torch::Tensor& x) {
  const int64_t padded = (x.numel() + kEncodedBlock - 1) / kEncodedBlock * kEncodedBlock;
  const auto blocks = torch::constant_pad_nd(x.to(torch::kFloat).abs(), {0, padded - x.numel()});
  const auto most = std::get<0>(blocks.view({-1, kEncodedBlock}).max(1));
  return most.repeat_interleave(kEncodedBlock).narrow(0, 0, x.numel());
}

TEST(Encoding, IsCloseAndChangesRoundedValuesNoMore) {
  for (const auto dtype : {at::kFloat, at::kBFloat16}) {
    for (const int64_t numel : {0, 1, 2, 255, 256, 257, 5000, 40000}) {
      for (const Encoding encoding : kBlocks) {
        SCOPED_TRACE(fmt::format("{} {} {}", to_string(encoding), c10::toString(dtype), numel));
        const auto x = values(numel, dtype);
        const auto once = rounded_by(encoding, x);
        EXPECT_TRUE(torch::equal(rounded_by(encoding, once), once));
        const auto wide = x.to(torch::kFloat), error = (once.to(torch::kFloat) - wide).abs();
        // Half a step of int8, whose scale may be twice as large for bfloat16; half a digit of
        // e4m3, or of its smallest values.
        const auto block = magnitude_of_blocks(x);
        const auto bound = encoding == Encoding::kInt8
                               ? block * (dtype == at::kFloat ? 0.501 / 127 : 1.001 / 127)
                               : torch::maximum(wide.abs() / 16, block * (0x1p-9 / 224));
        EXPECT_TRUE(error.le(bound + 1e-30).all().item<bool>());
      }
    }
  }
}

TEST(Encoding, TakesAByteForEachElementAndAFloatForEachBlock) {
  EXPECT_EQ(encoded_nbytes(Encoding::kInt8, 0, at::kFloat), 0);
  EXPECT_EQ(encoded_nbytes(Encoding::kInt8, 1, at::kFloat), 5);
  EXPECT_EQ(encoded_nbytes(Encoding::kFloat8, 256, at::kBFloat16), 260);
  EXPECT_EQ(encoded_nbytes(Encoding::kInt8, 257, at::kFloat), 257 + 8);
  EXPECT_EQ(encoded_nbytes(Encoding::kBFloat16, 257, at::kFloat), 514);
  EXPECT_EQ(encoded_nbytes(Encoding::kPlain, 257, at::kFloat), 4 * 257);
}

TEST(Encoding, ShowsInfinitiesAndNanInTheWholeBlockAndNoOther) {
  for (const Encoding encoding : kBlocks) {
    for (const float bad : {INFINITY, -INFINITY, NAN}) {
      auto x = values(1000);
      x[300] = bad;
      std::vector<std::byte> bytes(encoded_nbytes(encoding, 1000, at::kFloat));
      auto error = torch::ones({1000});
      encode(encoding, at::kFloat, x.const_data_ptr(), 1000, bytes.data(),
             error.mutable_data_ptr<float>());
      auto decoded = torch::empty({1000});
      decode(encoding, bytes.data(), 1000, at::kFloat, decoded.mutable_data_ptr());
      EXPECT_EQ(decoded.isnan().sum().item<int64_t>(), 256);
      EXPECT_TRUE(decoded.narrow(0, 256, 256).isnan().all().item<bool>());
      EXPECT_TRUE(error.narrow(0, 256, 256).eq(0).all().item<bool>());
    }
  }
}

TEST(Encoding, AddsErrorsToTheNextValuesSoThatNothingIsLostInTheLongRun) {
  constexpr int kTimes = 50;
  for (const Encoding encoding :
       {Encoding::kInt8, Encoding::kFloat8, Encoding::kBFloat16, Encoding::kHalf}) {
    const auto x = values(1000).clamp(-30, 30);
    auto error = torch::zeros({1000}), sum = torch::zeros({1000}, torch::kDouble);
    auto decoded = torch::empty({1000});
    std::vector<std::byte> bytes(encoded_nbytes(encoding, 1000, at::kFloat));
    for (int i = 0; i < kTimes; ++i) {
      encode(encoding, at::kFloat, x.const_data_ptr(), 1000, bytes.data(),
             error.mutable_data_ptr<float>());
      decode(encoding, bytes.data(), 1000, at::kFloat, decoded.mutable_data_ptr());
      sum += decoded;
    }
    // What is still owed is the error of a single message.
    EXPECT_TRUE(torch::allclose(sum + error, kTimes * x.to(torch::kDouble), 1e-4, 1e-4))
        << to_string(encoding);
  }
}

// Encoded messages are of tensors in host memory.
struct EncodedMessages : ::testing::Test {
  void SetUp() override { TESSERA_ON_HOST_ONLY("a backend of devices sends no encoded messages"); }
};

int64_t sent_nbytes(World& world) {
  return capability<SendsMessages>(*world.process_group())->sent().nbytes;
}

// Every third gap of 7 elements is no piece, and every second piece of odd ranks is zeros.
std::vector<Piece> pieces_of(const torch::Tensor& flat, int rank) {
  std::vector<Piece> pieces;
  const int64_t numels[] = {1, 300, 70000, 5, 256, 400000};
  for (int64_t begin = 0, i = 0; begin < flat.numel(); ++i) {
    const int64_t numel = std::min(numels[i % 6], flat.numel() - begin);
    const bool is_zero = rank % 2 == 1 && i % 2 == 1;
    if (is_zero) flat.narrow(0, begin, numel).zero_();
    pieces.push_back({begin, is_zero ? torch::Tensor() : flat.narrow(0, begin, numel), numel});
    begin += numel;
    if (i % 3 == 2) begin += std::min<int64_t>(7, flat.numel() - begin);
  }
  return pieces;
}

// The values of a piece's part in [begin, end) after they were sent.
torch::Tensor sent(Encoding encoding, const torch::Tensor& flat, const std::vector<Piece>& pieces,
                   int64_t begin, int64_t end) {
  auto result = torch::zeros({end - begin});
  for (const Piece& piece : pieces) {
    const int64_t from = std::max(begin, piece.begin);
    const int64_t numel = std::min(end, piece.begin + piece.numel) - from;
    if (numel <= 0) continue;
    const auto part = flat.narrow(0, from, numel);
    // bfloat16 is decoded to float.
    std::vector<std::byte> bytes(encoded_nbytes(encoding, numel, flat.scalar_type()));
    encode(encoding, flat.scalar_type(), part.const_data_ptr(), numel, bytes.data());
    decode(encoding, bytes.data(), numel, at::kFloat,
           result.narrow(0, from - begin, numel).mutable_data_ptr());
  }
  return result;
}

TEST_F(EncodedMessages, ReduceScatterAddsWhatOthersSendToItsOwnValuesInFloat) {
  for (const auto dtype : {at::kFloat, at::kBFloat16}) {
    for (const int64_t numel : {3, 1000, 2'500'003}) {
      run_over(
          Transport::kGloo, 3,
          [&](World& world) {
            const int rank = world.rank();
            const std::vector<int64_t> bounds = {0, numel / 2, numel / 2, numel};
            for (const Encoding encoding : kBlocks) {
              std::vector<torch::Tensor> flats;
              std::vector<std::vector<Piece>> pieces;
              for (int r = 0; r < 3; ++r) {
                flats.push_back(values(numel, dtype, r));
                pieces.push_back(pieces_of(flats[r], r));
              }
              const int64_t begin = bounds[rank], end = bounds[rank + 1];
              auto expected = torch::zeros({end - begin});
              for (int r = 0; r < 3; ++r) {
                const auto plain = flats[r].narrow(0, begin, end - begin).to(torch::kFloat);
                const auto part =
                    r == rank ? plain : sent(encoding, flats[r], pieces[r], begin, end);
                expected = r == 0 ? part : expected + part;
              }
              expected *= 0.5;
              auto out = torch::zeros({end - begin});
              const int64_t sent_before = sent_nbytes(world);
              const auto counted = counting_process_group(world.process_group());
              const auto work = counted->reduce_scatter(
                  out, std::move(pieces[rank]), bounds,
                  {.scale = 0.5, .dtype = dtype, .encoding = encoding}, kTag);
              work->wait();
              work->wait_inputs();
              // Elements outside of all pieces stay zeros.
              const auto covered = sent(Encoding::kInt8, torch::ones({numel}),
                                        pieces_of(torch::ones({numel}), 0), begin, end)
                                       .ne(0);
              EXPECT_TRUE(torch::equal(out, torch::where(covered, expected, 0.0f)))
                  << to_string(encoding) << ' ' << numel << " rank " << rank;
              EXPECT_EQ(counted->counts().reduce_scatter.bytes_sent,
                        sent_nbytes(world) - sent_before);
            }
          },
          std::chrono::seconds(60));
    }
  }
}

TEST_F(EncodedMessages, ErrorsOfReductionsAreSentWithTheNextOnes) {
  run_over(Transport::kGloo, 2, [&](World& world) {
    const std::vector<int64_t> bounds = {0, 700, 1400};
    const auto error = std::make_shared<torch::Tensor>();
    auto total = torch::zeros({700}, torch::kDouble), expected = total.clone();
    const auto flat = values(1400, at::kFloat, world.rank()).clamp(-5, 5);
    for (int step = 0; step < 40; ++step) {
      auto out = torch::empty({700});
      const auto work = world.process_group()->reduce_scatter(
          out, {{0, flat, 1400}}, bounds, {.encoding = Encoding::kInt8, .error = error}, kTag);
      work->wait();
      work->wait_inputs();
      total += out;
    }
    for (const int r : {0, 1})
      expected += 40 * values(1400, at::kFloat, r).clamp(-5, 5).narrow(0, 700 * world.rank(), 700);
    EXPECT_EQ(error->numel(), 1400);
    // A step of int8 at most is still owed.
    EXPECT_TRUE(torch::allclose(total, expected, 0, 5.0 / 127)) << "rank " << world.rank();
  });
}

// On messages alone, and on hosts whose ranks share memory.
void gather_and_broadcast(World& world, int64_t senders_per_rank) {
  ProcessGroup& group = *world.process_group();
  for (const Encoding encoding :
       {Encoding::kInt8, Encoding::kFloat8, Encoding::kBFloat16, Encoding::kHalf}) {
    std::vector<int64_t> bounds = {0};
    std::vector<torch::Tensor> shards;
    for (int r = 0; r < world.size(); ++r) {
      const int64_t numel = r == 1 ? 0 : 1'000'001 + r;
      bounds.push_back(bounds.back() + numel);
      shards.push_back(rounded_by(encoding, values(numel, at::kFloat, r).clamp(-9, 9)));
    }
    const auto flat = torch::zeros({bounds.back()});
    const int64_t before = sent_nbytes(world);
    const auto work = group.all_gather(flat, shards[world.rank()], bounds,
                                       {"gathered", Channel::kParams}, encoding);
    work->wait();
    work->wait_inputs();
    EXPECT_TRUE(torch::equal(flat, torch::cat(shards))) << to_string(encoding);
    EXPECT_EQ(
        sent_nbytes(world) - before,
        senders_per_rank * encoded_nbytes(encoding, shards[world.rank()].numel(), at::kFloat));
    const auto same = rounded_by(encoding, values(5000, at::kFloat, 77).clamp(-9, 9));
    const auto got = world.rank() == 2 ? same.clone() : torch::zeros({5000});
    group.broadcast(got, 2, {"sent", Channel::kParams}, encoding)->wait();
    EXPECT_TRUE(torch::equal(got, same)) << to_string(encoding);
  }
}

TEST_F(EncodedMessages, GathersAndBroadcastsArriveAsRoundedOverMessages) {
  run_over(
      Transport::kGloo, 3, [](World& world) { gather_and_broadcast(world, 2); },
      std::chrono::seconds(60));
}

TEST_F(EncodedMessages, GathersAndBroadcastsArriveAsRoundedOverHosts) {
  run_hosts(4, by_halves, [](World& world) { gather_and_broadcast(world, 1); });
}

TEST_F(EncodedMessages, RefuseOtherDtypes) {
  run_over(Transport::kGloo, 2, [](World& world) {
    const auto flat = torch::zeros({4}, torch::kDouble), shard = torch::zeros({2}, torch::kDouble);
    const std::vector<int64_t> bounds = {0, 2, 4};
    testing::expect_error(
        [&] { world.process_group()->all_gather(flat, shard, bounds, {"wide"}, Encoding::kInt8); },
        {"only elements of float, bfloat16 and half can be sent as int8", "Double"});
  });
}

}  // namespace tessera::encoding_test
