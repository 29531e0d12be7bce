#include "run/shared_memories.h"

#include <utility>

namespace outlast {

void SharedMemories::Enter() {
  auto next = std::make_unique<GenerationStore>();
  next->TakeOver(*of_generation_);
  of_generation_ = std::move(next);
}

absl::StatusOr<int> SharedMemories::Get(int slot, SharedScope scope, std::string_view name,
                                        uint64_t bytes) {
  using Contents = GenerationStore::Contents;
  switch (scope) {
    case SharedScope::kGeneration:
      return of_generation_->SharedMemory(name, bytes, Contents::kZero);
    case SharedScope::kGenerationDirty:
      return of_generation_->SharedMemory(name, bytes, Contents::kDirty);
    case SharedScope::kJob:
      return of_job_.SharedMemory(name, bytes, Contents::kZero);
    case SharedScope::kSlot:
      break;
  }
  // All slots may ask before one of them has touched what it got.
  uint64_t promised = 0;
  for (const GenerationStore& memory : of_slot_) promised += memory.promised_bytes();
  return of_slot_[static_cast<size_t>(slot)].SharedMemory(name, bytes, Contents::kZeroOnTouch,
                                                          promised);
}

}  // namespace outlast
