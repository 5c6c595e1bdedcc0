#pragma once

#include <tessera/export.h>
#include <tessera/tensor/device_mesh.h>
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
  /// For batches that are maps: all names of a batch, in the order of the meshes.
  std::vector<std::string> keys = {};
  /// The mesh dim over which batches are sharded along their first dim; empty: batches are
  /// replicated. One for all meshes, or one for each.
  std::vector<MeshDim> mesh_dims = {};
  /// True: each rank's loader returns that rank's part. False: all ranks' loaders return the same
  /// whole batches.
  bool is_split = false;
  /// Compares whole batches over the ranks; loaders that shuffle differently are then an error.
  bool check_values = false;
};

namespace detail {

/// The placements that the options ask for, for each mesh.
class TESSERA_API InputPlacement {
 public:
  InputPlacement(std::vector<DeviceMesh> meshes, DistDataloaderOptions options);

  /// Returns `input` as a DistTensor; it is number `index` of the `count` items in its batch.
  at::Tensor place(const at::Tensor& input, size_t index, size_t count) const;
  /// Returns `input` as a DistTensor, on the mesh at the position of `key` in `keys`.
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

/// A loader whose batches are DistTensors: `for (auto& batch : loader)`, as often as the wrapped
/// loader allows.
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

/// Wraps a loader of `torch::data` so that its batches are DistTensors. A batch is a tensor, an
/// `Example` of tensors (data, then target), a vector, or a map by name; with several meshes, its
/// items go to one mesh each, in order.
///
/// Each rank keeps its part of a whole batch, and nothing is sent. With `is_split`, the ranks of a
/// line exchange the numbers of their rows; these must be those of `torch::chunk`. Throws
/// `c10::ValueError` for mesh dims that are not one for all or one for each mesh, for batches
/// without one item for each mesh, and for keys that are not those of the batch.
template <class Loader>
DistDataloader<Loader> distribute_dataloader(std::unique_ptr<Loader> loader,
                                             std::vector<DeviceMesh> meshes,
                                             DistDataloaderOptions options = {}) {
  return {std::move(loader), std::move(meshes), std::move(options)};
}
/// As above; the loader must outlive the result.
template <class Loader>
DistDataloader<Loader> distribute_dataloader(Loader& loader, std::vector<DeviceMesh> meshes,
                                             DistDataloaderOptions options = {}) {
  return {std::shared_ptr<Loader>(std::shared_ptr<void>(), &loader), std::move(meshes),
          std::move(options)};
}

}  // namespace tessera
