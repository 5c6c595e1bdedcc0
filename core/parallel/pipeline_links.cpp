#include "parallel/pipeline_links.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>
#include <c10/util/accumulate.h>

#include <algorithm>
#include <cstring>

namespace tessera {
namespace {

using enum PipelinePart;

constexpr CollectiveTag kMessages{"tensors of a pipeline", Channel::kControl};
// Elements of the message of a layout; the first is the length, 0 after a failure.
constexpr int64_t kMaxLayout = 512;

// The device of tensors, their number, and for each its dtype and three lists, each behind its
// length: its sizes, the shape of its mesh and where the ranks of that are in the place's mesh.
std::vector<int64_t> layout_in(const Parcel& parcel, const DeviceMesh& place) {
  std::vector<int64_t> layout = {static_cast<int64_t>(parcel.tensors[0].device().type()),
                                 std::ssize(parcel.tensors)};
  const auto add = [&layout](at::IntArrayRef list) {
    layout.push_back(static_cast<int64_t>(list.size()));
    layout.insert(layout.end(), list.begin(), list.end());
  };
  for (size_t i = 0; i < parcel.tensors.size(); ++i) {
    layout.push_back(static_cast<int64_t>(parcel.tensors[i].scalar_type()));
    add(parcel.tensors[i].sizes());
    const auto& mesh = parcel.meshes[i];
    add(mesh ? at::IntArrayRef(mesh->shape()) : at::IntArrayRef());
    std::vector<int64_t> ranks;
    for (const int rank : mesh ? mesh->ranks() : std::vector<int>()) {
      const auto found = std::ranges::find(place.ranks(), rank);
      TORCH_CHECK_VALUE(found != place.ranks().end(),
                        "[Pipeline] a DistTensor that a stage returns must lie on ranks of its "
                        "place; expected ",
                        place.to_string(), ", got ", mesh->to_string());
      ranks.push_back(found - place.ranks().begin());
    }
    add(ranks);
  }
  return layout;
}

// One tensor of a layout.
struct Form {
  at::ScalarType dtype;
  at::IntArrayRef sizes, mesh, ranks;
  int64_t nbytes() const {
    return static_cast<int64_t>(c10::elementSize(dtype)) * c10::multiply_integers(sizes);
  }
};

std::vector<Form> forms_in(const std::vector<int64_t>& layout) {
  std::vector<Form> forms;
  const int64_t* at = layout.data() + 2;
  const auto next = [&at] {
    const at::IntArrayRef list(at + 1, static_cast<size_t>(*at));
    at += 1 + *at;
    return list;
  };
  while (at != layout.data() + layout.size()) {
    Form& form = forms.emplace_back(Form{static_cast<at::ScalarType>(*at++)});
    for (auto* const list : {&form.sizes, &form.mesh, &form.ranks}) *list = next();
  }
  return forms;
}

at::Tensor bytes_on(at::DeviceType device, int64_t count) {
  return at::empty({count}, at::TensorOptions().dtype(at::kByte).device(device));
}

// A message of some layout: the failure, the clock, a flag for each tensor, and the tensors.
struct Buffer {
  Buffer(const std::vector<int64_t>& layout, const at::Tensor& received = {})
      : bytes(received), head(bytes_on(at::kCPU, 2 * sizeof(int64_t) + layout[1])) {
    int64_t end = head.numel();
    std::vector<int64_t> begins;
    forms = forms_in(layout);
    for (const Form& form : forms) {
      begins.push_back((end + 63) / 64 * 64);
      end = begins.back() + form.nbytes();
    }
    if (!bytes.defined()) bytes = bytes_on(static_cast<at::DeviceType>(layout[0]), end);
    for (size_t i = 0; i < forms.size(); ++i)
      tensors.push_back(bytes.narrow(0, begins[i], forms[i].nbytes())
                            .view(forms[i].dtype)
                            .view(forms[i].sizes));
  }

