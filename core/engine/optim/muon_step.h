#pragma once

#include <ATen/core/Tensor.h>
#include <tessera/engine/muon.h>

#include <cstdint>
#include <set>
#include <vector>

#include "engine/unit/layout.h"
#include "tensor/shard_mesh.h"

namespace tessera {

/// A matrix, or a stack of them, of which ranks have parts.
struct CutMatrix {
  const ParamSlot* slot = nullptr;
  const ShardMesh* ranks = nullptr;
  std::vector<int64_t> bounds;  ///< rank r has elements [bounds[r], bounds[r + 1]) of the parameter
  size_t param_group = 0;
  at::Device device = at::kCPU;  ///< of the parts
  at::Tensor part;               ///< this rank's, as the optimizer holds it; undefined: it has none
};

/// Does `Muon::step()` for parameters some of which are `cut`: all those that have a gradient, in
/// the same order on all ranks. Collective. See [Note: Cut matrices] in muon_step.cpp.
void step_muon(Muon& optimizer, const std::vector<CutMatrix>& cut);

// The three parts of a step of one matrix. The first and the last treat each element by itself.

/// Updates the momentum, and returns what is to be made orthogonal.
at::Tensor muon_update(const MuonOptions& options, const at::Tensor& grad,
                       const at::Tensor& buffer);
/// Returns a matrix with the singular vectors of `update`, whose singular values are near 1; in
/// bfloat16, to which it rounds `update` first.
at::Tensor orthogonalized(const at::Tensor& update, const MuonOptions& options);
/// Steps `param`, a matrix of this shape or a part of one.
void muon_descend(const MuonOptions& options, int64_t rows, int64_t columns,
                  const at::Tensor& param, const at::Tensor& direction);

/// Returns the momentum of a parameter, of its shape; zeros if it has none.
at::Tensor muon_buffer(Muon& optimizer, const at::Tensor& param);
/// Throws as `Muon::step()` does for gradients that it can't step with.
void check_muon_gradients(const Muon& optimizer);
/// Steps the parameters of a param group that have a gradient, but for `others`.
void step_muon_group(Muon& optimizer, const torch::optim::OptimizerParamGroup& group,
                     const std::set<const c10::TensorImpl*>& others);

}  // namespace tessera
