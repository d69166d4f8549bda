# Runs the golden tests and compares the table in docs/models.md with what they gave.
execute_process(COMMAND ${TEST} "--gtest_filter=Models/Golden.*:Models/Quantized.*" --gtest_output=json:${OUT} --gtest_brief=1 RESULT_VARIABLE status)
if(NOT status EQUAL 0)
  message(FATAL_ERROR "golden_test: ${status}")
endif()
execute_process(COMMAND ${PYTHON} -B ${SCRIPT} ${OUT} --check RESULT_VARIABLE status)
if(NOT status EQUAL 0)
  message(FATAL_ERROR "models_table.py: ${status}")
endif()
