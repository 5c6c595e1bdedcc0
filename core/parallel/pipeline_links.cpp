#include "parallel/pipeline_links.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>
#include <c10/util/Exception.h>

#include <algorithm>

namespace tessera {
namespace {

using enum PipelinePart;

constexpr CollectiveTag kMessages{"tensors of a pipeline", Channel::kControl};
constexpr size_t kHeadLength = 512;

// Returns the failure, the clock, the number of tensors, and for each whether it requires a
// gradient, its dtype (-1: undefined), its kind of device, and three lists, each behind its length:
// its sizes, the shape of its mesh, and where the ranks of that are in the place's mesh.
at::Tensor head_of(const Parcel& parcel, const DeviceMesh& place) {
  std::vector<int64_t> head = {parcel.has_failed, parcel.clock, std::ssize(parcel.items)};
  const auto add = [&head](at::IntArrayRef list) {
    head.push_back(static_cast<int64_t>(list.size()));
    head.insert(head.end(), list.begin(), list.end());
  };
  for (const auto& [tensor, requires_grad, mesh] : parcel.items) {
    head.push_back(requires_grad);
    head.push_back(tensor.defined() ? static_cast<int64_t>(tensor.scalar_type()) : -1);
    if (!tensor.defined()) continue;
    head.push_back(static_cast<int64_t>(tensor.device().type()));
    add(tensor.sizes());
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
  TORCH_CHECK_VALUE(head.size() <= kHeadLength,
                    "[Pipeline] the sizes of the tensors that a stage "
                    "returns must be ",
                    kHeadLength, " numbers at most; got ", head.size());
  const at::Tensor message = at::zeros({kHeadLength}, at::kLong);
  std::ranges::copy(head, message.mutable_data_ptr<int64_t>());
  return message;
}

// Returns a parcel with room for its tensors.
Parcel parcel_of(const at::Tensor& head, const DeviceMesh& place) {
  const int64_t* at = head.const_data_ptr<int64_t>();
  Parcel parcel{.has_failed = *at++ != 0, .clock = *at++};
  parcel.items.resize(*at++);
  const auto next = [&at] {
    const at::IntArrayRef list(at + 1, static_cast<size_t>(*at));
    at += 1 + *at;
    return list;
  };
  for (auto& [tensor, requires_grad, mesh] : parcel.items) {
    requires_grad = *at++ != 0;
    const int64_t dtype = *at++;
    if (dtype < 0) continue;
    const auto options = at::TensorOptions().dtype(static_cast<at::ScalarType>(dtype));
    const auto device = static_cast<at::DeviceType>(*at++);
    tensor = at::empty(next(), options.device(device));
    const at::IntArrayRef shape = next();
    std::vector<int> ranks;
    for (const int64_t index : next()) ranks.push_back(place.ranks()[index]);
    if (!ranks.empty()) mesh.emplace(shape.vec(), std::move(ranks));
  }
  return parcel;
}

WorkPtr start_receiving(ProcessGroup& link, const at::Tensor& tensor) {
  const at::Tensor flat = tensor.view(-1), none = flat.narrow(0, 0, 0);
  return link.all_to_all({flat, none}, {none, none}, kMessages);
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

void PipelineLinks::begin(bool trains) {
  trains_ = trains;
  for (auto& [from, link] : incoming_) {
    link.next = 0;
    start_head(link);
  }
}

void PipelineLinks::start_sending(Outgoing& link, const at::Tensor& tensor) {
  // Lets go of messages that the receiver has; it may still be copying the last ones.
  while (link.sent.size() > 8 && link.sent.front().work->is_completed()) {
    link.sent.front().work->wait_inputs();
    link.sent.pop_front();
  }
  const at::Tensor flat = tensor.contiguous().view(-1), none = flat.narrow(0, 0, 0);
  link.sent.push_back(
      {flat, link.process_group->all_to_all({none, none}, {none, flat}, kMessages)});
}

void PipelineLinks::send(const PipelineAction& action, Parcel parcel) {
  const int64_t receiver = receiver_of(action);
  if (receiver < 0) return;
  if (places_[receiver] == place_) {
    own_[action] = std::move(parcel);
    return;
  }
  Outgoing& link = outgoing_.at(places_[receiver]);
  start_sending(link, head_of(parcel, mesh_));
  for (const Parcel::Item& item : parcel.items)
    if (item.tensor.defined()) start_sending(link, item.tensor);
}

void PipelineLinks::start_head(Incoming& link) const {
  const auto is_absent = [this](const PipelineAction& each) {
    return each.part == kBackward && !trains_;
  };
  while (link.next < link.order.size() && is_absent(link.order[link.next])) ++link.next;
  if (link.next == link.order.size()) return;
  const at::Tensor head = at::empty({kHeadLength}, at::kLong);
  link.head = Message{head, start_receiving(*link.process_group, head)};
}

bool PipelineLinks::advance(Incoming& link, bool may_wait) {
  if (!link.head || (!may_wait && !link.head->work->is_completed())) return false;
  link.head->work->wait();
  Arriving& arriving = link.arriving[link.order[link.next++]];
  arriving.parcel = parcel_of(link.head->tensor, mesh_);
  for (const Parcel::Item& item : arriving.parcel.items)
    if (item.tensor.defined())
      arriving.works.push_back(start_receiving(*link.process_group, item.tensor));
  link.head.reset();
  start_head(link);
  return true;
}

void PipelineLinks::poll() {
  for (auto& [from, link] : incoming_)
    if (link.arriving.empty()) advance(link, /*may_wait=*/false);
}

Parcel PipelineLinks::receive(const PipelineAction& action) {
  const int64_t place = places_[action.stage];
  if (place == place_) return std::move(own_.extract(action).mapped());
  Incoming& link = incoming_.at(place);
  while (!link.arriving.contains(action)) TORCH_INTERNAL_ASSERT(advance(link, /*may_wait=*/true));
  Arriving arriving = std::move(link.arriving.extract(action).mapped());
  for (const WorkPtr& work : arriving.works) work->wait();
  return std::move(arriving.parcel);
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
