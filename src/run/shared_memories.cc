#include "run/shared_memories.h"

#include <string>
#include <utility>

#include "base/channel.h"
#include "base/error.h"

namespace outlast {
namespace {

constexpr std::string_view kMemoryKey = "memory.";

}  // namespace

// The key only tells them apart: a name may hold anything.
absl::StatusOr<int> SharedMemories::Lasting(GenerationStore& store, int slot, SharedScope scope,
                                            std::string_view name, uint64_t bytes,
                                            uint64_t promised) {
  const auto contents = scope == SharedScope::kSlot ? GenerationStore::Contents::kZeroOnTouch
                                                    : GenerationStore::Contents::kZero;
  const bool is_new = !store.Holds(name);
  OUTLAST_ASSIGN_OR_RETURN(const int memory, store.SharedMemory(name, bytes, contents, promised));
  if (!is_new || vault_ == nullptr) return memory;
  if (scope != SharedScope::kSlot) slot = -1;
  vault_->Keep(fmt::format("{}{}.{}", kMemoryKey, slot, name),
               PayloadWriter().Int(slot).Int(bytes).Text(name).bytes(), {&memory, 1});
  return memory;
}

void SharedMemories::GoOn(Kept& kept) {
  for (auto at = kept.lower_bound(std::string(kMemoryKey));
       at != kept.end() && at->first.starts_with(kMemoryKey); at = kept.erase(at)) {
    PayloadReader reader(at->second.bytes);
    const int slot = reader.Int<int>();
    const auto bytes = reader.Int<uint64_t>();
    const std::string_view name = reader.Text();
    const bool fits = reader.ok() && !at->second.fds.empty() && slot >= -1 &&
                      slot < static_cast<int>(of_slot_.size());
    if (!fits) continue;
    GenerationStore& store = slot < 0 ? of_job_ : of_slot_[static_cast<size_t>(slot)];
    store.Insert(name, bytes, std::move(at->second.fds.front()));
  }
}

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
      return Lasting(of_job_, slot, scope, name, bytes, 0);
    case SharedScope::kSlot:
      break;
  }
  // All slots may ask before one of them has touched what it got.
  uint64_t promised = 0;
  for (const GenerationStore& memory : of_slot_) promised += memory.promised_bytes();
  return Lasting(of_slot_[static_cast<size_t>(slot)], slot, scope, name, bytes, promised);
}

}  // namespace outlast
