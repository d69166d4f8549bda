# Warnings for our own targets, through one interface target.
add_library(cadre_warnings INTERFACE)
set(warnings -Wall -Wextra -Wconversion -Wno-sign-conversion -Wnon-virtual-dtor -Woverloaded-virtual
  $<IF:$<CXX_COMPILER_ID:GNU>,-Wshadow=local,-Wshadow>
  # g++ 12 sees overlapping copies in its own std::string (GCC bug 105651).
  $<$<CXX_COMPILER_ID:GNU>:-Wno-restrict>)
if(CADRE_WERROR)
  list(APPEND warnings -Werror)
endif()
target_compile_options(cadre_warnings INTERFACE "$<$<COMPILE_LANGUAGE:CXX>:${warnings}>")
