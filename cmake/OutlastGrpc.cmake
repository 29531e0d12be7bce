# liboutlast-grpc.so: the streams between nodes (src/control/grpc) and the client of etcd (src/adapters/etcd), loaded by the tool when several nodes
# are asked for. Without gRPC it is not built, and such jobs are refused.
#
# Plain library files rather than gRPC's CMake package: that one shares Abseil's targets, which may
# stand for archives here (StaticDependencies), and gRPC brings the shared ones.
function(outlast_grpc_transport)
  find_program(OUTLAST_PROTOC protoc)
  find_program(OUTLAST_GRPC_PLUGIN grpc_cpp_plugin)
  find_path(OUTLAST_GRPC_INCLUDE grpcpp/grpcpp.h)
  set(libraries)
  set(missing)
  foreach(name IN ITEMS grpc++ grpc gpr protobuf)
    find_library(OUTLAST_LIB_${name} ${name})
    mark_as_advanced(OUTLAST_LIB_${name})
    list(APPEND libraries "${OUTLAST_LIB_${name}}")
    if(NOT OUTLAST_LIB_${name})
      list(APPEND missing ${name})
    endif()
  endforeach()
  foreach(name IN ITEMS time synchronization)
    find_library(OUTLAST_LIB_absl_${name} NAMES libabsl_${name}.so)
    mark_as_advanced(OUTLAST_LIB_absl_${name})
    if(OUTLAST_LIB_absl_${name})
      list(APPEND libraries "${OUTLAST_LIB_absl_${name}}")
    else()
      list(APPEND libraries absl::${name})
    endif()
  endforeach()
  mark_as_advanced(OUTLAST_PROTOC OUTLAST_GRPC_PLUGIN OUTLAST_GRPC_INCLUDE)
  if(missing OR NOT OUTLAST_PROTOC OR NOT OUTLAST_GRPC_PLUGIN OR NOT OUTLAST_GRPC_INCLUDE)
    message(STATUS "gRPC is missing (libgrpc++-dev, protobuf-compiler-grpc): jobs of several nodes are refused")
    return()
  endif()
  set(out "${PROJECT_BINARY_DIR}/control_proto")
  file(MAKE_DIRECTORY "${out}")
  set(generated)
  foreach(proto IN ITEMS "${PROJECT_SOURCE_DIR}/src/control/grpc/control.proto"
                         "${PROJECT_SOURCE_DIR}/src/adapters/etcd/etcd.proto")
    get_filename_component(folder "${proto}" DIRECTORY)
    get_filename_component(stem "${proto}" NAME_WE)
    add_custom_command(
      OUTPUT "${out}/${stem}.pb.cc" "${out}/${stem}.grpc.pb.cc" "${out}/${stem}.pb.h" "${out}/${stem}.grpc.pb.h"
      COMMAND "${OUTLAST_PROTOC}" "--proto_path=${folder}" "--cpp_out=${out}" "--grpc_out=${out}"
              "--plugin=protoc-gen-grpc=${OUTLAST_GRPC_PLUGIN}" "${proto}"
      DEPENDS "${proto}" VERBATIM)
    list(APPEND generated "${out}/${stem}.pb.cc" "${out}/${stem}.grpc.pb.cc")
  endforeach()
  # Warnings of what was generated are not ours. Nor are races: under a thread sanitizer the library that
  # reads and writes these messages is not instrumented, so what it orders is not seen.
  set_source_files_properties(${generated} PROPERTIES COMPILE_OPTIONS "-w;-fno-sanitize=thread")

  add_library(outlast_grpc MODULE src/control/grpc/grpc_transport.cc src/control/grpc/proto_frames.cc
              src/adapters/etcd/etcd_client.cc ${generated})
  set_target_properties(outlast_grpc PROPERTIES OUTPUT_NAME outlast-grpc CXX_VISIBILITY_PRESET hidden
                        VISIBILITY_INLINES_HIDDEN ON)
  target_include_directories(outlast_grpc PRIVATE src include)
  target_include_directories(outlast_grpc SYSTEM PRIVATE "${out}" "${OUTLAST_GRPC_INCLUDE}")
  target_link_libraries(outlast_grpc PRIVATE ${libraries} Threads::Threads)
  outlast_compile_options(outlast_grpc)
  add_dependencies(outlast_tool outlast_grpc)
  if(OUTLAST_INSTALL)
    install(TARGETS outlast_grpc LIBRARY DESTINATION "${CMAKE_INSTALL_LIBDIR}")
  endif()
endfunction()

# The made-up agents of tests and figures, in the build's folder.
function(outlast_agent_streams)
  if(TARGET outlast_agent_streams OR NOT TARGET outlast_grpc)
    return()
  endif()
  add_executable(outlast_agent_streams "${PROJECT_SOURCE_DIR}/tests/support/agent_streams.cc")
  outlast_compile_options(outlast_agent_streams)
  target_include_directories(outlast_agent_streams PRIVATE "${PROJECT_SOURCE_DIR}/src" "${PROJECT_SOURCE_DIR}")
  target_link_libraries(outlast_agent_streams PRIVATE outlast::agent outlast::core fmt::fmt)
  set_target_properties(outlast_agent_streams PROPERTIES RUNTIME_OUTPUT_DIRECTORY "${PROJECT_BINARY_DIR}")
  add_dependencies(outlast_agent_streams outlast_grpc)
endfunction()
