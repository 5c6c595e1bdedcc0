#include <ATen/core/grad_mode.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/cat.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/scaled_dot_product_attention_native.h>
#include <c10/core/WrapDimMinimal.h>
#include <c10/util/Exception.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <tessera/parallel/context_parallel.h>
#include <tessera/tensor/dist_tensor.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/library.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/device/scoped_value.h"
#include "parallel/ring_attention.h"
#include "tensor/dist_meta.h"

namespace tessera {

// [Note: Context parallelism]
//
// `scaled_dot_product_attention` is a composite of LibTorch: on DistTensors it is computed as the
// operators that it is composed of, and those have rules that cut batch and heads only. So there is
// a kernel for the whole, registered with the first scope. Within a scope it computes the attention
// of tensors that are cut along the sequence as one function of autograd on local parts; all other
// calls go on to LibTorch's composite, as they do without the kernel. The function keeps all that
// its backward needs, so that the backward may run after the scope.
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::Function;
using torch::autograd::variable_list;

constexpr int64_t kSequence = 2;

struct ContextScope {
  DeviceMesh mesh;
  int64_t mesh_dim;
  bool load_balance;
  RotateMethod rotate;
};

constexpr std::string_view kContextName = "tessera context parallel";
const ScopedValue<ContextScope> kContext(&kContextName, 204);

// The arguments of an attention.
struct AttentionCall {
  const at::Tensor &q, &k, &v;
  const std::optional<at::Tensor>& mask;
  double dropout;
  bool is_causal;
  std::optional<double> scale;
  bool enable_gqa;

  std::string describe() const {
    std::vector<std::string> tensors;
    for (const at::Tensor* tensor : {&q, &k, &v}) {
      const DistMeta* const meta = find_dist_meta(*tensor);
      tensors.push_back(fmt::format("[{}] {}", fmt::join(tensor->sizes(), ", "),
                                    meta ? to_string(meta->spec->placements) : "ordinary"));
    }
    return fmt::format("{}", fmt::join(tensors, ", "));
  }
};

int64_t find_mesh_dim(const char* function, const DeviceMesh& mesh, const MeshDim& which) {
  if (const auto* const name = std::get_if<std::string>(&which)) return mesh.dim(*name);
  if (const auto* const number = std::get_if<int64_t>(&which)) {
    TORCH_CHECK_VALUE(*number >= -mesh.ndim() && *number < mesh.ndim(), "[", function,
                      "] the mesh must have the mesh dim; got ", *number, " for ",
                      mesh.to_string());
    return c10::maybe_wrap_dim(*number, mesh.ndim());
  }
  TORCH_CHECK_VALUE(mesh.ndim() == 1, "[", function,
                    "] mesh_dim must be given for a mesh of several dims; got ", mesh.to_string());
  return 0;
}

bool is_cut_along(const Placement& placement) {
  return is_shard(placement, kSequence) && !is_split(placement);
}

bool is_covered(const ContextScope& scope, const at::Tensor& tensor) {
  const DistMeta* const meta = find_dist_meta(tensor);
  return meta && tensor.dim() == 4 && meta->spec->mesh == scope.mesh &&
         is_cut_along(meta->spec->placements[scope.mesh_dim]);
}

bool is_covered(const ContextScope& scope, const AttentionCall& call) {
  // Without elements there is nothing to do.
  return is_covered(scope, call.q) && is_covered(scope, call.k) && is_covered(scope, call.v) &&
         call.q.numel() > 0 && call.k.numel() > 0 && call.v.numel() > 0;
}

bool is_cut_elsewhere(const ContextScope& scope, const at::Tensor& tensor) {
  const DistMeta* const meta = find_dist_meta(tensor);
  return meta && tensor.dim() == 4 && !(meta->spec->mesh == scope.mesh) &&
         std::ranges::any_of(meta->spec->placements, is_cut_along);
}

// Refuses calls that would otherwise be computed as without the scope, but for one that is wrong
// then, and one that the user can't have meant.
void check_not_covered(const ContextScope& scope, const AttentionCall& call) {
  TORCH_CHECK_VALUE(
      !(scope.load_balance && call.is_causal),
      "[ContextParallel] a causal attention in a scope with load_balance must be one of q, k and v "
      "of [batch, heads, sequence, head dim] that are all cut along the sequence by mesh dim ",
      scope.mesh_dim, " of ", scope.mesh.to_string(), ", as positions are in another order; got ",
      call.describe());
  for (const at::Tensor* tensor : {&call.q, &call.k, &call.v})
    TORCH_CHECK_VALUE(!is_cut_elsewhere(scope, *tensor),
                      "[ContextParallel] tensors that are cut along the sequence must be on the "
                      "scope's mesh; expected ",
                      scope.mesh.to_string(), ", got ", mesh_of(*tensor).to_string());
}

void check_sizes(const AttentionCall& call) {
  const auto &q = call.q, &k = call.k, &v = call.v;
  TORCH_CHECK_VALUE(q.size(0) == k.size(0) && k.size(0) == v.size(0) && k.size(1) == v.size(1) &&
                        k.size(2) == v.size(2) && q.size(3) == k.size(3),
                    "[ContextParallel] q, k and v must have one batch, q and k one head dim, k and "
                    "v the same heads and lengths; got ",
                    call.describe());
  const bool is_grouped = call.enable_gqa && q.size(1) % k.size(1) == 0;
  TORCH_CHECK_VALUE(q.size(1) == k.size(1) || is_grouped,
                    "[ContextParallel] q must have as many heads as k and v or, with enable_gqa, a "
                    "multiple; got ",
                    call.describe());
  TORCH_CHECK_VALUE(at::isFloatingType(q.scalar_type()) && q.scalar_type() == k.scalar_type() &&
                        k.scalar_type() == v.scalar_type(),
                    "[ContextParallel] q, k and v must have one floating dtype; got ",
                    q.scalar_type(), ", ", k.scalar_type(), " and ", v.scalar_type());
  TORCH_CHECK_VALUE(
      !call.is_causal || q.size(kSequence) == k.size(kSequence),
      "[ContextParallel] a causal attention must be one of q and k of one length; got ",
      call.describe());
}

void check_covered(const ContextScope& scope, const AttentionCall& call) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      !call.mask || !call.mask->defined(),
      "[ContextParallel] attn_mask must not be given: the blocks of keys that a rank meets would "
      "each need a part of the mask that the rank doesn't have; use is_causal, or leave the scope");
  TORCH_CHECK_NOT_IMPLEMENTED(call.dropout == 0,
                              "[ContextParallel] dropout_p must be 0: in one process, random "
                              "numbers depend on all scores, and no rank has these; got ",
                              call.dropout);
  check_sizes(call);
  const int64_t chunks = 2 * scope.mesh.size(scope.mesh_dim), length = call.q.size(kSequence);
  TORCH_CHECK_VALUE(!(scope.load_balance && call.is_causal) || length % chunks == 0,
                    "[ContextParallel] with load_balance the sequence must be a multiple of twice "
                    "the ranks; expected one of ",
                    chunks, ", got ", length);
}

