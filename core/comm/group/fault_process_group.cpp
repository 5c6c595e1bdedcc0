#include <c10/util/Exception.h>
#include <tessera/comm/process_group_decorators.h>

#include <mutex>
#include <thread>
#include <utility>
#include <vector>

namespace tessera {
namespace {

class FaultProcessGroup : public ProcessGroupDecorator {
 public:
  FaultProcessGroup(ProcessGroupPtr inner, std::vector<Fault> faults)
      : ProcessGroupDecorator(std::move(inner)),
        faults_(std::move(faults)),
        seen_(faults_.size()) {}

 private:
  WorkPtr issue(Collective collective) override {
    for (const Fault& fault : due(collective.name())) {
      std::this_thread::sleep_for(fault.delay);
      TORCH_CHECK_WITH(DistBackendError, !fault.fail, "[", collective.name(), "] unit '",
                       collective.tag.subject, "': rank ", rank(), " of ", size(),
                       " was told to fail here (fault ", fault.nth, ")");
    }
    return pass_on(std::move(collective));
  }

  std::vector<Fault> due(std::string_view name) {
    std::vector<Fault> due;
    std::lock_guard lock(mutex_);
    for (size_t i = 0; i < faults_.size(); ++i) {
      const Fault& fault = faults_[i];
      if ((fault.name.empty() || fault.name == name) && seen_[i]++ == fault.nth)
        due.push_back(fault);
    }
    return due;
  }

  const std::vector<Fault> faults_;
  std::mutex mutex_;
  std::vector<int64_t> seen_;  // number of matching collectives so far, per fault
};

}  // namespace

ProcessGroupPtr fault_process_group(ProcessGroupPtr inner, std::vector<Fault> faults) {
  return std::make_shared<FaultProcessGroup>(std::move(inner), std::move(faults));
}

}  // namespace tessera
