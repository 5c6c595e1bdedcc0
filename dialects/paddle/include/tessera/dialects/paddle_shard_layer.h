#pragma once

#include <tessera/checkpoint/checkpoint.h>
#include <tessera/engine/grad_scaler.h>
#include <tessera/parallel/dist_dataloader.h>
#include <tessera/parallel/dist_optimizer.h>
#include <tessera/parallel/distribute_module.h>

#include <cstdint>
#include <filesystem>
#include <initializer_list>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

namespace tessera::paddle {

using tessera::Partial;
using tessera::Placements;
using tessera::Replicate;
using tessera::Shard;

/// A rank, or rows of equal shape: `{{0, 1}, {2, 3}}`.
struct MeshArray {
  MeshArray(int rank) : ranks{rank} {}
  TESSERA_API MeshArray(std::initializer_list<MeshArray> rows);
  std::vector<int64_t> shape;
  std::vector<int64_t> ranks;  ///< row by row
};

/// Paddle's mesh: ranks in an array, with Paddle's checks and messages. See `DeviceMesh`.
class TESSERA_API ProcessMesh : public DeviceMesh {
 public:
  /// Takes the ranks and the shape of an integer tensor. Throws `c10::ValueError` for an invalid
  /// mesh.
  explicit ProcessMesh(const at::Tensor& mesh, std::vector<std::string> dim_names = {});
  ProcessMesh(std::initializer_list<MeshArray> mesh, std::vector<std::string> dim_names = {});
  ProcessMesh(DeviceMesh mesh) : DeviceMesh(std::move(mesh)) {}

