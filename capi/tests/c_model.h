#pragma once

#include <gtest/gtest.h>
#include <tessera/capi/tessera.h>
#include <tessera/comm/spawn.h>
#include <torch/torch.h>

#include <cstdlib>
#include <functional>
#include <string>
#include <vector>

#include "support/expect_contains.h"
#include "support/models.h"

namespace tessera::testing {

/// Names of tensors and pointers to them, as a binding passes them.
struct PassedTensors {
  explicit PassedTensors(const State& parameters, const State& buffers = {})
      : held(parameters), parameters(static_cast<int64_t>(parameters.size())) {
    held.insert(held.end(), buffers.begin(), buffers.end());
    for (NamedTensor& it : held) {
      names.push_back(it.name.c_str());
      tensors.push_back(&it.tensor);
    }
  }
  explicit PassedTensors(torch::nn::Module& module)
      : PassedTensors(listed(module.named_parameters()), listed(module.named_buffers())) {}
  PassedTensors(const PassedTensors&) = delete;
  PassedTensors& operator=(const PassedTensors&) = delete;

  static State listed(const torch::OrderedDict<std::string, torch::Tensor>& items) {
    State list;
    for (const auto& item : items) list.push_back({item.key(), item.value()});
    return list;
  }

  int64_t buffers() const { return static_cast<int64_t>(held.size()) - parameters; }

  State held;
  int64_t parameters;
  std::vector<const char*> names;
  std::vector<void*> tensors;
};

/// Expects that a call succeeds, and returns whether it did.
inline bool succeeds(tessera_status status) {
  EXPECT_EQ(status, TESSERA_OK) << tessera_error();
  return status == TESSERA_OK;
}

/// Expects that a call fails with a message that has all of `parts`.
inline void expect_failure(tessera_status status, tessera_status expected,
                           const std::vector<std::string>& parts) {
  EXPECT_EQ(status, expected) << tessera_error();
  expect_contains(tessera_error(), parts);
}

/// A world of the rank that the thread is.
struct CWorld {
  CWorld() {
    if (!succeeds(tessera_init(nullptr, &handle, &rank, &size)))
      throw std::runtime_error(tessera_error());
  }
  ~CWorld() { tessera_free(handle); }
  CWorld(const CWorld&) = delete;
  CWorld& operator=(const CWorld&) = delete;

  tessera_world* handle = nullptr;
  int rank = -1, size = -1;
};

/// Runs `fn` on ranks that are threads, each with a world made in C.
inline void run_c_world(int ranks, const std::function<void(CWorld&)>& fn) {
  setenv("TESSERA_TIMEOUT", "30", /*overwrite=*/0);
  spawn(ranks, [&] {
    CWorld world;
    fn(world);
  });
}

/// A model whose tensors are sharded from C.
struct CModel {
  CModel(const CWorld& world, std::shared_ptr<Net> made, const char* plan, const char* optimizer)
      : net(std::move(made)), passed(*net), rank(world.rank), size(world.size) {
    if (!succeeds(tessera_shard(world.handle, passed.names.data(), passed.tensors.data(),
                                passed.parameters, passed.buffers(), plan, optimizer, &handle)))
      throw std::runtime_error(tessera_error());
  }
  ~CModel() { tessera_free(handle); }
  CModel(const CModel&) = delete;
  CModel& operator=(const CModel&) = delete;

  void backward(const TrainingRun& run, int step) const {
    const Batch batch = global_batch(step, run.rows, run.in, run.out);
    rank_loss(*net, batch, rank, size, step).backward();
  }

  /// The whole values of the parameters.
  State state() const {
    State whole;
    for (int64_t i = 0; i < passed.parameters; ++i) {
      torch::Tensor value;
      EXPECT_TRUE(succeeds(tessera_gather(handle, passed.names[i], &value)));
      whole.push_back({passed.names[i], value});
    }
    return whole;
  }

  std::shared_ptr<Net> net;
  PassedTensors passed;
  int rank, size;
  tessera_model* handle = nullptr;
};

}  // namespace tessera::testing
