#include "blame.h"

#include <algorithm>
#include <cstdlib>
#include <iterator>
#include <optional>
#include <regex>

namespace tessera {
namespace {

using Matches = std::sregex_iterator;

// "rank 3", "ranks 0, 2 and 3", "ranks 1-3".
std::set<int> ranks_in(const std::string& text) {
  static const std::regex list(R"(\branks? (\d+(?:(?:, and |, | and | or |-)\d+)*))");
  static const std::regex entry(R"((\d+)(?:-(\d+))?)");
  std::set<int> ranks;
  for (Matches match(text.begin(), text.end(), list); match != Matches(); ++match) {
    const std::string numbers = (*match)[1];
    for (Matches part(numbers.begin(), numbers.end(), entry); part != Matches(); ++part) {
      const int first = std::stoi((*part)[1]);
      const int last = (*part)[2].matched ? std::stoi((*part)[2]) : first;
      for (int rank = first; rank <= last; ++rank) ranks.insert(rank);
    }
  }
  return ranks;
}

// The first rank but `self` of which the text says that it failed.
std::optional<int> failed_in(const std::string& text, int self) {
  static const std::regex failed(
      R"(\brank (\d+) (?:has )?(?:failed|died|ended|left|closed|crashed|threw|is gone|is dead|was killed|is stuck))");
  for (Matches match(text.begin(), text.end(), failed); match != Matches(); ++match) {
    const int rank = std::stoi((*match)[1]);
    if (rank != self) return rank;
  }
  return std::nullopt;
}

bool names(const std::string& text, const Culprit& culprit) {
  if (!culprit.other.empty() && std::regex_search(text, std::regex(culprit.other))) return true;
  const auto ranks = ranks_in(text);
  return std::any_of(ranks.begin(), ranks.end(),
                     [&](int rank) { return culprit.ranks.contains(rank); });
}

bool places(const std::string& text) {
  static const std::regex step(R"(\bstep \d+)");
  static const std::regex collective(
      R"(\b(all_gather|reduce_scatter|all_reduce|broadcast|barrier|all_to_all)\b)");
  return std::regex_search(text, step) && std::regex_search(text, collective);
}

}  // namespace

Blame find_blame(const std::vector<Line>& report, int self, const Culprit& culprit) {
  Blame blame;
  std::string text;
  for (const Line& line : report) {
    if (!blame.names_culprit) {
      const auto failed = failed_in(line.text, self);
      blame.blames_another |= failed && !culprit.ranks.contains(*failed);
      blame.names_culprit = names(line.text, culprit);
      blame.at = line.at;
    }
    text += line.text + "\n";
  }
  auto others = ranks_in(text);
  others.erase(self);
  blame.blames_another |= !blame.names_culprit && !others.empty();
  blame.places = places(text);
  return blame;
}

}  // namespace tessera
