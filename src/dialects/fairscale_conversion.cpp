#include <c10/util/Exception.h>

#include <utility>

#include "dialects/fairscale_sharding.h"
#include "model/sharded_state.h"

namespace tessera::fairscale {
namespace {

using detail::OssImpl;
using detail::Sharding;

// `Module::to` would convert integer counters, too.
void convert_floating(torch::nn::Module& module, at::ScalarType dtype, bool non_blocking) {
  std::vector<at::Tensor> tensors = module.parameters();
  for (const at::Tensor& buffer : module.buffers()) tensors.push_back(buffer);
  for (const at::Tensor& tensor : tensors) {
    if (tensor.is_floating_point()) tensor.set_data(tensor.detach().to(dtype, non_blocking));
  }
}

// A parameter's owner has more digits than are sent. A conversion to a dtype as narrow as that of
// the messages must start from the same values on all ranks.
void round_as_sent(const Sharding& sharding, at::ScalarType dtype) {
  if (!sharding.optimizers.front()->options.broadcast_fp16 ||
      c10::elementSize(dtype) > c10::elementSize(at::kHalf)) {
    return;
  }
  for (const OssImpl* optimizer : sharding.optimizers) {
    for (const auto& group : std::as_const(*optimizer->oss).param_groups()) {
      for (const at::Tensor& param : group.params()) {
        if (param.requires_grad() &&
            c10::elementSize(param.scalar_type()) > c10::elementSize(at::kHalf))
          param.set_data(param.detach().to(at::kHalf));
      }
    }
  }
}

}  // namespace

void AnyShardedDataParallel::convert(std::optional<at::Device> device,
                                     std::optional<at::ScalarType> dtype, bool non_blocking) {
  check_on_all_ranks(sharded().state()->mesh(), [&] {
    TORCH_CHECK_VALUE(!device || device->type() == device_type(),
                      "[ShardedDataParallel] the type of device can't change, because the optimizers have their state "
                      "there; expected ", device_type(), ", got ", *device);
    TORCH_CHECK_VALUE(!dtype || c10::isFloatingType(*dtype), "[ShardedDataParallel] dtype must be floating; got ", *dtype);
  });
  sharding_->rebuild([&] {
    if (device) module_->to(*device, non_blocking);
    if (!dtype) return;
    round_as_sent(*sharding_, *dtype);
    convert_floating(*module_, *dtype, non_blocking);
  });
}

}  // namespace tessera::fairscale
