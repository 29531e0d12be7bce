// Where a test finds the build and the sources: from its own binary's place, so that no path is
// compiled in.
#pragma once

#include <cstdlib>
#include <filesystem>

namespace outlast::testing {

inline std::filesystem::path NearestParentWith(const char* file) {
  for (auto folder = std::filesystem::read_symlink("/proc/self/exe").parent_path();
       folder.has_relative_path(); folder = folder.parent_path()) {
    if (std::filesystem::exists(folder / file)) return folder;
  }
  return std::filesystem::current_path();
}

// The build folder, such as build/release.
inline std::filesystem::path BuildFolder() { return NearestParentWith("CMakeCache.txt"); }
inline std::filesystem::path SourceFolder() { return NearestParentWith("CMakePresets.json"); }
// The shared fixtures and data beside a checkout, or OUTLAST_SHARED_DIR; may not exist.
inline std::filesystem::path SharedFolder() {
  const char* given = std::getenv("OUTLAST_SHARED_DIR");
  return given != nullptr ? std::filesystem::path(given) : SourceFolder().parent_path() / "shared";
}

}  // namespace outlast::testing
