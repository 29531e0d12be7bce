// Copies between private and shared memory by aligned 64-bit words, each atomic. What must be whole beyond a word is
// guarded by a CRC or a number that is written last.
#pragma once

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <span>
#include <type_traits>

namespace outlast::blackbox {

using AliasedWord __attribute__((may_alias)) = uint64_t;

inline uint64_t LoadWordAt(const void* source) {
  return __atomic_load_n(static_cast<const AliasedWord*>(source), __ATOMIC_ACQUIRE);
}

inline void StoreWordAt(void* target, uint64_t word) {
  __atomic_store_n(static_cast<AliasedWord*>(target), word, __ATOMIC_RELEASE);
}

template <typename T>
using WordsOf = std::array<uint64_t, sizeof(T) / 8>;

template <typename T>
T LoadRecord(const void* source) {
  static_assert(std::is_trivially_copyable_v<T> && sizeof(T) % 8 == 0);
  WordsOf<T> words;
  for (size_t i = 0; i < words.size(); ++i) words[i] = LoadWordAt(static_cast<const std::byte*>(source) + 8 * i);
  return std::bit_cast<T>(words);
}

template <typename T>
void StoreRecord(void* target, const T& record) {
  static_assert(std::is_trivially_copyable_v<T> && sizeof(T) % 8 == 0);
  const auto words = std::bit_cast<WordsOf<T>>(record);
  for (size_t i = 0; i < words.size(); ++i) StoreWordAt(static_cast<std::byte*>(target) + 8 * i, words[i]);
}

}  // namespace outlast::blackbox
