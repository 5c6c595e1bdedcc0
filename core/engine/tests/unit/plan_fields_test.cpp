#include <gtest/gtest.h>
#include <tessera/engine/plan_fields.h>

#include <set>
#include <string>

namespace tessera::plan_fields_test {

// Whatever a member of an aggregate is made of.
struct Anything {
  template <class T>
  operator T() const;
};

// The number of members of an aggregate.
template <class Aggregate, class... Members>
constexpr size_t arity() {
  if constexpr (requires { Aggregate{Members{}..., Anything{}}; }) {
    return arity<Aggregate, Members..., Anything>();
  } else {
    return sizeof...(Members);
  }
}

TEST(PlanFields, AreAllVisitedOnce) {
  ShardPlan plan;
  std::set<std::string> names;
  std::set<const void*> places;
  size_t visits = 0;
  const auto visit = [&](const char* name, auto& field) {
    ++visits;
    names.insert(name);
    places.insert(&field);
  };
  visit_fields(visit, plan);
  EXPECT_EQ(visits, arity<ShardPlan>() - 1 + arity<Precision>());  // `precision` by its own members
  EXPECT_EQ(names.size(), visits);
  EXPECT_EQ(places.size(), visits);
}

TEST(PlanFields, ChoicesHaveTheirValuesInOrder) {
  const auto check = [](const auto& choices) {
    for (size_t i = 0; i < choices.size(); ++i)
      EXPECT_EQ(static_cast<size_t>(choices[i].value), i) << choices[i].enumerator;
  };
  check(kPlanChoices<ShardLevel>);
  check(kPlanChoices<Partition>);
  check(kPlanChoices<Cut>);
  check(kPlanChoices<StartValues>);
  check(kPlanChoices<Offload>);
  EXPECT_EQ(find_plan_choice<ShardLevel>("os_g"), ShardLevel::kGradients);
  EXPECT_EQ(find_plan_choice<ShardLevel>("kGradients"), std::nullopt);
  EXPECT_STREQ(plan_choice(Offload::kHost).name, "host");
}

}  // namespace tessera::plan_fields_test