  at::Tensor bytes, head;
  StageTensors tensors;
  std::vector<Form> forms;  // refer to the layout
};

at::Tensor packed(const Parcel& parcel, const std::vector<int64_t>& layout) {
  Buffer buffer(layout);
  auto* const head = static_cast<char*>(buffer.head.mutable_data_ptr());
  const int64_t integers[] = {parcel.has_failed, parcel.clock};
  std::memcpy(head, integers, sizeof(integers));
  for (size_t i = 0; i < buffer.tensors.size(); ++i) {
    const bool is_there = !parcel.has_failed && parcel.tensors[i].defined();
    head[sizeof(integers) + i] = is_there && (parcel.flags.empty() || parcel.flags[i] != 0);
    if (is_there) buffer.tensors[i].copy_(parcel.tensors[i]);
  }
  buffer.bytes.narrow(0, 0, buffer.head.numel()).copy_(buffer.head);
  return buffer.bytes;
}

Parcel unpacked(const Buffer& buffer, bool is_forward, const DeviceMesh& place) {
  const at::Tensor head = buffer.bytes.narrow(0, 0, buffer.head.numel()).cpu();
  const auto* const bytes = static_cast<const char*>(head.const_data_ptr());
  int64_t integers[2] = {};
  std::memcpy(integers, bytes, sizeof(integers));
  Parcel parcel{integers[0] != 0, integers[1]};
  if (parcel.has_failed) return parcel;
  const auto* const flags = bytes + sizeof(integers);
  parcel.flags.assign(flags, flags + buffer.tensors.size());
  parcel.tensors = buffer.tensors;
  for (size_t i = 0; i < parcel.tensors.size(); ++i) {
    const Form& form = buffer.forms[i];
    parcel.meshes.emplace_back();
    if (!is_forward && flags[i] == 0) parcel.tensors[i] = at::Tensor();
    if (form.mesh.empty()) continue;
    std::vector<int> ranks;
    for (const int64_t at : form.ranks) ranks.push_back(place.ranks()[at]);
    parcel.meshes.back().emplace(form.mesh.vec(), std::move(ranks));
  }
  return parcel;
}

}  // namespace

PipelineLinks::PipelineLinks(const PipelineSchedule& schedule, const DeviceMesh& mesh,
                             std::vector<int64_t> places, const std::vector<int>& line,
                             int64_t place)
    : mesh_(mesh), places_(std::move(places)), place_(place) {
  const auto count = std::ssize(schedule);
  for (int64_t from = 0; from < count; ++from) {
    for (auto [part, stage, m] : schedule[from]) {
      if (part == kInputGradient) part = kBackward;
      const int64_t receiver = receiver_of({part, stage, m});
      const int64_t to = receiver < 0 ? from : places_[receiver];
      if (from == to) continue;
      if (to == place) incoming_[from].order.push_back({part, stage, m});
      if (from == place) outgoing_[to];
    }
  }
  // All ranks connect links in one order.
  for (int64_t from = 0; from < count; ++from) {
    for (int64_t to = 0; to < count; ++to) {
      const bool receives = to == place && incoming_.contains(from);
      if (!receives && !(from == place && outgoing_.contains(to))) continue;
      (receives ? incoming_[from].process_group : outgoing_[to].process_group) =
          mesh.process_group_of({line[from], line[to]});
    }
  }
}

int64_t PipelineLinks::receiver_of(const PipelineAction& action) const {
  if (action.part == kBackward) return action.stage - 1;
  return action.part == kForward && action.stage + 1 < std::ssize(places_) ? action.stage + 1 : -1;
}

PipelineLinks::Layout& PipelineLinks::layout_of(const PipelineAction& action) {
  return layouts_[{action.part == kForward ? action.stage : action.stage - 1,
                   forms_[action.micro_batch]}];
}

bool PipelineLinks::has_gradients(int64_t stage, int64_t micro_batch) const {
  return std::ranges::any_of(flags_.at({stage, micro_batch}), [](char flag) { return flag != 0; });
}

void PipelineLinks::begin(std::vector<std::string> forms, bool trains) {
  forms_ = std::move(forms);
  trains_ = trains;
  own_.clear();
  flags_.clear();
  for (auto& [from, link] : incoming_) {
    link.next = 0;
    start_next(link, /*may_wait=*/false);
  }
}

void PipelineLinks::start_sending(Outgoing& link, const at::Tensor& buffer) {
  // Lets go of messages that the receiver has; it may still be copying the last ones.
  while (link.sent.size() > 4 && link.sent.front().work->is_completed()) {
    link.sent.front().work->wait_inputs();
    link.sent.pop_front();
  }
  const at::Tensor none = buffer.narrow(0, 0, 0);
  link.sent.push_back(
      {buffer, link.process_group->all_to_all({none, none}, {none, buffer}, kMessages)});
}

void PipelineLinks::send(const PipelineAction& action, Parcel parcel) {
  const int64_t receiver = receiver_of(action);
  if (receiver < 0) return;
  const auto [part, stage, m] = action;
  if (part == kBackward && !has_gradients(receiver, m)) return;
  Layout& layout = layout_of(action);
  const bool is_known = !layout.empty();
  if (part == kForward && !parcel.has_failed) {
    const Layout own = layout_in(parcel, mesh_);
    TORCH_CHECK_VALUE((!is_known || own == layout) && std::ssize(own) < kMaxLayout,
                      "[Pipeline] for inputs of equal shapes, a stage must return tensors of equal "
                      "dtypes and shapes each time, of ",
                      kMaxLayout, " sizes at most; stage ", stage,
                      " returned others for micro-batch ", m);
    layout = own;
  }
  if (part == kForward) flags_[{stage, m}] = parcel.flags;
  if (places_[receiver] == place_) {
    own_[action] = std::move(parcel);
    return;
  }
  Outgoing& link = outgoing_.at(places_[receiver]);
  if (!is_known) {
    const at::Tensor message = at::zeros({kMaxLayout}, at::kLong);
    auto* const integers = message.mutable_data_ptr<int64_t>();
    integers[0] = std::ssize(layout);
    std::ranges::copy(layout, integers + 1);
    start_sending(link, message);
    if (layout.empty()) return;
  }
  start_sending(link, packed(parcel, layout));
}

PipelineLinks::Message PipelineLinks::start_receiving(Incoming& link, const at::Tensor& buffer) {
  const at::Tensor none = buffer.narrow(0, 0, 0);
  return {buffer, link.process_group->all_to_all({buffer, none}, {none, none}, kMessages)};
}

void PipelineLinks::start_next(Incoming& link, bool may_wait) {
  const auto is_absent = [this](const PipelineAction& action) {
    return action.part == kBackward && !trains_;
  };
  while (link.next < link.order.size() && is_absent(link.order[link.next])) ++link.next;
  if (link.next == link.order.size()) return;
  const PipelineAction& action = link.order[link.next];
  Layout& layout = layout_of(action);
  if (action.part == kForward) {
    if (layout.empty() && !may_wait) return;
    if (layout.empty()) {
      const Message message = start_receiving(link, at::empty({kMaxLayout}, at::kLong));
      message.work->wait();
      const auto* const integers = message.buffer.const_data_ptr<int64_t>();
      layout.assign(integers + 1, integers + 1 + integers[0]);
    }
  } else if (!flags_.contains({action.stage - 1, action.micro_batch})) {
    TORCH_INTERNAL_ASSERT(!may_wait, "gradients before the forward");
    return;
  }
  ++link.next;
  Message& message = link.arriving[action];
  if (action.part == kForward ? !layout.empty()
                              : has_gradients(action.stage - 1, action.micro_batch))
    message = start_receiving(link, Buffer(layout).bytes);
}

Parcel PipelineLinks::receive(const PipelineAction& action) {
  const auto [part, stage, m] = action;
  if (places_[stage] == place_) {
    const auto found = own_.extract(action);
    return found ? std::move(found.mapped()) : Parcel{};
  }
  Incoming& link = incoming_.at(places_[stage]);
  while (!link.arriving.contains(action)) start_next(link, /*may_wait=*/true);
  const Message message = std::move(link.arriving.extract(action).mapped());
  Parcel parcel{.has_failed = part == kForward};
  if (message.work) {
    message.work->wait();
    parcel = unpacked({layout_of(action), message.buffer}, part == kForward, mesh_);
  }
  if (part == kForward) flags_[{stage, m}] = parcel.flags;
  start_next(link, /*may_wait=*/false);
  return parcel;
}

void PipelineLinks::finish() {
  for (auto& [to, link] : outgoing_) {
    for (const Message& each : link.sent) {
      each.work->wait();
      each.work->wait_inputs();
    }
    link.sent.clear();
  }
}

}  // namespace tessera
