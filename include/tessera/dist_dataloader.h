#pragma once

#include <tessera/device_mesh.h>
#include <tessera/export.h>
#include <torch/data/example.h>

#include <iterator>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <variant>
#include <vector>

namespace tessera {

/// A mesh dim by name or number, or none.
using MeshDim = std::variant<std::monostate, std::string, int64_t>;

struct DistDataloaderOptions {
  /// For batches that are maps: the names in the order of the meshes. All names of a batch.
  std::vector<std::string> keys = {};
  /// The mesh dim over which batches are split along their first dim; empty: batches are
  /// replicated. One for all meshes, or one for each.
  std::vector<MeshDim> mesh_dims = {};
  /// True: each rank's loader gives what that rank shall have. False: all ranks' loaders give the
  /// same whole batches.
  bool is_split = false;
  /// Compare whole batches over the ranks: loaders that shuffle differently are an error then.
  bool check_values = false;
};

namespace detail {

/// What the options mean for each mesh.
class TESSERA_API InputPlacement {
 public:
  InputPlacement(std::vector<DeviceMesh> meshes, DistDataloaderOptions options);

  /// `input` as a DistTensor; it is number `index` of `count` in its batch.
  at::Tensor place(const at::Tensor& input, size_t index, size_t count) const;
  /// By the order of `keys`.
  at::Tensor place(const at::Tensor& input, const std::string& key, size_t count) const;

 private:
  at::Tensor join(const at::Tensor& part, const DeviceMesh& mesh, int64_t mesh_dim) const;

  std::vector<DeviceMesh> meshes_;
  std::vector<std::optional<int64_t>> dims_;  // of each mesh
  DistDataloaderOptions options_;
};

inline at::Tensor place_batch(const InputPlacement& placement, const at::Tensor& batch) {
  return placement.place(batch, 0, 1);
}
template <class Data, class Target>
auto place_batch(const InputPlacement& placement, const torch::data::Example<Data, Target>& batch) {
  return torch::data::Example<Data, Target>(placement.place(batch.data, 0, 2),
                                            placement.place(batch.target, 1, 2));
}
template <class Data>
auto place_batch(const InputPlacement& placement,
                 const torch::data::Example<Data, torch::data::example::NoTarget>& batch) {
  return torch::data::Example<Data, torch::data::example::NoTarget>(
      placement.place(batch.data, 0, 1));
}
inline std::vector<at::Tensor> place_batch(const InputPlacement& placement,
                                           const std::vector<at::Tensor>& batch) {
  std::vector<at::Tensor> placed;
  for (const at::Tensor& input : batch)
    placed.push_back(placement.place(input, placed.size(), batch.size()));
  return placed;
}
template <class Map>
requires requires { typename Map::mapped_type; }
Map place_batch(const InputPlacement& placement, const Map& batch) {
  Map placed;
  for (const auto& [key, input] : batch)
    placed.emplace(key, placement.place(input, key, batch.size()));
  return placed;
}

}  // namespace detail

/// A loader whose batches are DistTensors: `for (auto& batch : loader)`, as often as the loader
/// allows.
template <class Loader>
class DistDataloader {
  using Inner = decltype(std::declval<Loader&>().begin());
  using Batch = std::remove_cvref_t<decltype(*std::declval<Inner&>())>;

 public:
  class iterator {
   public:
    using iterator_category = std::input_iterator_tag;
    using value_type = Batch;
    using difference_type = std::ptrdiff_t;
    using pointer = Batch*;
    using reference = Batch&;

    iterator(Inner inner, const detail::InputPlacement* placement)
        : inner_(std::move(inner)), placement_(placement) {}
    Batch& operator*() {
      if (!batch_) batch_.emplace(detail::place_batch(*placement_, *inner_));
      return *batch_;
    }
    Batch* operator->() { return &**this; }
    iterator& operator++() {
      batch_.reset();
      ++inner_;
      return *this;
    }
    bool operator==(const iterator& other) const { return inner_ == other.inner_; }
    bool operator!=(const iterator& other) const { return inner_ != other.inner_; }

   private:
    Inner inner_;
    const detail::InputPlacement* placement_;
    std::optional<Batch> batch_;
  };

  DistDataloader(std::shared_ptr<Loader> loader, std::vector<DeviceMesh> meshes,
                 DistDataloaderOptions options)
      : loader_(std::move(loader)), placement_(std::move(meshes), std::move(options)) {}

  iterator begin() { return {loader_->begin(), &placement_}; }
  iterator end() { return {loader_->end(), &placement_}; }

 private:
  std::shared_ptr<Loader> loader_;
  detail::InputPlacement placement_;
};

/// Lets a loader of `torch::data` give DistTensors. A batch is a tensor, an `Example` of tensors
/// (data, then target), a vector, or a map by name; with several meshes its items go to one each,
/// in order.
///
/// Of a whole batch each rank keeps its part, and nothing is sent. With `is_split`, the
/// ranks of a line tell each other how many rows they have, which must be as `torch::chunk` cuts.
/// Throws `c10::ValueError` for mesh dims that are not one for all or one for each mesh, for items
/// that are not one for each mesh, and for keys that are not those of the batch.
template <class Loader>
DistDataloader<Loader> distribute_dataloader(std::unique_ptr<Loader> loader,
                                             std::vector<DeviceMesh> meshes,
                                             DistDataloaderOptions options = {}) {
  return {std::move(loader), std::move(meshes), std::move(options)};
}
/// The same; the loader must outlive the result.
template <class Loader>
DistDataloader<Loader> distribute_dataloader(Loader& loader, std::vector<DeviceMesh> meshes,
                                             DistDataloaderOptions options = {}) {
  return {std::shared_ptr<Loader>(std::shared_ptr<void>(), &loader), std::move(meshes),
          std::move(options)};
}

}  // namespace tessera
