#pragma once

#include <ATen/core/Tensor.h>
#include <torch/csrc/autograd/function_hook.h>

#include <functional>
#include <memory>

namespace tessera {

/// Takes the gradient of `tensor` out of its `.grad`, where autograd has just put it.
using TakeGradient = std::function<void(const at::Tensor& tensor)>;

using HookPlace = std::unique_ptr<torch::autograd::PostAccumulateGradHook>;

/// Has `take` called after the hook in `place`, which is a tensor's only place for one. Does
/// nothing if that is so already. See [Note: One place for two hooks] in grad_hook.cpp.
void chain_hook(HookPlace& place, const TakeGradient& take);

/// Undoes `chain_hook()`: what the user has set stays.
void unchain_hook(HookPlace& place);

}  // namespace tessera
