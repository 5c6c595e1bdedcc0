#include <c10/util/ArrayRef.h>
#include <c10/util/Exception.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <tessera/comm/world.h>
#include <tessera/tensor/device_mesh.h>

#include <algorithm>
#include <atomic>
#include <numeric>
#include <set>
#include <utility>

#include "comm/start/process_groups.h"

namespace tessera {

struct DeviceMesh::State {
  State(std::shared_ptr<ProcessGroups> process_groups, std::vector<int64_t> shape,
        std::vector<int> ranks, std::vector<std::string> dim_names)
      : process_groups(std::move(process_groups)),
        shape(std::move(shape)),
        ranks(std::move(ranks)),
        dim_names(std::move(dim_names)),
        coordinate(place_of(this->process_groups->rank())),
        made(this->shape.size() + 1) {}

  int64_t wrap(const char* function, int64_t mesh_dim) const {
    const auto ndim = static_cast<int64_t>(shape.size());
    TORCH_CHECK_VALUE(mesh_dim >= -ndim && mesh_dim < ndim, "[", function,
                      "] the mesh must have the mesh dim; expected ", -ndim, " to ", ndim - 1,
                      ", got ", mesh_dim, " (", to_string(), ")");
    return mesh_dim < 0 ? mesh_dim + ndim : mesh_dim;
  }

  int64_t dim(const char* function, const std::string& name) const {
    const auto found = std::find(dim_names.begin(), dim_names.end(), name);
    TORCH_CHECK_VALUE(found != dim_names.end(), "[", function,
                      "] the mesh must have a mesh dim of that name; expected one of ",
                      fmt::format("{}", fmt::join(dim_names, ", ")), ", got ", name);
    return found - dim_names.begin();
  }

  // The coordinate of `rank`, if it is in the mesh.
  std::optional<std::vector<int64_t>> place_of(int rank) const {
    const auto found = std::find(ranks.begin(), ranks.end(), rank);
    if (found == ranks.end()) return std::nullopt;
    std::vector<int64_t> place(shape.size());
    int64_t index = found - ranks.begin();
    for (size_t i = shape.size(); i-- > 0; index /= shape[i]) place[i] = index % shape[i];
    return place;
  }

  int rank_at(const std::vector<int64_t>& place) const {
    int64_t index = 0;
    for (size_t i = 0; i < shape.size(); ++i) index = index * shape[i] + place[i];
    return ranks[index];
  }

  // The ranks that `mesh_dims` span from `place`, row by row in the order of `mesh_dims`.
  std::vector<int> ranks_along(const std::vector<int64_t>& mesh_dims,
                               std::vector<int64_t> place) const {
    int64_t count = 1;
    for (const int64_t dim : mesh_dims) count *= shape[dim];
    std::vector<int> along(count);
    for (int64_t i = 0; i < count; ++i) {
      int64_t index = i;
      for (size_t d = mesh_dims.size(); d-- > 0; index /= shape[mesh_dims[d]])
        place[mesh_dims[d]] = index % shape[mesh_dims[d]];
      along[i] = rank_at(place);
    }
    return along;
  }

  const std::vector<int64_t>& own_place(const char* function) const {
    TORCH_CHECK_VALUE(coordinate, "[", function, "] this rank must be in the mesh; got rank ",
                      process_groups->rank(), " and ", to_string());
    return *coordinate;
  }

  // Returns the process group in `made[slot]`; on first use, that of `ranks()`.
  template <class Ranks>
  const ProcessGroupPtr& process_group(int64_t slot, Ranks ranks) const {
    if (const auto* known = made[slot].load(std::memory_order_acquire)) return *known;
    const ProcessGroupPtr& found = process_groups->shared(ranks());
    made[slot].store(&found, std::memory_order_release);
    return found;
  }

  std::string to_string() const {
    return fmt::format("DeviceMesh([{}], ranks [{}], dims [{}])", fmt::join(shape, ", "),
                       fmt::join(ranks, ", "), fmt::join(dim_names, ", "));
  }

