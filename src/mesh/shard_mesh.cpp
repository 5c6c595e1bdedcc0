#include "mesh/shard_mesh.h"

#include <c10/util/Exception.h>
#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "group/host_all_reduce.h"
#include "mesh/ranks.h"

namespace tessera {
namespace {

// "" if all ranks of `dim` have the same rank in the other dim.
std::string compare_places(ProcessGroup& dim, const char* name, const ProcessGroup& other,
                           const char* other_name) {
  const std::string place = fmt::format("{} of {}", other.rank(), other.size());
  const auto places = all_gather_bytes(dim, place, {"shard mesh", Channel::kControl});
  const auto differs =
      std::find_if(places.begin(), places.end(), [&](const auto& p) { return p != places[0]; });
  if (differs == places.end()) return "";
  return fmt::format(
      "[fully_shard] the ranks of a {} process group must have one rank in their {} process "
      "groups, "
      "which must be of one size; rank 0 of it is rank {}, rank {} is rank {}",
      name, other_name, places[0], differs - places.begin(), *differs);
}

}  // namespace

ShardMesh::ShardMesh(ProcessGroupPtr shard, ProcessGroupPtr replicate, ProcessGroupPtr parts)
    : shard_(std::move(shard)),
      replicate_(replicate ? std::move(replicate) : single_process_group()),
      parts_(parts ? std::move(parts) : single_process_group()) {}

void ShardMesh::check() const {
  if (size() == 1) return;
  std::string error = compare_places(*shard_, "shard", *replicate_, "replicate");
  // All ranks compare both dims, even after a mismatch: other ranks wait for them.
  if (replicates()) {
    const std::string second = compare_places(*replicate_, "replicate", *shard_, "shard");
    if (error.empty()) error = second;
  }
  check_on_all_ranks(*this, [&] { TORCH_CHECK_VALUE(error.empty(), error); });
}

std::vector<std::string> ShardMesh::all_gather_bytes(const std::string& bytes,
                                                     const CollectiveTag& tag) const {
  return Ranks({shard_.get(), replicate_.get()}).all_gather_bytes(bytes, tag);
}

void ShardMesh::all_reduce(const at::Tensor& tensor, ReduceOp op, const CollectiveTag& tag) const {
  host_all_reduce(*shard_, tensor, op, tag);
  host_all_reduce(*replicate_, tensor, op, tag);
}

void ShardMesh::broadcast(const at::Tensor& tensor, const CollectiveTag& tag) const {
  if (shard_->size() > 1) shard_->broadcast(tensor, 0, tag)->wait();
  if (replicates()) replicate_->broadcast(tensor, 0, tag)->wait();
}

void check_on_all_ranks(const ShardMesh& mesh, const std::function<void()>& check,
                        const char* subject) {
  Ranks({&mesh.shard(), &mesh.replicate()}).check(check, subject);
}

}  // namespace tessera
