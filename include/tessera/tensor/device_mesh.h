#pragma once

#include <tessera/comm/process_group.h>
#include <tessera/export.h>

#include <concepts>
#include <cstdint>
#include <initializer_list>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

namespace tessera {

class ProcessGroups;
class World;

/// An array of ranks with any number of named dims, on which tensors are placed.
///
/// ```cpp
/// const auto mesh = tessera::DeviceMesh::over_world({2, 4}, {"dp", "tp"});
/// mesh.sub_mesh("tp").ranks();      // the four ranks of this one's row
/// mesh.process_group(mesh.dim("tp"))->all_reduce(sum, tessera::ReduceOp::kSum, tag)->wait();
/// ```
///
/// A line of the mesh is the ranks that differ in one mesh dim only. The ranks of a line, and those
/// of the whole mesh, communicate in a process group that is made on first use. Two meshes with an
/// equal line share one process group for it. Making a mesh and querying its parts is local and
/// sends nothing, and every rank of the world may do it, also for meshes that do not contain that
/// rank.
///
/// A value type: copies are cheap and share process groups. A mesh belongs to the world that it was
/// made for, and its process groups are closed with that world.
///
/// A negative mesh dim counts from the end. Invalid arguments throw `c10::ValueError`, on every
/// rank alike except where noted.
class TESSERA_API DeviceMesh {
 public:
  /// Arranges `ranks` of this thread's default world, or of `world`, row by row in an array of
  /// `shape`; their order matters. Names are d0, d1, ... unless `dim_names` are given.
  ///
  /// Throws for an empty shape or sizes below 1, if the number of ranks differs from the number of
  /// elements of the shape, for ranks that are duplicate or not in the world, and unless there is
  /// one distinct name for each dim.
  DeviceMesh(std::vector<int64_t> shape, std::vector<int> ranks,
             std::vector<std::string> dim_names = {});
  DeviceMesh(const World& world, std::vector<int64_t> shape, std::vector<int> ranks,
             std::vector<std::string> dim_names = {});
  /// Names without ranks, `DeviceMesh({2, 2}, {"dp", "tp"})`, would be read as a range of ranks:
  /// use `over_world()`.
  template <std::convertible_to<std::string_view> Name>
  DeviceMesh(std::vector<int64_t> shape, std::initializer_list<Name> dim_names) = delete;
  template <std::convertible_to<std::string_view> Name>
  DeviceMesh(const World& world, std::vector<int64_t> shape,
             std::initializer_list<Name> dim_names) = delete;

  /// Makes a mesh of all ranks of the world, in their order. An empty shape: one dim.
  static DeviceMesh over_world(std::vector<int64_t> shape = {},
                               std::vector<std::string> dim_names = {});
  static DeviceMesh over_world(const World& world, std::vector<int64_t> shape = {},
                               std::vector<std::string> dim_names = {});

  int64_t ndim() const;
  const std::vector<int64_t>& shape() const;
  /// Returns the number of ranks in the mesh, or along one mesh dim.
  int64_t size() const;
  int64_t size(int64_t mesh_dim) const;
  /// The ranks, row by row.
  const std::vector<int>& ranks() const;
  const std::vector<std::string>& dim_names() const;
  /// Returns the mesh dim of that name; the error for an unknown name lists the names.
  int64_t dim(const std::string& name) const;

  bool contains(int rank) const;
  /// Returns true if this rank is in the mesh.
  bool is_member() const;
  /// Coordinate of this rank: an index for each mesh dim; none if it is not in the mesh.
  const std::optional<std::vector<int64_t>>& coordinate() const;
  std::vector<int64_t> coordinate_of(int rank) const;
  int rank_at(const std::vector<int64_t>& coordinate) const;

  /// Returns the ranks at `index` along `mesh_dim` (a negative index counts from the end), as a
  /// mesh of the other mesh dims. A mesh has at least one dim: for a mesh of one dim, the result is
  /// a mesh of one rank in that dim.
  DeviceMesh select(int64_t mesh_dim, int64_t index) const;

  /// Returns the ranks that differ from this one in the named mesh dims only, as a mesh of these
  /// dims in the order of the names. Throws on ranks that are not in the mesh.
  DeviceMesh sub_mesh(const std::string& dim_name) const;
  DeviceMesh sub_mesh(const std::vector<std::string>& dim_names) const;
  DeviceMesh sub_mesh(std::initializer_list<std::string> dim_names) const {
    return sub_mesh(std::vector<std::string>(dim_names));
  }

  /// Returns the same ranks with that mesh dim moved to the front; with `index`, only the ranks at
  /// that index along it, as `select()` returns them.
  DeviceMesh with_first(const std::string& dim_name,
                        std::optional<int64_t> index = std::nullopt) const;

  /// Returns the process group of this rank's line along `mesh_dim`, in the order of the line.
  ///
  /// The first use connects the line, and is collective over it: it returns when all of its ranks
  /// have called this, for this mesh or another one with that line. All ranks must make the first
  /// uses of several lines in one order, as with all blocking collectives.
  ///
  /// Throws `c10::ValueError` on ranks that are not in the mesh, `c10::DistNetworkError` if a rank
  /// of the line does not call this within the world's timeout, and `c10::DistBackendError` if the
  /// world was destroyed.
  const ProcessGroupPtr& process_group(int64_t mesh_dim) const;

  /// Returns the process group of all ranks of the mesh, in its order. If these are all ranks of
  /// the world in their order, it is the world's own.
  const ProcessGroupPtr& process_group() const;

  /// Compares shape and ranks; names don't matter.
  bool operator==(const DeviceMesh& other) const;
  /// Returns true for copies of one mesh: they share its process groups.
  bool is_same(const DeviceMesh& other) const { return state_ == other.state_; }

  /// "DeviceMesh([2, 2], ranks [0, 1, 2, 3], dims [dp, tp])".
  std::string to_string() const;

  /// Returns the process group of any ranks of the mesh's world that include this one, as
  /// `process_group()` makes it.
  const ProcessGroupPtr& process_group_of(const std::vector<int>& ranks) const;

 private:
  struct State;
  DeviceMesh(std::shared_ptr<ProcessGroups> process_groups, std::vector<int64_t> shape,
             std::vector<int> ranks, std::vector<std::string> dim_names);
  static DeviceMesh over(std::shared_ptr<ProcessGroups> process_groups, std::vector<int64_t> shape,
                         std::vector<std::string> dim_names);
  DeviceMesh part(const std::vector<int64_t>& mesh_dims, const std::vector<int64_t>& at) const;

  std::shared_ptr<const State> state_;
};

}  // namespace tessera
