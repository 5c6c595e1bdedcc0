#include <c10/util/Exception.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <tessera/tensor/dist_tensor.h>
#include <tessera/tensor/local_map.h>

#include <algorithm>
#include <sstream>
#include <string>

#include "tensor/chunks.h"
#include "tensor/dist_meta.h"

namespace tessera::detail {
namespace {

constexpr CollectiveTag kSizesTag{"sizes of the results of local_map", Channel::kControl};

bool is_tensor(const at::Tensor* value) { return value && value->defined(); }

// True if the parts of ranks have different sizes.
bool is_cut_unevenly(const at::Tensor& tensor) {
  const DeviceMesh& mesh = mesh_of(tensor);
  const Placements& placements = placements_of(tensor);
  std::vector<int64_t> parts(tensor.dim(), 1);
  for (size_t i = 0; i < placements.size(); ++i) {
    if (const auto* const shard = std::get_if<Shard>(&placements[i]))
      parts[shard->dim] *= mesh.size(static_cast<int64_t>(i));
  }
  for (int64_t d = 0; d < tensor.dim(); ++d) {
    if (tensor.size(d) % parts[d] != 0) return true;
  }
  return false;
}

// The sizes of tensors, one after the other, each after its number of dims.
std::string text_of(const std::vector<std::vector<int64_t>>& sizes) {
  std::string text;
  for (const auto& each : sizes) text += fmt::format("{} {} ", each.size(), fmt::join(each, " "));
  return text;
}

std::vector<std::vector<int64_t>> sizes_in(const std::string& text) {
  std::vector<std::vector<int64_t>> sizes;
  std::istringstream stream(text);
  for (size_t ndim = 0; stream >> ndim;) {
    sizes.emplace_back(ndim);
    for (int64_t& size : sizes.back()) stream >> size;
  }
  return sizes;
}

// The ranks that differ from this one only in mesh dims that shard `dim`, as indices in the mesh.
std::vector<size_t> ranks_along(const DeviceMesh& mesh, const Placements& placements, int64_t dim) {
  const std::vector<int64_t>& own = *mesh.coordinate();
  std::vector<size_t> indices;
  for (size_t r = 0; r < mesh.ranks().size(); ++r) {
    const auto other = mesh.coordinate_of(mesh.ranks()[r]);
    bool is_along = true;
    for (size_t i = 0; i < own.size(); ++i)
      is_along &= other[i] == own[i] || is_shard(placements[i], dim);
    if (is_along) indices.push_back(r);
  }
  return indices;
}

}  // namespace

LocalCall::LocalCall(const PlacementsList& out_placements, const LocalMapOptions& options)
    : out_placements_(out_placements), options_(options), mesh_(options.mesh) {}

at::Tensor LocalCall::part_of(const at::Tensor& argument) {
  const size_t index = arguments_ - 1;
  has_dist_ = true;
  if (!mesh_) mesh_ = mesh_of(argument);
  TORCH_CHECK_VALUE(mesh_of(argument) == *mesh_,
                    "[local_map] all DistTensors must be on one mesh; argument ", index, " is on ",
                    mesh_of(argument).to_string(), ", expected ", mesh_->to_string());
  TORCH_CHECK_VALUE(mesh_->is_member(),
                    "[local_map] only ranks of the mesh can call the function, as others have no "
                    "parts; this rank is not in ",
                    mesh_->to_string());
  const auto wanted = [&](const PlacementsList& list, const char* name) {
    TORCH_CHECK_VALUE(list[index], "[local_map] `", name,
                      "` must have placements for each DistTensor; argument ", index,
                      ", placed as ", to_string(placements_of(argument)), ", has std::nullopt");
    return normalize(*list[index], mesh_->ndim(), argument.dim());
  };
  at::Tensor placed = argument;
  if (!options_.in_placements.empty()) {
    const Placements expected = wanted(options_.in_placements, "in_placements");
    TORCH_CHECK_VALUE(options_.redistribute_inputs || expected == placements_of(argument),
                      "[local_map] argument ", index,
                      " must be placed as `in_placements` says; expected ", to_string(expected),
                      ", got ", to_string(placements_of(argument)),
                      "; redistribute() it, or set `redistribute_inputs`");
    placed = redistribute(argument, expected);
  }
  is_uneven_ |= is_cut_unevenly(placed);
  if (options_.in_grad_placements.empty()) return to_local(placed);
  return to_local(placed, wanted(options_.in_grad_placements, "in_grad_placements"));
}

void LocalCall::add_argument(at::Tensor* argument) {
  const size_t index = arguments_++;
  for (const PlacementsList* list : {&options_.in_placements, &options_.in_grad_placements}) {
    if (list->empty()) continue;
    if (index >= list->size()) return;  // check_arguments() throws
    TORCH_CHECK_VALUE(is_tensor(argument) || !(*list)[index], "[local_map] argument ", index,
                      " is not a tensor, and so must have no placements; got ",
                      to_string((*list)[index].value_or(Placements())));
  }
  if (is_tensor(argument) && is_dist(*argument)) *argument = part_of(*argument);
}

void LocalCall::check_arguments() const {
  const auto check = [&](const PlacementsList& list, const char* name) {
    TORCH_CHECK_VALUE(list.empty() || list.size() == arguments_, "[local_map] `", name,
                      "` must have one entry for each argument; expected ", arguments_, ", got ",
                      list.size());
  };
  check(options_.in_placements, "in_placements");
  check(options_.in_grad_placements, "in_grad_placements");
}

// The global sizes of all results, from the sizes of all ranks' parts. Collective over the mesh.
std::vector<std::vector<int64_t>> LocalCall::exchanged_sizes() const {
  std::vector<std::vector<int64_t>> own;
  for (const at::Tensor* result : results_)
    own.push_back(is_tensor(result) ? result->sizes().vec() : std::vector<int64_t>());
  std::vector<std::vector<std::vector<int64_t>>> parts;  // of all ranks
  for (const std::string& text : all_gather_bytes(*mesh_->process_group(), text_of(own), kSizesTag))
    parts.push_back(sizes_in(text));
  std::vector<std::vector<int64_t>> whole = own;
  for (size_t k = 0; k < own.size(); ++k) {
    if (!is_tensor(results_[k]) || !out_placements_[k]) continue;
    const auto ndim = static_cast<int64_t>(own[k].size());
    const Placements placements = normalize(*out_placements_[k], mesh_->ndim(), ndim);
    const auto has_dims = [&](const auto& part) {
      return part.size() == own.size() && part[k].size() == own[k].size();
    };
    TORCH_CHECK_VALUE(std::ranges::all_of(parts, has_dims),
                      "[local_map] all ranks' parts of result ", k,
                      " must have the same number of dims");
    for (int64_t d = 0; d < ndim; ++d) {
      whole[k][d] = 0;
      for (const size_t r : ranks_along(*mesh_, placements, d)) whole[k][d] += parts[r][k][d];
    }
    for (size_t r = 0; r < parts.size(); ++r) {
      const int rank = mesh_->ranks()[r];
      const auto expected =
          local_sizes(whole[k], placements, mesh_->shape(), mesh_->coordinate_of(rank));
      TORCH_CHECK_VALUE(parts[r][k] == expected, "[local_map] the part of result ", k, " on rank ",
                        rank, " must be that of a tensor of sizes ", at::IntArrayRef(whole[k]),
                        " with placements ", to_string(placements), "; expected sizes ",
                        at::IntArrayRef(expected), ", got ", at::IntArrayRef(parts[r][k]));
    }
  }
  return whole;
}

void LocalCall::finish() {
  if (!has_dist_) return;
  TORCH_CHECK_VALUE(results_.size() == out_placements_.size(),
                    "[local_map] `out_placements` must have one entry for each result; expected ",
                    results_.size(), ", got ", out_placements_.size());
  bool any_cut = false;
  for (size_t i = 0; i < results_.size(); ++i) {
    const std::optional<Placements>& placements = out_placements_[i];
    const at::Tensor* const result = results_[i];
    TORCH_CHECK_VALUE(is_tensor(result) || !placements, "[local_map] result ", i,
                      " is not a tensor, and so must have no placements; got ",
                      to_string(placements.value_or(Placements())));
    TORCH_CHECK_VALUE(!is_tensor(result) || !is_dist(*result),
                      "[local_map] the function must return ordinary tensors; result ", i,
                      " is a DistTensor");
    if (placements)
      any_cut |= std::ranges::any_of(
          *placements, [](const Placement& placement) { return is_shard(placement); });
  }
  std::optional<std::vector<std::vector<int64_t>>> sizes;
  if (is_uneven_ && any_cut) sizes = exchanged_sizes();
  for (size_t i = 0; i < results_.size(); ++i) {
    if (!out_placements_[i]) continue;
    *results_[i] = from_local(*results_[i], *mesh_, *out_placements_[i],
                              sizes ? std::optional((*sizes)[i]) : std::nullopt);
  }
}

}  // namespace tessera::detail
