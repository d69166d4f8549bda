# How the folders of src/ become targets: one object library a folder, all of them together one static library `cadre`.

# cadre_layer(<name> SOURCES ... [DEPENDS <layer or library>...])
# The folder's sources as object library cadre_<name>. Tests lie beside the sources as *_test.cc and are added with cadre_test.
function(cadre_layer name)
  cmake_parse_arguments(ARG "" "" "SOURCES;DEPENDS" ${ARGN})
  add_library(cadre_${name} OBJECT ${ARG_SOURCES})
  target_include_directories(cadre_${name} PUBLIC ${PROJECT_SOURCE_DIR}/include ${PROJECT_SOURCE_DIR}/src)
  target_link_libraries(cadre_${name} PUBLIC ${ARG_DEPENDS} Threads::Threads PRIVATE cadre_warnings)
  set_property(GLOBAL APPEND PROPERTY CADRE_OBJECT_TARGETS cadre_${name})
endfunction()

# cadre_test(<name> SOURCES ... [LABELS ...] [DEPENDS ...])
# A GoogleTest program against the whole library; each of its cases is one ctest test. CADRE_TEST_DATA is tests/data, CADRE_ASSETS is assets.
function(cadre_test name)
  if(NOT CADRE_BUILD_TESTS)
    return()
  endif()
  cmake_parse_arguments(ARG "" "TIMEOUT" "SOURCES;LABELS;DEPENDS" ${ARGN})
  if(NOT ARG_TIMEOUT)
    set(ARG_TIMEOUT 300)
  endif()
  add_executable(${name} ${ARG_SOURCES})
  target_include_directories(${name} PRIVATE ${PROJECT_SOURCE_DIR}/include ${PROJECT_SOURCE_DIR}/src ${PROJECT_SOURCE_DIR}/tests)
  target_link_libraries(${name} PRIVATE cadre ${ARG_DEPENDS} GTest::gtest GTest::gtest_main cadre_warnings)
  target_compile_definitions(${name} PRIVATE
    CADRE_TEST_DATA="${PROJECT_SOURCE_DIR}/tests/data" CADRE_ASSETS="${PROJECT_SOURCE_DIR}/assets")
  include(GoogleTest)
  gtest_discover_tests(${name} TEST_PREFIX ${name}. DISCOVERY_MODE PRE_TEST
    PROPERTIES LABELS "${ARG_LABELS}" TIMEOUT ${ARG_TIMEOUT})
endfunction()
