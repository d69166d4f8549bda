# Libraries that read images, each optional: CADRE_WITH_JPEG, CADRE_WITH_PNG, CADRE_WITH_WEBP are AUTO (when the library is
# there), ON or OFF. Sets CADRE_IMAGE_SOURCES (below src/io), CADRE_IMAGE_LIBRARIES (targets) and CADRE_IMAGE_PACKAGES
# (<target>:<library>:<Debian package> for the package file), and writes the table of decoders.

# cadre_image_format(<format> <function's file in src/io/image> <header> <Debian package> <library>...)
function(cadre_image_format format file header package)
  string(TOUPPER ${format} option)
  set(CADRE_WITH_${option} AUTO CACHE STRING "Read ${format} images: AUTO (when ${package} is there), ON or OFF")
  set(decode nullptr)
  if(CADRE_WITH_${option})
    find_path(CADRE_${option}_INCLUDE ${header})
    set(found ${CADRE_${option}_INCLUDE})
    foreach(library IN LISTS ARGN)
      find_library(CADRE_${library}_LIBRARY NAMES lib${library}.a ${library})
      if(NOT CADRE_${library}_LIBRARY)
        set(found FALSE)
      endif()
    endforeach()
    if(found)
      set(decode decode_${file})
      foreach(library IN LISTS ARGN)
        if(NOT TARGET cadre_${library})
          add_library(cadre_${library} INTERFACE)
          target_include_directories(cadre_${library} SYSTEM INTERFACE ${CADRE_${option}_INCLUDE})
          target_link_libraries(cadre_${library} INTERFACE ${CADRE_${library}_LIBRARY})
        endif()
        list(APPEND CADRE_IMAGE_LIBRARIES cadre_${library})
        list(APPEND CADRE_IMAGE_PACKAGES ${library}:${library}:${package})
      endforeach()
      list(APPEND CADRE_IMAGE_SOURCES image/${file}.cc)
      string(APPEND image_declarations "DecodedImage ${decode}(const ImageFile& file);\n")
    elseif(NOT CADRE_WITH_${option} STREQUAL "AUTO")
      message(FATAL_ERROR "CADRE_WITH_${option} is ON, but ${header} or one of ${ARGN} was not found; install ${package}")
    endif()
  endif()
  string(APPEND image_rows "      {\"${format}\", \"${package}\", ${decode}},\n")
  foreach(variable CADRE_IMAGE_LIBRARIES CADRE_IMAGE_PACKAGES CADRE_IMAGE_SOURCES image_declarations image_rows)
    set(${variable} "${${variable}}" PARENT_SCOPE)
  endforeach()
endfunction()

cadre_image_format(JPEG jpeg jpeglib.h libjpeg62-turbo-dev jpeg)
cadre_image_format(PNG png png.h libpng-dev png16 z)
cadre_image_format(WebP webp webp/demux.h libwebp-dev webpdemux webp)

file(CONFIGURE OUTPUT ${PROJECT_BINARY_DIR}/src/io/compiled_image_decoders.cc @ONLY CONTENT [[
// Written by cmake/images.cmake.
#include "io/image/decoders.h"

namespace cadre {

@image_declarations@
std::span<const ImageDecoder> compiled_image_decoders() {
  static const ImageDecoder kTable[] = {
@image_rows@  };
  return kTable;
}

}  // namespace cadre
]])