  const std::shared_ptr<ProcessGroups> process_groups;
  const std::vector<int64_t> shape;
  const std::vector<int> ranks;
  const std::vector<std::string> dim_names;
  const std::optional<std::vector<int64_t>> coordinate;  // of this rank
  // Process groups of the line along each mesh dim, and of the whole mesh; owned by
  // `process_groups`.
  mutable std::vector<std::atomic<const ProcessGroupPtr*>> made;
};

namespace {

void check_shape(const std::vector<int64_t>& shape, size_t ranks) {
  const c10::IntArrayRef sizes(shape);
  TORCH_CHECK_VALUE(!shape.empty(), "[DeviceMesh] `shape` must have a dim at least; got []");
  // Divides, as the product may overflow.
  auto left = static_cast<int64_t>(ranks);
  bool fits = true;
  for (const int64_t size : shape) {
    TORCH_CHECK_VALUE(size >= 1, "[DeviceMesh] the sizes of `shape` must be at least 1; got ",
                      sizes);
    fits = fits && left % size == 0;
    left /= size;
  }
  TORCH_CHECK_VALUE(fits && left == 1,
                    "[DeviceMesh] there must be one rank for each place of `shape`; got shape ",
                    sizes, " and ", ranks, " ranks");
}

void check_ranks(const std::vector<int>& ranks, int world_size) {
  std::set<int> seen;
  for (const int rank : ranks) {
    TORCH_CHECK_VALUE(rank >= 0 && rank < world_size,
                      "[DeviceMesh] `ranks` must be ranks of the world; expected 0 to ",
                      world_size - 1, ", got ", rank, " in ", c10::ArrayRef<int>(ranks));
    TORCH_CHECK_VALUE(seen.insert(rank).second, "[DeviceMesh] `ranks` must be distinct; got ", rank,
                      " twice in ", c10::ArrayRef<int>(ranks));
  }
}

std::vector<std::string> checked_names(std::vector<std::string> names, size_t ndim) {
  if (names.empty()) {
    for (size_t i = 0; i < ndim; ++i) names.push_back("d" + std::to_string(i));
  }
  const std::string text = fmt::format("[{}]", fmt::join(names, ", "));
  TORCH_CHECK_VALUE(names.size() == ndim,
                    "[DeviceMesh] there must be one of `dim_names` for each mesh dim; expected ",
                    ndim, ", got ", text);
  TORCH_CHECK_VALUE(std::set<std::string>(names.begin(), names.end()).size() == ndim,
                    "[DeviceMesh] `dim_names` must be distinct; got ", text);
  return names;
}

// All mesh dims but `left_out`, in their order.
std::vector<int64_t> dims_without(int64_t left_out, int64_t ndim) {
  std::vector<int64_t> dims;
  for (int64_t dim = 0; dim < ndim; ++dim)
    if (dim != left_out) dims.push_back(dim);
  return dims;
}

}  // namespace

DeviceMesh::DeviceMesh(std::shared_ptr<ProcessGroups> process_groups, std::vector<int64_t> shape,
                       std::vector<int> ranks, std::vector<std::string> dim_names) {
  check_shape(shape, ranks.size());
  check_ranks(ranks, process_groups->size());
  dim_names = checked_names(std::move(dim_names), shape.size());
  state_ = std::make_shared<State>(std::move(process_groups), std::move(shape), std::move(ranks),
                                   std::move(dim_names));
}

DeviceMesh::DeviceMesh(std::vector<int64_t> shape, std::vector<int> ranks,
                       std::vector<std::string> dim_names)
    : DeviceMesh(default_process_groups(), std::move(shape), std::move(ranks),
                 std::move(dim_names)) {}

DeviceMesh::DeviceMesh(const World& world, std::vector<int64_t> shape, std::vector<int> ranks,
                       std::vector<std::string> dim_names)
    : DeviceMesh(world.process_groups(), std::move(shape), std::move(ranks), std::move(dim_names)) {
}

DeviceMesh DeviceMesh::over(std::shared_ptr<ProcessGroups> process_groups,
                            std::vector<int64_t> shape, std::vector<std::string> dim_names) {
  std::vector<int> ranks(process_groups->size());
  std::iota(ranks.begin(), ranks.end(), 0);
  if (shape.empty()) shape = {process_groups->size()};
  return {std::move(process_groups), std::move(shape), std::move(ranks), std::move(dim_names)};
}

DeviceMesh DeviceMesh::over_world(std::vector<int64_t> shape, std::vector<std::string> dim_names) {
  return over(default_process_groups(), std::move(shape), std::move(dim_names));
}

DeviceMesh DeviceMesh::over_world(const World& world, std::vector<int64_t> shape,
                                  std::vector<std::string> dim_names) {
  return over(world.process_groups(), std::move(shape), std::move(dim_names));
}

int64_t DeviceMesh::ndim() const { return static_cast<int64_t>(state_->shape.size()); }
const std::vector<int64_t>& DeviceMesh::shape() const { return state_->shape; }
int64_t DeviceMesh::size() const { return static_cast<int64_t>(state_->ranks.size()); }
int64_t DeviceMesh::size(int64_t mesh_dim) const {
  return state_->shape[state_->wrap("size", mesh_dim)];
}
const std::vector<int>& DeviceMesh::ranks() const { return state_->ranks; }
const std::vector<std::string>& DeviceMesh::dim_names() const { return state_->dim_names; }
int64_t DeviceMesh::dim(const std::string& name) const { return state_->dim("dim", name); }

bool DeviceMesh::contains(int rank) const {
  return std::find(ranks().begin(), ranks().end(), rank) != ranks().end();
}
bool DeviceMesh::is_member() const { return state_->coordinate.has_value(); }
const std::optional<std::vector<int64_t>>& DeviceMesh::coordinate() const {
  return state_->coordinate;
}

std::vector<int64_t> DeviceMesh::coordinate_of(int rank) const {
  const auto place = state_->place_of(rank);
  TORCH_CHECK_VALUE(place, "[coordinate_of] the rank must be in the mesh; got rank ", rank, " and ",
                    to_string());
  return *place;
}

int DeviceMesh::rank_at(const std::vector<int64_t>& coordinate) const {
  bool inside = coordinate.size() == shape().size();
  for (size_t i = 0; inside && i < coordinate.size(); ++i)
    inside = coordinate[i] >= 0 && coordinate[i] < shape()[i];
  TORCH_CHECK_VALUE(inside,
                    "[rank_at] `coordinate` must be a place of the mesh; expected indices below ",
                    c10::IntArrayRef(shape()), ", got ", c10::IntArrayRef(coordinate));
  return state_->rank_at(coordinate);
}

DeviceMesh DeviceMesh::part(const std::vector<int64_t>& mesh_dims,
                            const std::vector<int64_t>& at) const {
  std::vector<int64_t> sizes;
  std::vector<std::string> names;
  for (const int64_t dim : mesh_dims) {
    sizes.push_back(shape()[dim]);
    names.push_back(dim_names()[dim]);
  }
  return {state_->process_groups, std::move(sizes), state_->ranks_along(mesh_dims, at),
          std::move(names)};
}

DeviceMesh DeviceMesh::select(int64_t mesh_dim, int64_t index) const {
  mesh_dim = state_->wrap("select", mesh_dim);
  const int64_t size = shape()[mesh_dim];
  TORCH_CHECK_VALUE(index >= -size && index < size, "[select] `index` must be one of mesh dim ",
                    mesh_dim, "; expected ", -size, " to ", size - 1, ", got ", index, " (",
                    to_string(), ")");
  std::vector<int64_t> at(ndim());
  at[mesh_dim] = index < 0 ? index + size : index;
  if (ndim() == 1) return {state_->process_groups, {1}, {state_->rank_at(at)}, dim_names()};
  return part(dims_without(mesh_dim, ndim()), at);
}

DeviceMesh DeviceMesh::sub_mesh(const std::string& dim_name) const {
  return sub_mesh(std::vector<std::string>{dim_name});
}

DeviceMesh DeviceMesh::sub_mesh(const std::vector<std::string>& dim_names) const {
  TORCH_CHECK_VALUE(!dim_names.empty(),
                    "[sub_mesh] `dim_names` must name a mesh dim at least; got none");
  std::vector<int64_t> mesh_dims;
  for (const std::string& name : dim_names) mesh_dims.push_back(state_->dim("sub_mesh", name));
  const std::set<int64_t> distinct(mesh_dims.begin(), mesh_dims.end());
  TORCH_CHECK_VALUE(distinct.size() == mesh_dims.size(),
                    "[sub_mesh] `dim_names` must be distinct; got [",
                    fmt::format("{}", fmt::join(dim_names, ", ")), "]");
  return part(mesh_dims, state_->own_place("sub_mesh"));
}

DeviceMesh DeviceMesh::with_first(const std::string& dim_name, std::optional<int64_t> index) const {
  const int64_t first = state_->dim("with_first", dim_name);
  if (index) return select(first, *index);
  std::vector<int64_t> mesh_dims = dims_without(first, ndim());
  mesh_dims.insert(mesh_dims.begin(), first);
  return part(mesh_dims, std::vector<int64_t>(ndim()));
}

const ProcessGroupPtr& DeviceMesh::process_group(int64_t mesh_dim) const {
  mesh_dim = state_->wrap("process_group", mesh_dim);
  const auto& place = state_->own_place("process_group");
  return state_->process_group(mesh_dim, [&] { return state_->ranks_along({mesh_dim}, place); });
}

const ProcessGroupPtr& DeviceMesh::process_group() const {
  state_->own_place("process_group");
  return state_->process_group(ndim(), [&] { return ranks(); });
}

const ProcessGroupPtr& DeviceMesh::process_group_of(const std::vector<int>& ranks) const {
  return state_->process_groups->shared(ranks);
}

bool DeviceMesh::operator==(const DeviceMesh& other) const {
  return state_ == other.state_ || (shape() == other.shape() && ranks() == other.ranks());
}

std::string DeviceMesh::to_string() const { return state_->to_string(); }

}  // namespace tessera
