# Finds Intel's ISA-L (no CMake package of its own in Debian). Target: Isal::isal.
find_path(ISAL_INCLUDE_DIR isa-l/crc.h)
find_library(ISAL_LIBRARY isal)
include(FindPackageHandleStandardArgs)
find_package_handle_standard_args(Isal REQUIRED_VARS ISAL_LIBRARY ISAL_INCLUDE_DIR)
if(Isal_FOUND AND NOT TARGET Isal::isal)
  add_library(Isal::isal UNKNOWN IMPORTED)
  set_target_properties(Isal::isal PROPERTIES IMPORTED_LOCATION "${ISAL_LIBRARY}"
                        INTERFACE_INCLUDE_DIRECTORIES "${ISAL_INCLUDE_DIR}")
endif()
mark_as_advanced(ISAL_INCLUDE_DIR ISAL_LIBRARY)