// The placements that q, k and v get. Batch and heads stay cut where q's are, if a rank's heads of
// k are then those that its heads of q need.
Placements common_placements(const ContextScope& scope, const AttentionCall& call) {
  const Placements& given = placements_of(call.q);
  Placements common(given.size(), Replicate{});
  const int64_t heads = call.k.size(1);
  int64_t parts = 1;  // into which the heads are cut
  for (int64_t i = 0; i < scope.mesh.ndim(); ++i) {
    if (i == scope.mesh_dim) {
      common[i] = Shard{kSequence};
    } else if (is_shard(given[i], 0)) {
      common[i] = given[i];
    } else if (is_shard(given[i], 1)) {
      const int64_t finer = parts * scope.mesh.size(i);
      const bool is_even = heads % finer == 0 && !is_split(given[i]);
      if (call.q.size(1) != heads && !is_even) continue;
      common[i] = given[i];
      parts = finer;
    }
  }
  return common;
}

struct RingHolder : torch::CustomClassHolder {
  explicit RingHolder(RingAttention held) : ring(std::move(held)) {}
  const RingAttention ring;  // without a line on ranks outside of the mesh
};
using RingHolderPtr = c10::intrusive_ptr<RingHolder>;

struct ContextAttention : Function<ContextAttention> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& q, const at::Tensor& k,
                            const at::Tensor& v, const RingHolderPtr& holder) {
    context->saved_data["ring"] = c10::IValue::make_capsule(holder);
    if (!holder->ring.line) return at::empty({0}, q.options().requires_grad(false));
    const BlockAttention whole = ring_attend(holder->ring, q, k, v);
    context->save_for_backward({q, k, v, whole.output, whole.logsumexp});
    return whole.output;
  }

  static variable_list backward(AutogradContext* context, const variable_list& gradients) {
    TORCH_CHECK_NOT_IMPLEMENTED(!at::GradMode::is_enabled(),
                                "[ContextParallel] gradients of gradients are not supported; call "
                                "backward() without create_graph");
    const auto holder =
        c10::static_intrusive_pointer_cast<RingHolder>(context->saved_data["ring"].toCapsule());
    if (!holder->ring.line) {
      const at::Tensor none = at::empty({0}, gradients[0].options());
      return {none, none, none, at::Tensor()};
    }
    const variable_list saved = context->get_saved_variables();
    auto [q, k, v] = ring_attend_backward(holder->ring, gradients[0], saved[0], saved[1], saved[2],
                                          {saved[3], saved[4]});
    return {std::move(q), std::move(k), std::move(v), at::Tensor()};
  }
};

