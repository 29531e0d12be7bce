// Shared memory that a keeper gives out to the workers of its node, by scope and name.
#pragma once

#include <cstdint>
#include <memory>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "run/generation_store.h"
#include "run/vault.h"
#include "run/wire.h"

namespace outlast {

// Not safe for concurrent use.
class SharedMemories {
 public:
  // `vault`: gets what outlives a generation; may be null.
  SharedMemories(size_t slots, Vault* vault) : vault_(vault), of_slot_(slots) {}
  // Takes what a former keeper's had put there.
  void GoOn(Kept& kept);

  // A new generation: what the former one had may be given out again, dirty.
  void Enter();
  // A memfd of `bytes`, borrowed. Errors are those of GenerationStore::SharedMemory.
  absl::StatusOr<int> Get(int slot, SharedScope scope, std::string_view name, uint64_t bytes);

 private:
  absl::StatusOr<int> Lasting(GenerationStore& store, int slot, SharedScope scope,
                              std::string_view name, uint64_t bytes, uint64_t promised);

  Vault* const vault_;
  std::unique_ptr<GenerationStore> of_generation_ = std::make_unique<GenerationStore>();
  GenerationStore of_job_;
  std::vector<GenerationStore> of_slot_;  // of all processes of the slot
};

}  // namespace outlast
