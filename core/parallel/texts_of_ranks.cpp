#include "parallel/texts_of_ranks.h"

#include <c10/util/Exception.h>

#include <exception>

namespace tessera {

std::vector<std::string> texts_of_ranks(ProcessGroup& process_group, const CollectiveTag& tag,
                                        const std::function<std::string()>& own) {
  std::string text;
  std::exception_ptr error;
  try {
    text = "=" + own();
  } catch (const c10::Error& e) {
    error = std::current_exception();
    text = dynamic_cast<const c10::ValueError*>(&e) ? "!" : "?";
    text += e.what_without_backtrace();
  } catch (const std::exception& e) {
    error = std::current_exception();
    text = std::string("?") + e.what();
  }
  auto texts = all_gather_bytes(process_group, text, tag);
  if (error) std::rethrow_exception(error);
  for (size_t rank = 0; rank < texts.size(); ++rank) {
    const char kind = texts[rank][0];
    texts[rank].erase(0, 1);
    TORCH_CHECK_VALUE(kind != '!', texts[rank], " (on rank ", rank, " of ", texts.size(), ")");
    TORCH_CHECK(kind == '=', texts[rank], " (on rank ", rank, " of ", texts.size(), ")");
  }
  return texts;
}

}  // namespace tessera
