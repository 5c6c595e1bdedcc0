#pragma once

#include <tessera/export.h>
#include <tessera/process_group.h>

#include <cstdint>
#include <initializer_list>
#include <memory>
#include <optional>
#include <string>
#include <vector>

namespace tessera {

class ProcessGroups;
class World;

/// An array of ranks, of any number of named dims, over which tensors are laid out.
///
/// ```cpp
/// const auto mesh = tessera::DeviceMesh::over_world({2, 4}, {"dp", "tp"});
/// mesh.sub_mesh("tp").ranks();      // the four ranks of this one's row
/// mesh.process_group(mesh.dim("tp"))->all_reduce(sum, tessera::ReduceOp::kSum, tag)->wait();
/// ```
///
/// A line of the mesh is the ranks that differ in one mesh dim only; the ranks of a line, and those
/// of the whole mesh, talk in a process group that is made on first use. Two meshes with an equal
/// line use one process group for it. Making a mesh and asking for its parts is local and sends
/// nothing, and every rank of the world may do it, also for meshes that leave it out.
///
/// A value: copies are cheap and share process groups. It belongs to the world that it was made
/// for, and its process groups are closed with that.
///
/// A mesh dim may be negative, and then counts from the end. Wrong arguments throw
/// `c10::ValueError`, on every rank alike except where noted.
class TESSERA_API DeviceMesh {
 public:
  /// Puts `ranks` of this thread's default world, or of `world`, row by row into an array of
  /// `shape`; their order matters. Names are d0, d1, ... unless `dim_names` are given.
  ///
  /// Throws for an empty shape or sizes below 1, another number of ranks than the shape has places,
  /// ranks that come twice or that the world does not have, and for names that are not one for each
  /// dim or that come twice.
  DeviceMesh(std::vector<int64_t> shape, std::vector<int> ranks,
             std::vector<std::string> dim_names = {});
  DeviceMesh(const World& world, std::vector<int64_t> shape, std::vector<int> ranks,
             std::vector<std::string> dim_names = {});

  /// A mesh of all ranks of the world, in their order. An empty shape: one dim.
  static DeviceMesh over_world(std::vector<int64_t> shape = {},
                               std::vector<std::string> dim_names = {});
  static DeviceMesh over_world(const World& world, std::vector<int64_t> shape = {},
                               std::vector<std::string> dim_names = {});

  int64_t ndim() const;
  const std::vector<int64_t>& shape() const;
  /// How many ranks it has, or has along one mesh dim.
  int64_t size() const;
  int64_t size(int64_t mesh_dim) const;
  /// Row by row.
  const std::vector<int>& ranks() const;
  const std::vector<std::string>& dim_names() const;
  /// The mesh dim of that name; the error lists the names.
  int64_t dim(const std::string& name) const;

  bool contains(int rank) const;
  /// True if this rank is in the mesh.
  bool is_member() const;
  /// Where this rank stands: an index for each mesh dim; none if it is not in the mesh.
  const std::optional<std::vector<int64_t>>& coordinate() const;
  std::vector<int64_t> coordinate_of(int rank) const;
  int rank_at(const std::vector<int64_t>& coordinate) const;

  /// The ranks that have `index` along `mesh_dim` (a negative one counts from the end), as a mesh
  /// of the other mesh dims. A mesh has one dim at least: of a mesh of one dim, it is one rank in
  /// that dim.
  DeviceMesh select(int64_t mesh_dim, int64_t index) const;

  /// The ranks that differ from this one in the named mesh dims only, as a mesh of these dims, in
  /// the order of the names. Throws on ranks that are not in the mesh.
  DeviceMesh sub_mesh(const std::string& dim_name) const;
  DeviceMesh sub_mesh(const std::vector<std::string>& dim_names) const;
  DeviceMesh sub_mesh(std::initializer_list<std::string> dim_names) const {
    return sub_mesh(std::vector<std::string>(dim_names));
  }

  /// The same ranks with that mesh dim moved to the front; with `index`, of these the ones that
  /// have it there, as `select()` returns them.
  DeviceMesh with_first(const std::string& dim_name,
                        std::optional<int64_t> index = std::nullopt) const;

  /// The process group of this rank's line along `mesh_dim`, in the order of the line.
  ///
  /// The first use connects the line, and is collective over it: it returns when all of its ranks
  /// have called this, for this or another mesh with that line. First uses of several lines follow
  /// one order on all ranks, as collectives that block do.
  ///
  /// Throws `c10::ValueError` on ranks that are not in the mesh, `c10::DistNetworkError` if a rank
  /// of the line does not come within the world's timeout, and `c10::DistBackendError` if the world
  /// has gone.
  const ProcessGroupPtr& process_group(int64_t mesh_dim) const;

  /// That of all ranks of the mesh, in its order. For all ranks of the world in their order, it is
  /// the world's own.
  const ProcessGroupPtr& process_group() const;

  /// Equal shape and ranks; names don't matter.
  bool operator==(const DeviceMesh& other) const;
  /// True for copies of one mesh, which then share its process groups.
  bool is_same(const DeviceMesh& other) const { return state_ == other.state_; }

  /// "DeviceMesh([2, 2], ranks [0, 1, 2, 3], dims [dp, tp])".
  std::string to_string() const;

  /// The process group of any ranks of its world, this one among them, as `process_group()` makes
  /// them.
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
