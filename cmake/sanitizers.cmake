# Applied to everything that is compiled here; the first finding stops the program.
if(CADRE_SANITIZE)
  add_compile_options(-fsanitize=${CADRE_SANITIZE} -fno-sanitize-recover=all -fno-omit-frame-pointer)
  add_link_options(-fsanitize=${CADRE_SANITIZE})
endif()
if(CADRE_STATIC_RUNTIME)
  add_link_options(-static-libstdc++ -static-libgcc)
endif()
