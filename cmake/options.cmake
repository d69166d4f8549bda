# Every choice a builder has, in one place.
set(CMAKE_CXX_STANDARD 20)
set(CMAKE_CXX_STANDARD_REQUIRED ON)
set(CMAKE_CXX_EXTENSIONS OFF)
set(CMAKE_EXPORT_COMPILE_COMMANDS ON)
set(CMAKE_POSITION_INDEPENDENT_CODE ON)  # the Python module links the same objects

if(NOT CMAKE_BUILD_TYPE AND NOT CMAKE_CONFIGURATION_TYPES)
  set(CMAKE_BUILD_TYPE Release CACHE STRING "Release, RelWithDebInfo or Debug" FORCE)
endif()

option(CADRE_BUILD_CLI "Build the cadre command" ON)
option(CADRE_BUILD_TESTS "Build the tests" ${PROJECT_IS_TOP_LEVEL})
option(CADRE_BUILD_EXAMPLES "Build the examples" ${PROJECT_IS_TOP_LEVEL})
option(CADRE_BUILD_FUZZERS "Build the libFuzzer targets (needs clang)" OFF)
option(CADRE_BUILD_PEERS "Build what benchmarks compare with (bench/peers; needs oneDNN 2.6: libdnnl-dev)" OFF)
option(CADRE_WERROR "Treat warnings as errors" OFF)
option(CADRE_STATIC_RUNTIME "Link libstdc++ and libgcc statically, for machines with other system libraries" OFF)
set(CADRE_WITH_CUDA AUTO CACHE STRING "Build the CUDA backends: AUTO (when nvcc is there), ON or OFF")
set(CADRE_SANITIZE "" CACHE STRING "Sanitizers, comma-separated: address,undefined or thread")

find_program(CADRE_CCACHE ccache)
if(CADRE_CCACHE AND NOT CMAKE_CXX_COMPILER_LAUNCHER)
  set(CMAKE_CXX_COMPILER_LAUNCHER ${CADRE_CCACHE})
endif()
