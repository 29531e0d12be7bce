// One visitor of a std::variant out of a lambda for each alternative.
#pragma once

namespace outlast {

template <typename... Handlers>
struct Overloaded : Handlers... {
  using Handlers::operator()...;
};
template <typename... Handlers>
Overloaded(Handlers...)
    -> Overloaded<Handlers...>;  // clang 14 does not deduce aggregates by itself

}  // namespace outlast
