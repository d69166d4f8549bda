// Asserts the type of an exception and the parts of its message.
#pragma once

#include <gtest/gtest.h>

#include <exception>
#include <initializer_list>
#include <string>
#include <typeinfo>

namespace cadre::test {

/// `call` must throw exactly E, and the message must hold every part.
template <typename E, typename Call>
void expect_error(Call&& call, std::initializer_list<std::string> parts) {
  try {
    call();
  } catch (const std::exception& error) {
    const std::string message = error.what();
    EXPECT_TRUE(typeid(error) == typeid(E)) << "another type of error: " << message;
    for (const std::string& part : parts)
      EXPECT_NE(message.find(part), message.npos) << "no \"" << part << "\" in: " << message;
    return;
  }
  ADD_FAILURE() << "nothing was thrown";
}

}  // namespace cadre::test
