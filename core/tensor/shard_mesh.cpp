#include "tensor/shard_mesh.h"

#include <ATen/ops/full.h>
#include <c10/util/Exception.h>
#include <fmt/format.h>

#include <algorithm>
#include <exception>
#include <utility>

#include "comm/group/blocking_all_reduce.h"

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
      "[fully_shard] all ranks of a {} process group must have the same rank in their {} process "
      "groups, and these must have the same size; rank 0 of it is rank {}, rank {} is rank {}",
      name, other_name, places[0], differs - places.begin(), *differs);
}

// Packs the parts into one text, each after its length, and unpacks them again.
std::string pack(const std::vector<std::string>& parts) {
  std::string text;
  for (const std::string& part : parts) text += std::to_string(part.size()) + ":" + part;
  return text;
}

void unpack(const std::string& text, std::vector<std::string>& parts) {
  for (size_t next = 0; next < text.size();) {
    const size_t colon = text.find(':', next);
    const size_t length = std::stoull(text.substr(next, colon - next));
    parts.push_back(text.substr(colon + 1, length));
    next = colon + 1 + length;
  }
}

void run_as_check(const std::function<void()>& check, const char* subject) {
  try {
    check();
  } catch (const c10::Error&) {
    throw;
  } catch (const std::exception& error) {
    TORCH_CHECK(false, "[", subject, "] ", error.what());
  }
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
  blocking_all_reduce(*shard_, tensor, op, tag);
  blocking_all_reduce(*replicate_, tensor, op, tag);
}

bool ShardMesh::any(bool value, const CollectiveTag& tag) const {
  const at::Tensor found = at::full({1}, value ? 1 : 0, at::kFloat);
  all_reduce(found, ReduceOp::kMax, tag);
  blocking_all_reduce(*parts_, found, ReduceOp::kMax, tag);
  return found.item<float>() > 0;
}

void ShardMesh::broadcast(const at::Tensor& tensor, const CollectiveTag& tag) const {
  if (shard_->size() > 1) shard_->broadcast(tensor, 0, tag)->wait();
  if (replicates()) replicate_->broadcast(tensor, 0, tag)->wait();
}

Ranks::Ranks(std::vector<ProcessGroup*> lines) : lines_(std::move(lines)) {
  for (const ProcessGroup* line : lines_) {
    rank_ += line->rank() * size_;
    size_ *= line->size();
  }
}

std::vector<std::string> Ranks::all_gather_bytes(const std::string& bytes,
                                                 const CollectiveTag& tag) const {
  std::vector<std::string> all = {bytes};
  for (ProcessGroup* line : lines_) {
    if (line->size() == 1) continue;
    const auto gathered = tessera::all_gather_bytes(*line, pack(all), tag);
    all.clear();
    for (const std::string& part : gathered) unpack(part, all);
  }
  return all;
}

void Ranks::check(const std::function<void()>& check, const char* subject) const {
  std::string error;
  std::exception_ptr exception;
  try {
    run_as_check(check, subject);
  } catch (const c10::Error& e) {
    error = e.what_without_backtrace();
    exception = std::current_exception();
  }
  if (size() == 1) {
    if (exception) std::rethrow_exception(exception);
    return;
  }
  const auto errors = all_gather_bytes(error, {"check of the arguments", Channel::kControl});
  if (exception) std::rethrow_exception(exception);
  for (size_t rank = 0; rank < errors.size(); ++rank) {
    TORCH_CHECK_VALUE(errors[rank].empty(), errors[rank], " (on rank ", rank, " of ", errors.size(),
                      ")");
  }
}

void check_on_all_ranks(const ShardMesh& mesh, const std::function<void()>& check,
                        const char* subject) {
  Ranks({&mesh.shard(), &mesh.replicate()}).check(check, subject);
}

}  // namespace tessera
