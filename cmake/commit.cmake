# Writes OUTPUT, a source with the commit of SOURCE: run at every build (cmake -P), touches the file only when it changes.
# Takes no lock of the repository, which somebody may be committing to.
set(commit "unknown")
find_program(git git)
if(git)
  execute_process(COMMAND ${git} -C ${SOURCE} rev-parse --short=12 HEAD
    OUTPUT_VARIABLE head OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
  execute_process(COMMAND ${git} -C ${SOURCE} --no-optional-locks status --porcelain --untracked-files=no
    OUTPUT_VARIABLE changes ERROR_QUIET)
  if(head MATCHES "^[0-9a-f]+$")
    set(commit ${head})
    if(changes)
      string(APPEND commit "-dirty")
    endif()
  endif()
endif()
file(CONFIGURE OUTPUT ${OUTPUT} @ONLY CONTENT [[
// Written by cmake/commit.cmake.
#include "machine.h"

namespace cadre::cli {

std::string build_commit() { return "@commit@"; }

}  // namespace cadre::cli
]])
