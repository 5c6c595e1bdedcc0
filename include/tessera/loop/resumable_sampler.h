#pragma once

#include <ATen/core/Tensor.h>
#include <torch/data/samplers/base.h>
#include <torch/serialize.h>

#include <cstring>
#include <memory>
#include <optional>
#include <sstream>
#include <string>
#include <utility>

namespace tessera {

/// A sampler whose position can be saved and restored while a data loader uses it: copies share it.
///
///     ResumableSampler sampler(torch::data::samplers::DistributedRandomSampler(...));
///     auto loader = torch::data::make_data_loader(dataset, sampler, options);
///     save_checkpoint(path, sharded, &optimizer, {.rank_state = {{"sampler", sampler.state()}}});
///
///     auto loaded = load_checkpoint(path, sharded, &optimizer);
///     sampler.load_state(loaded.rank_state.at("sampler"));
///     for (auto& batch : *loader) ...  // goes on behind the last batch
///
/// The position counts the batches that the loader has requested: without workers, those that
/// training has received; with workers more (torch::data's loader requests ahead).
template <class Sampler>
class ResumableSampler : public torch::data::samplers::Sampler<typename Sampler::BatchRequestType> {
 public:
  using BatchRequest = typename Sampler::BatchRequestType;

  explicit ResumableSampler(Sampler sampler)
      : shared_(std::make_shared<Shared>(Shared{std::move(sampler)})) {}

  /// Called by a loader that begins to iterate. Right after `load_state()` it keeps the position.
  void reset(std::optional<size_t> new_size = std::nullopt) override {
    if (!std::exchange(shared_->is_loaded, false)) shared_->sampler.reset(new_size);
  }
  std::optional<BatchRequest> next(size_t batch_size) override {
    return shared_->sampler.next(batch_size);
  }
  void save(torch::serialize::OutputArchive& archive) const override {
    shared_->sampler.save(archive);
  }
  void load(torch::serialize::InputArchive& archive) override { shared_->sampler.load(archive); }

  /// Returns the position as bytes, for `SaveOptions::rank_state`.
  at::Tensor state() const {
    torch::serialize::OutputArchive archive;
    save(archive);
    std::ostringstream stream;
    archive.save_to(stream);
    const std::string bytes = stream.str();
    at::Tensor state = torch::empty({static_cast<int64_t>(bytes.size())}, at::kByte);
    std::memcpy(state.mutable_data_ptr(), bytes.data(), bytes.size());
    return state;
  }
  /// Restores a position that `state()` of a sampler made in the same way returned.
  void load_state(const at::Tensor& state) {
    const at::Tensor bytes = state.contiguous();
    std::istringstream stream(
        std::string(static_cast<const char*>(bytes.const_data_ptr()), bytes.nbytes()));
    torch::serialize::InputArchive archive;
    archive.load_from(stream);
    load(archive);
    shared_->is_loaded = true;
  }

  Sampler& inner() const { return shared_->sampler; }

 private:
  struct Shared {
    Sampler sampler;
    bool is_loaded = false;
  };
  std::shared_ptr<Shared> shared_;
};

}  // namespace tessera
