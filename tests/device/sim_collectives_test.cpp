// Collectives of the simulated accelerator.
#include <gtest/gtest.h>
#include <torch/torch.h>

#include <functional>
#include <numeric>
#include <thread>
#include <torch/csrc/distributed/c10d/HashStore.hpp>

#include "device/sim_tensors.h"

namespace tessera::testing::sim_collectives_test {

using namespace sim_tensors;
using namespace std::chrono_literals;

// Runs `fn` on `size` threads, each with its device as the current one. Rethrows the first error.
void run_ranks(int size, const std::function<void(int rank)>& fn) {
  std::vector<std::exception_ptr> errors(size);
  std::vector<std::thread> ranks;
  for (int rank = 0; rank < size; ++rank) {
    ranks.emplace_back([&, rank] {
      try {
        at::accelerator::setDeviceIndex(static_cast<c10::DeviceIndex>(rank));
        fn(rank);
      } catch (...) {
        errors[rank] = std::current_exception();
      }
    });
  }
  for (std::thread& rank : ranks) rank.join();
  for (const auto& error : errors)
    if (error) std::rethrow_exception(error);
}

// Values whose sums depend on their order.
at::Tensor values(int64_t numel, int rank, at::ScalarType dtype = at::kFloat) {
  auto generator = at::make_generator<at::CPUGeneratorImpl>(100 + rank);
  return (torch::randn({numel}, generator) * std::pow(10.0, rank)).to(dtype);
}

at::Tensor sum_in_rank_order(int64_t numel, int size, at::ScalarType dtype = at::kFloat) {
  at::Tensor sum = values(numel, 0, dtype).to(at::kFloat);
  for (int r = 1; r < size; ++r) sum = sum + values(numel, r, dtype).to(at::kFloat);
  return sum.to(dtype);
}

using Collectives = std::function<void(int rank, int size, c10d::Backend& backend, int64_t numel)>;

void run_collectives(const Collectives& fn) {
  static int calls = 0;
  for (int size = 1; size <= 4; ++size) {
    for (const int64_t numel : {1, 7, 1000}) {
      SCOPED_TRACE(c10::str(size, " ranks, ", numel));
      const auto sim = sim::use(size * numel, 100us);
      const std::string token = c10::str("collectives ", ++calls);
      run_ranks(size, [&](int rank) {
        const auto backend = sim::process_group(token, rank, size, 20s);
        fn(rank, size, *backend, numel);
      });
    }
  }
}

at::Tensor device_values(int64_t numel, int rank, at::ScalarType dtype = at::kFloat) {
  return values(numel, rank, dtype).to(sim::device(rank));
}

TEST(SimDeviceCollectives, AllReduceSumsInRankOrder) {
  run_collectives([](int rank, int size, c10d::Backend& backend, int64_t numel) {
    for (const auto dtype : {at::kFloat, at::kBFloat16}) {
      Tensors tensors{device_values(numel, rank, dtype)};
      backend.allreduce(tensors)->wait();
      EXPECT_TRUE(same_bits(tensors[0], sum_in_rank_order(numel, size, dtype)));
    }
    Tensors numbers{torch::full({numel}, rank + 1, on(rank, at::kLong))};
    backend.allreduce(numbers, {.reduceOp = c10d::ReduceOp::MAX})->wait();
    EXPECT_TRUE(same_bits(numbers[0], torch::full({numel}, size, at::kLong)));
    Tensors mean{torch::full({numel}, 3.0F * (rank + 1), on(rank))};
    backend.allreduce(mean, {.reduceOp = c10d::ReduceOp::AVG})->wait();
    EXPECT_TRUE(same_bits(mean[0], torch::full({numel}, 1.5F * (size + 1))));
  });
}

TEST(SimDeviceCollectives, BroadcastAndReduceHaveARoot) {
  run_collectives([](int rank, int size, c10d::Backend& backend, int64_t numel) {
    for (int root = 0; root < size; ++root) {
      Tensors tensors{device_values(numel, rank)};
      backend.broadcast(tensors, {.rootRank = root})->wait();
      EXPECT_TRUE(same_bits(tensors[0], values(numel, root)));
      tensors = {device_values(numel, rank)};
      backend.reduce(tensors, {.rootRank = root})->wait();
      EXPECT_TRUE(same_bits(tensors[0],
                            rank == root ? sum_in_rank_order(numel, size) : values(numel, rank)));
    }
  });
}

TEST(SimDeviceCollectives, AllGatherConcatenates) {
  run_collectives([](int rank, int size, c10d::Backend& backend, int64_t numel) {
    Tensors input{device_values(numel, rank)};
    std::vector<Tensors> outputs(1);
    for (int r = 0; r < size; ++r) outputs[0].push_back(torch::empty({numel}, on(rank)));
    at::Tensor flat = torch::empty({size * numel}, on(rank));
    const auto first = backend.allgather(outputs, input);
    const auto second = backend._allgather_base(flat, input[0]);
    second->wait();
    first->wait();
    for (int r = 0; r < size; ++r) {
      EXPECT_TRUE(same_bits(outputs[0][r], values(numel, r)));
      EXPECT_TRUE(same_bits(flat.narrow(0, r * numel, numel), values(numel, r)));
    }
  });
}

TEST(SimDeviceCollectives, ReduceScatterSumsInRankOrder) {
  run_collectives([](int rank, int size, c10d::Backend& backend, int64_t numel) {
    const at::Tensor expected =
        sum_in_rank_order(size * numel, size).narrow(0, rank * numel, numel);
    at::Tensor flat = device_values(size * numel, rank);
    at::Tensor output = torch::empty({numel}, on(rank));
    backend._reduce_scatter_base(output, flat)->wait();
    EXPECT_TRUE(same_bits(output, expected));
    Tensors outputs{torch::empty({numel}, on(rank))};
    std::vector<Tensors> inputs{flat.chunk(size)};
    backend.reduce_scatter(outputs, inputs)->wait();
    EXPECT_TRUE(same_bits(outputs[0], expected));
  });
}

TEST(SimDeviceCollectives, AllToAllGatherAndScatterDeliverMessages) {
  run_collectives([](int rank, int size, c10d::Backend& backend, int64_t numel) {
    // Rank r sends r + s + 1 rows to rank s.
    std::vector<int64_t> sizes;
    Tensors parts;
    for (int r = 0; r < size; ++r) {
      sizes.push_back(rank + r + 1);
      parts.push_back(values(100, r).narrow(0, rank, rank + r + 1));
    }
    const int64_t all = std::accumulate(sizes.begin(), sizes.end(), int64_t{0});
    Tensors sent;
    for (int r = 0; r < size; ++r)
      sent.push_back(values(100, rank).narrow(0, r, rank + r + 1).to(sim::device(rank)));
    at::Tensor input = torch::cat(sent), output = torch::empty({all}, on(rank));
    backend.alltoall_base(output, input, sizes, sizes)->wait();
    EXPECT_TRUE(same_bits(output, torch::cat(parts)));
    Tensors outputs;
    for (const int64_t rows : sizes) outputs.push_back(torch::empty({rows}, on(rank)));
    backend.alltoall(outputs, sent)->wait();
    EXPECT_TRUE(same_bits(torch::cat(outputs), torch::cat(parts)));

    Tensors own{device_values(numel, rank)};
    std::vector<Tensors> gathered(rank == 0 ? 1 : 0);
    if (rank == 0)
      for (int r = 0; r < size; ++r) gathered[0].push_back(torch::empty({numel}, on(0)));
    backend.gather(gathered, own, {.rootRank = 0})->wait();
    Tensors back{torch::empty({numel}, on(rank))};
    backend.scatter(back, gathered, {.rootRank = 0})->wait();
    EXPECT_TRUE(same_bits(back[0], values(numel, rank)));
    backend.barrier()->wait();
  });
}

TEST(SimDeviceCollectives, WaitOrdersTheStreamAndReturnsAtOnce) {
  const auto sim = sim::use();
  run_ranks(2, [](int rank) {
    const auto backend = sim::process_group("wait", rank, 2, 20s);
    Tensors tensors{torch::full({5}, 1.0F, on(rank))};
    sim::Hold hold(current_stream(rank));
    const auto work = backend->allreduce(tensors);
    work->wait();
    const at::Tensor doubled = tensors[0] * 2;
    EXPECT_FALSE(work->isCompleted());
    hold.release();
    EXPECT_TRUE(same_bits(doubled, torch::full({5}, 4.0F)));
    EXPECT_TRUE(work->isCompleted());
    EXPECT_TRUE(work->isSuccess());
  });
}

TEST(SimDeviceCollectives, WithoutWaitTheOutputIsNotThere) {
  const auto sim = sim::use(3, 2ms);
  run_ranks(2, [](int rank) {
    const auto backend = sim::process_group("no wait", rank, 2, 20s);
    Tensors tensors{torch::full({5}, 1.0F, on(rank))};
    int wrong = 0;
    for (int i = 0; i < 10; ++i) {
      tensors[0].fill_(1);
      const auto work = backend->allreduce(tensors);
      wrong += tensors[0].cpu()[0].item<float>() != 2;
      work->wait();
      current_stream(rank).synchronize();
    }
    EXPECT_GT(wrong, 0);
  });
}

TEST(SimDeviceCollectives, KeepNoTensorAlive) {
  const auto sim = sim::use();
  const auto backend = sim::process_group("alone", 0, 1, 5s);
  at::Tensor input = torch::ones({100}, on(0)), output = torch::empty({100}, on(0));
  const int64_t live = sim::memory(sim::device(0)).live;
  sim::Hold hold(current_stream());
  const auto work = backend->_allgather_base(output, input);
  input.reset();
  EXPECT_EQ(sim::memory(sim::device(0)).live, live - 400);
  hold.release();
  work->wait();
  sim::synchronize();
}

TEST(SimDeviceCollectives, DifferentOnesAreAnErrorOnAllRanks) {
  const auto sim = sim::use(2, 50us);
  run_ranks(3, [](int rank) {
    const auto backend = sim::process_group("different", rank, 3, 20s);
    const auto error = [&](const c10::intrusive_ptr<c10d::Work>& work) {
      return error_text([&] {
        work->wait();
        sim::synchronize(sim::device(rank));
      });
    };
    Tensors longer{torch::ones({rank == 1 ? 5 : 4}, on(rank))};
    EXPECT_TRUE(contains(error(backend->allreduce(longer)), "all_reduce op=0 Float[5]"));
    Tensors bytes{torch::ones({4}, on(rank, rank == 2 ? at::kByte : at::kFloat))};
    EXPECT_TRUE(contains(error(backend->allreduce(bytes)), "rank 2"));
    Tensors same{torch::ones({4}, on(rank))};
    EXPECT_TRUE(contains(error(rank == 0 ? backend->allreduce(same) : backend->broadcast(same)),
                         "different"));
    at::Tensor sent = torch::ones({6}, on(rank)), received = torch::empty({6}, on(rank));
    std::vector<int64_t> even, uneven{rank == 1 ? 3 : 2, rank == 1 ? 1 : 2, 2};
    EXPECT_TRUE(
        contains(error(backend->alltoall_base(received, sent, even, uneven)), "rank 1 sends"));
    at::Tensor halves = torch::empty({6}, on(rank, at::kHalf));
    EXPECT_TRUE(contains(error(backend->alltoall_base(halves, sent, even, even)), "must have 6"));
    Tensors fine{torch::ones({4}, on(rank))};
    EXPECT_EQ(error(backend->allreduce(fine)), "no error");
    EXPECT_TRUE(contains(error_text([&] {
                           Tensors host{torch::ones({4})};
                           backend->allreduce(host);
                         }),
                         "must be on a sim device"));
  });
}

TEST(SimDeviceCollectives, MissingRankIsAnErrorWithinTheTimeout) {
  const auto sim = sim::use();
  run_ranks(3, [](int rank) {
    const auto backend = sim::process_group("missing", rank, 3, 200ms);
    if (rank == 1) return;
    Tensors tensors{torch::ones({4}, on(rank))};
    const auto work = backend->allreduce(tensors);
    EXPECT_NO_THROW(work->wait());
    EXPECT_THROW(tensors[0].cpu(), c10::DistBackendError);
    EXPECT_TRUE(work->isCompleted());
    EXPECT_FALSE(work->isSuccess());
    EXPECT_TRUE(contains(error_text([&] { work->wait(); }), "rank 1 did not come in time"));
    EXPECT_NO_THROW(sim::synchronize(sim::device(rank)));
  });
}

TEST(SimDeviceCollectives, RanksMeetByStore) {
  const auto sim = sim::use();
  const auto store = c10::make_intrusive<c10d::HashStore>();
  run_ranks(3, [&](int rank) {
    const auto backend = sim::process_group(store, rank, 3, 20s);
    EXPECT_EQ(backend->getBackendName(), "simccl");
    Tensors tensors{torch::ones({4}, on(rank))};
    backend->allreduce(tensors)->wait();
    EXPECT_TRUE(same_bits(tensors[0], torch::full({4}, 3.0F)));
  });
}

}  // namespace tessera::testing::sim_collectives_test