at::Tensor attend_by_ring(const ContextScope& scope, const AttentionCall& call) {
  check_covered(scope, call);
  const DeviceMesh& mesh = mesh_of(call.q);
  const Placements placements = common_placements(scope, call);
  const auto part = [&](const at::Tensor& tensor) {
    return to_local(redistribute(tensor, placements));
  };
  const auto head_dim = static_cast<double>(call.q.size(3));
  const auto holder = c10::make_intrusive<RingHolder>(
      RingAttention{.line = mesh.is_member() ? mesh.process_group(scope.mesh_dim) : nullptr,
                    .keys = call.k.size(kSequence),
                    .is_causal = call.is_causal,
                    .is_balanced = scope.load_balance,
                    .rotate = scope.rotate,
                    .scale = call.scale.value_or(1 / std::sqrt(head_dim))});
  const at::Tensor q = part(call.q), k = part(call.k), v = part(call.v);
  std::vector<int64_t> sizes = call.q.sizes().vec();
  sizes[3] = call.v.size(3);
  // As in the kernels' results, the heads of a row lie side by side.
  Placements rows = placements;
  for (Placement& placement : rows) {
    if (is_shard(placement, 1)) {
      std::get<Shard>(placement).dim = kSequence;
    } else if (is_shard(placement, kSequence)) {
      std::get<Shard>(placement).dim = 1;
    }
  }
  std::swap(sizes[1], sizes[kSequence]);
  const at::Tensor attended = ContextAttention::apply(q, k, v, holder);
  return from_local(mesh.is_member() ? attended.transpose(1, kSequence) : attended, mesh, rows,
                    sizes)
      .transpose(1, kSequence);
}

at::Tensor scaled_dot_product_attention(const at::Tensor& query, const at::Tensor& key,
                                        const at::Tensor& value,
                                        const std::optional<at::Tensor>& attn_mask,
                                        double dropout_p, bool is_causal,
                                        std::optional<double> scale, bool enable_gqa) {
  if (const ContextScope* const scope = kContext.find()) {
    const AttentionCall call{query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa};
    if (is_covered(*scope, call)) return attend_by_ring(*scope, call);
    check_not_covered(*scope, call);
  }
  return at::native::scaled_dot_product_attention(query, key, value, attn_mask, dropout_p,
                                                  is_causal, scale, enable_gqa);
}

void register_context_parallel() {
  static std::once_flag once;
  std::call_once(once, [] {
    static auto* const libraries = new std::vector<torch::Library>();
    for (const auto key : {c10::DispatchKey::AutogradPrivateUse3, c10::DispatchKey::PrivateUse3}) {
      libraries->emplace_back(torch::Library::IMPL, "aten", key, __FILE__, __LINE__);
      libraries->back().impl("scaled_dot_product_attention", scaled_dot_product_attention);
    }
  });
}

c10::DebugInfoGuard open_scope(const DeviceMesh& mesh, const ContextParallelOptions& options) {
  const int64_t mesh_dim = find_mesh_dim("ContextParallel", mesh, options.mesh_dim);
  register_context_parallel();
  return kContext.scope({mesh, mesh_dim, options.load_balance, options.rotate});
}

// The positions of a sequence in balanced order; see [Note: Balanced order].
at::Tensor balanced_order(const char* function, int64_t size, const DeviceMesh& mesh,
                          const MeshDim& mesh_dim) {
  const int64_t ranks = mesh.size(find_mesh_dim(function, mesh, mesh_dim));
  TORCH_CHECK_VALUE(size % (2 * ranks) == 0, "[", function,
                    "] the sequence must be a multiple of twice the ranks; expected one of ",
                    2 * ranks, ", got ", size);
  const at::Tensor chunks = at::arange(size).view({2 * ranks, -1});
  std::vector<at::Tensor> order;
  for (int64_t rank = 0; rank < ranks; ++rank) {
    order.push_back(chunks[rank]);
    order.push_back(chunks[2 * ranks - 1 - rank]);
  }
  return at::cat(order);
}

at::Tensor in_order(const at::Tensor& tensor, int64_t dim, const at::Tensor& order) {
  return tensor.index_select(dim, order.to(tensor.device()));
}

}  // namespace

ContextParallel::ContextParallel(const DeviceMesh& mesh, const ContextParallelOptions& options)
    : scope_(open_scope(mesh, options)) {}
ContextParallel::~ContextParallel() = default;

at::Tensor balance_sequence(const at::Tensor& tensor, int64_t dim, const DeviceMesh& mesh,
                            const MeshDim& mesh_dim) {
  const int64_t size = tensor.size(dim);
  return in_order(tensor, dim, balanced_order("balance_sequence", size, mesh, mesh_dim));
}

at::Tensor unbalance_sequence(const at::Tensor& tensor, int64_t dim, const DeviceMesh& mesh,
                              const MeshDim& mesh_dim) {
  const int64_t size = tensor.size(dim);
  return in_order(tensor, dim,
                  balanced_order("unbalance_sequence", size, mesh, mesh_dim).argsort());
}

}  // namespace tessera
