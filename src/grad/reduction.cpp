#include "grad/reduction.h"

#include <utility>

namespace tessera {

Reduction::Reduction(const ShardMesh& mesh, const at::Tensor& out, std::vector<Piece> pieces,
                     std::span<const int64_t> bounds, const ReduceScatterOptions& options,
                     std::string_view subject)
    : mesh_(mesh),
      out_(out),
      subject_(subject),
      work_(mesh.shard().reduce_scatter(out, std::move(pieces), bounds, options,
                                        {subject, Channel::kGrads})) {}

void Reduction::replicate() {
  work_->wait();
  work_ = mesh_.replicate().all_reduce(out_, ReduceOp::kSum, {subject_, Channel::kGrads});
}

}  // namespace tessera