  const std::vector<int>& process_ids() const { return ranks(); }
  int64_t get_dim_size(const std::string& dim_name) const { return size(dim(dim_name)); }
  /// Returns the mesh with that dim first; with `index`, only the ranks at that index along it.
  ProcessMesh get_mesh_with_dim(const std::string& dim_name,
                                std::optional<int64_t> index = std::nullopt) const {
    return with_first(dim_name, index);
  }
  /// `mesh[i]`: the ranks at index `i` of the first dim. `mesh[:, i]` is `select(1, i)`.
  ProcessMesh operator[](int64_t index) const { return select(0, index); }
};

/// The optional arguments of `shard_tensor`.
struct ShardTensorOptions {
  std::optional<at::ScalarType> dtype = std::nullopt;  ///< of the result; none: that of `data`
  std::optional<at::Device> place = std::nullopt;      ///< of the result; none: that of `data`
  /// False: the result requires a gradient; none: it does if `data` does.
  std::optional<bool> stop_gradient = std::nullopt;
};

/// A tensor, a number, or a list of numbers.
using ShardTensorData = std::variant<at::Tensor, c10::Scalar, std::vector<double>>;

/// Distributes `data`, equal on all ranks, over a mesh; nothing is sent. See `distribute()`.
///
/// In a `shard_fn`, places a parameter or buffer of the layer itself and returns it, so that
/// `linear->weight = shard_tensor(linear->weight, mesh, {Shard(1)})` works as written; elsewhere
/// the result is a new tensor. Throws `c10::ValueError` for a deferred tensor with a Partial
/// placement.
TESSERA_API at::Tensor shard_tensor(const ShardTensorData& data, const DeviceMesh& mesh,
                                    const Placements& placements,
                                    const ShardTensorOptions& options = {});

/// Calls `shard_tensor` with the result of `fn(args...)`.
template <class F, class... Args>
at::Tensor dtensor_from_fn(F&& fn, const DeviceMesh& mesh, const Placements& placements,
                           Args&&... args) {
  return shard_tensor(std::forward<F>(fn)(std::forward<Args>(args)...), mesh, placements);
}

/// `from_local()`, `to_local()`, `redistribute()` and `full_tensor()` by Paddle's names.
inline at::Tensor dtensor_from_local(const at::Tensor& local, const DeviceMesh& mesh,
                                     const Placements& placements) {
  return from_local(local, mesh, placements);
}
inline at::Tensor dtensor_to_local(const at::Tensor& dist_tensor) { return to_local(dist_tensor); }
inline at::Tensor reshard(const at::Tensor& dist_tensor, const DeviceMesh& mesh,
                          const Placements& placements) {
  return redistribute(dist_tensor, mesh, placements);
}
inline at::Tensor unshard_dtensor(const at::Tensor& dist_tensor) {
  return full_tensor(dist_tensor);
}

/// Makes one DistTensor on `mesh` from the DistTensors on its slices along `local_mesh_dim`, in
/// order; of those on other slices than this rank's, only the sizes are used. Nothing is sent;
/// differentiable.
TESSERA_API at::Tensor dtensor_from_local_list(const std::vector<at::Tensor>& local_tensor_list,
                                               const DeviceMesh& mesh, const Placements& placements,
                                               int64_t local_mesh_dim = -1);
/// The inverse: returns a DistTensor for each slice of the mesh along `local_mesh_dim`.
TESSERA_API std::vector<at::Tensor> local_tensor_list_from_dtensor(const at::Tensor& dist_tensor,
                                                                   int64_t local_mesh_dim = -1);

using ShardFn = PartitionFn;

namespace detail {
/// Returns the mesh; throws if none is given.
TESSERA_API const DeviceMesh& check_mesh(const std::optional<DeviceMesh>& process_mesh);
}  // namespace detail

/// Places the parameters and buffers of `layer` by `shard_fn`, in place; those that it does not
/// place are replicated. Returns a handle of the same layer that calls `input_fn` and `output_fn`.
/// Collective over the mesh; see `distribute_module()` and `DistModule`.
template <class ModulePtr>  // or a holder
auto shard_layer(const ModulePtr& layer, const std::optional<DeviceMesh>& process_mesh,
                 const ShardFn& shard_fn = {}, ForwardHook input_fn = {},
                 ForwardHook output_fn = {}) {
  return distribute_module(layer, detail::check_mesh(process_mesh), shard_fn, std::move(input_fn),
                           std::move(output_fn));
}

/// Throws `c10::NotImplementedError`: the tensors of a scripted module can't be placed one by one.
/// Use `fully_shard` for it.
[[noreturn]] TESSERA_API void shard_layer(torch::jit::Module& layer,
                                          const std::optional<DeviceMesh>& process_mesh);

/// A mesh dim by name or number; empty: the first along which all parameters are replicated.
using tessera::MeshDim;

/// A stage of `shard_optimizer`: accumulators are sharded over a mesh dim, at stage 3 parameters as
/// well. Whole gradients are freed once they are reduced, at stages 1 and 2 alike.
struct ShardingStage {
  ShardLevel level = ShardLevel::kOptimizerState;
  MeshDim sharding_mesh_dim = {};
  /// None: the mesh of the parameters. Any other mesh is an error.
  std::optional<DeviceMesh> mesh = std::nullopt;
};
template <ShardLevel kLevel>
struct ShardingStageOf : ShardingStage {
  explicit ShardingStageOf(MeshDim dim = {}, std::optional<DeviceMesh> mesh = std::nullopt)
      : ShardingStage{kLevel, std::move(dim), std::move(mesh)} {}
  explicit ShardingStageOf(DeviceMesh mesh) : ShardingStageOf(MeshDim(), std::move(mesh)) {}
};
using ShardingStage1 = ShardingStageOf<ShardLevel::kOptimizerState>;
using ShardingStage2 = ShardingStageOf<ShardLevel::kGradients>;
using ShardingStage3 = ShardingStageOf<ShardLevel::kParameters>;

/// None, a function that places accumulators, or a stage.
using ShardOptimizerFn = std::variant<std::monostate, StatePlacementFn, ShardingStage>;

/// Options that Paddle's optimizers have and LibTorch's lack.
struct ShardOptimizerOptions {
  bool multi_precision = false;  ///< fp32 master weights of fp16 and bf16 parameters
  bool elementwise = false;      ///< see `DistOptimizerOptions::elementwise`
};

/// Makes `optimizer` step on DistTensors, with accumulators placed by `shard_fn`; see
/// `DistOptimizer`. Throws `c10::ValueError` for a null optimizer.
TESSERA_API DistOptimizer shard_optimizer(torch::optim::Optimizer* optimizer,
                                          const ShardOptimizerFn& shard_fn = {},
                                          const ShardOptimizerOptions& options = {});
inline DistOptimizer shard_optimizer(torch::optim::Optimizer& optimizer,
                                     const ShardOptimizerFn& shard_fn = {},
                                     const ShardOptimizerOptions& options = {}) {
  return shard_optimizer(&optimizer, shard_fn, options);
}

/// A `GradScaler` for sharded optimizers: an overflow on any rank of any mesh skips all ranks'
/// step.
class TESSERA_API ShardScaler {
 public:
  explicit ShardScaler(GradScaler& scaler) : scaler_(&scaler) {}
  at::Tensor scale(const at::Tensor& loss) const { return scaler_->scale(loss); }
  void unscale_(DistOptimizer& optimizer) { optimizer.unscale_(*scaler_); }
  bool step(DistOptimizer& optimizer) { return optimizer.step(*scaler_); }
  void update() { scaler_->update(); }
  /// Calls `step()` and `update()`, like Paddle's.
  bool minimize(DistOptimizer& optimizer) {
    const bool stepped = step(optimizer);
    update();
    return stepped;
  }
  GradScaler& scaler() const { return *scaler_; }

 private:
  GradScaler* scaler_;
};

inline ShardScaler shard_scaler(GradScaler& scaler) { return ShardScaler(scaler); }

/// Save and load tensors by name; see `save_state_dict()` and `load_state_dict()` in
/// `tessera/checkpoint/checkpoint.h`. Nested dicts are flattened with dots by
/// `flatten_state_dict()`.
using tessera::flatten_state_dict;
using tessera::StateDict;
inline void save_state_dict(const StateDict& state_dict, const std::filesystem::path& path) {
  tessera::save_state_dict(path, state_dict);
}
inline std::vector<std::string> load_state_dict(const StateDict& state_dict,
                                                const std::filesystem::path& path) {
  return tessera::load_state_dict(path, state_dict);
}

/// The optional arguments of `shard_dataloader`; see `DistDataloaderOptions`.
struct ShardDataloaderOptions {
  std::vector<std::string> input_keys = {};
  std::vector<MeshDim> shard_dims = {};
  bool is_dataset_splitted = false;
  bool check_values = false;
};

/// Calls `distribute_dataloader()`; `loader`: a `unique_ptr`, or one that outlives the result.
template <class Loader>
auto shard_dataloader(Loader&& loader, std::vector<DeviceMesh> meshes,
                      const ShardDataloaderOptions& options = {}) {
  return distribute_dataloader(
      std::forward<Loader>(loader), std::move(meshes),
      {options.input_keys, options.shard_dims, options.is_dataset_splitted, options.check_values});
}

}  // namespace tessera::paddle
