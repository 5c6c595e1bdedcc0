#pragma once

#include <ATen/core/Tensor.h>
#include <c10/util/ThreadLocalDebugInfo.h>
#include <tessera/export.h>
#include <tessera/parallel/dist_dataloader.h>
#include <tessera/tensor/device_mesh.h>

#include <cstdint>

namespace tessera {

/// The way on which the keys and values of all ranks reach each of them.
enum class RotateMethod : uint8_t {
  /// Passes blocks from rank to rank, beside the computation. Memory of two blocks.
  kRing,
  /// All at once, beside the computation of the first block. Fewer messages, but memory of the
  /// keys and values of the whole sequence.
  kAllGather,
};

struct ContextParallelOptions {
  /// The mesh dim along which sequences are cut; none: the mesh's only one.
  MeshDim mesh_dim = {};
  /// The sequences are in the order of `balance_sequence()`, in which all ranks have the same work
  /// in a causal attention. Otherwise the last of k ranks has 2k - 1 times as much as the first.
  /// **Results are wrong** if the order and this option don't agree.
  bool load_balance = false;
  RotateMethod rotate = RotateMethod::kRing;
};

/// While an instance lives, `torch::scaled_dot_product_attention` of DistTensors that are cut along
/// the sequence is computed without gathering them, by ring attention: every rank keeps its
/// queries, and meets the keys and values of all ranks one after the other. Model code is
/// unchanged.
///
/// ```cpp
/// const tessera::ContextParallel scope(mesh, {.mesh_dim = "cp"});
/// const auto tokens = tessera::distribute(ids, mesh, {tessera::Shard{1}});  // [batch, sequence]
/// model(tokens);
/// ```
///
/// It applies if q, k and v, each [batch, heads, sequence, head dim], are `Shard(2)` along that
/// mesh dim of this mesh. Along other mesh dims, batch and heads may be cut; other placements are
/// changed first. The sequence need not be a multiple of the ranks, unless it is balanced.
/// `is_causal`, `scale` and `enable_gqa` have their usual effects, and values are those of one
/// process up to the order of sums, in float or wider. Other attentions are computed as without the
/// scope.
///
/// It applies to this thread, and to activations that a backward recomputes in the scope; a
/// backward itself may run later. Scopes nest: the innermost counts. Without gradients of
/// gradients.
///
/// The constructor sends nothing. Throws `c10::ValueError` for a mesh dim that the mesh does not
/// have. The attention is collective over the mesh, and so is its backward. On all ranks it throws
/// `c10::NotImplementedError` for an `attn_mask` and for dropout, and `c10::ValueError` for sizes
/// that don't fit together; for a causal one of q and k of different lengths; for tensors on
/// another mesh that are cut along the sequence; and with `load_balance` for a causal one whose
/// sequence is not cut, or not a multiple of twice the ranks.
///
/// **Memory** of a rank: linear in its part of the sequence, where LibTorch has a flash kernel (on
/// the CPU, for heads of q and v of one size); elsewhere also scores of up to 2^24 elements.
class TESSERA_API ContextParallel {
 public:
  explicit ContextParallel(const DeviceMesh& mesh, const ContextParallelOptions& options = {});
  ~ContextParallel();
  ContextParallel(const ContextParallel&) = delete;
  ContextParallel& operator=(const ContextParallel&) = delete;

 private:
  c10::DebugInfoGuard scope_;
};

/// Returns `tensor` with its dim `dim`, the sequence, in the order that `load_balance` expects: of
/// 2k chunks for the k ranks of the mesh dim, a plain `Shard` then gives rank i the chunks i and 2k
/// - 1 - i. To be called for all inputs that go along the sequence: tokens, positions, labels.
///
/// Differentiable. Sends nothing for an ordinary tensor, and all of a DistTensor that is cut along
/// `dim`. Throws `c10::ValueError` unless the size of `dim` is a multiple of 2k.
TESSERA_API at::Tensor balance_sequence(const at::Tensor& tensor, int64_t dim,
                                        const DeviceMesh& mesh, const MeshDim& mesh_dim = {});

/// Reverses `balance_sequence()`, for outputs.
TESSERA_API at::Tensor unbalance_sequence(const at::Tensor& tensor, int64_t dim,
                                          const DeviceMesh& mesh, const MeshDim& mesh_dim = {});

}  // namespace tessera
