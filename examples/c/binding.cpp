#include "binding.h"

#include <torch/torch.h>

#include <cstdio>
#include <exception>
#include <string>
#include <vector>

struct network {
  network() {
    torch::manual_seed(1);
    layers = torch::nn::Sequential(torch::nn::Linear(8, 64), torch::nn::Tanh(),
                                   torch::nn::Linear(64, 64), torch::nn::Tanh(),
                                   torch::nn::Linear(64, 1));
    x = torch::randn({12, 8});
    y = x.square().sum(1, /*keepdim=*/true).sin();
    for (auto& item : layers->named_parameters()) {
      names.push_back(item.key());
      tensors.push_back(item.value());
    }
    for (size_t i = 0; i < names.size(); ++i) {
      name_pointers.push_back(names[i].c_str());
      tensor_pointers.push_back(&tensors[i]);
    }
  }
  torch::Tensor loss(int64_t first, int64_t rows) {
    return torch::mse_loss(layers->forward(x.narrow(0, first, rows)), y.narrow(0, first, rows));
  }

  torch::nn::Sequential layers;
  torch::Tensor x, y;
  std::vector<std::string> names;
  std::vector<torch::Tensor> tensors;
  std::vector<const char*> name_pointers;
  std::vector<void*> tensor_pointers;
};

template <class F>
static int guarded(const F& call) {
  try {
    call();
    return 0;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}

network* network_new() { return new network; }
void network_free(network* net) { delete net; }

int64_t network_parameters(network* net, const char* const** names, void* const** tensors) {
  *names = net->name_pointers.data();
  *tensors = net->tensor_pointers.data();
  return static_cast<int64_t>(net->names.size());
}

int network_loss(network* net, int64_t first, int64_t rows, double* loss) {
  return guarded([&] {
    const torch::NoGradGuard no_grad;
    *loss = net->loss(first, rows).item<double>();
  });
}

int network_backward(network* net, int64_t first, int64_t rows) {
  return guarded([&] { net->loss(first, rows).backward(); });
}

void* tensor_new() { return new torch::Tensor; }
double tensor_norm(void* tensor) {
  return static_cast<torch::Tensor*>(tensor)->norm().item<double>();
}
void tensor_free(void* tensor) { delete static_cast<torch::Tensor*>(tensor); }
