# What `cmake --install` lays down: the public headers, the static library with its package file
# (find_package(cadre)), the command and the bundled model.
include(GNUInstallDirs)
include(CMakePackageConfigHelpers)

# Each public header must compile alone: target all_verify_interface_header_sets.
file(GLOB public_headers CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/include/cadre/*.h)
target_sources(cadre PUBLIC FILE_SET HEADERS BASE_DIRS ${PROJECT_SOURCE_DIR}/include FILES ${public_headers})
set_target_properties(cadre PROPERTIES VERIFY_INTERFACE_HEADER_SETS ON)

# A consumer compiles as C++20 and links the same static libraries; the package file makes these two targets.
target_compile_features(cadre PUBLIC cxx_std_20)
target_link_libraries(cadre PUBLIC $<INSTALL_INTERFACE:cadre::pcre2> $<INSTALL_INTERFACE:cadre::utf8proc>)
foreach(package IN LISTS CADRE_IMAGE_PACKAGES)
  string(REGEX REPLACE ":.*" "" name ${package})
  target_link_libraries(cadre PUBLIC $<INSTALL_INTERFACE:cadre::${name}>)
endforeach()

set(package_dir ${CMAKE_INSTALL_LIBDIR}/cmake/cadre)
install(TARGETS cadre EXPORT cadre ARCHIVE COMPONENT library FILE_SET HEADERS COMPONENT library)
install(EXPORT cadre NAMESPACE cadre:: FILE cadre-targets.cmake DESTINATION ${package_dir} COMPONENT library)
configure_package_config_file(${PROJECT_SOURCE_DIR}/cmake/cadre-config.cmake.in
  ${CMAKE_CURRENT_BINARY_DIR}/cadre-config.cmake INSTALL_DESTINATION ${package_dir})
write_basic_package_version_file(${CMAKE_CURRENT_BINARY_DIR}/cadre-config-version.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${CMAKE_CURRENT_BINARY_DIR}/cadre-config.cmake ${CMAKE_CURRENT_BINARY_DIR}/cadre-config-version.cmake
  DESTINATION ${package_dir} COMPONENT library)

if(TARGET cadre_cli)
  install(TARGETS cadre_cli RUNTIME COMPONENT command)
  install(DIRECTORY ${PROJECT_SOURCE_DIR}/assets/tiny-moe DESTINATION ${CMAKE_INSTALL_DATADIR}/cadre COMPONENT command)
endif()
install(FILES ${PROJECT_SOURCE_DIR}/LICENSE DESTINATION ${CMAKE_INSTALL_DOCDIR} COMPONENT library)
