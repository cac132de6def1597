// include/nf4/json.hpp.
#include <nf4/json.hpp>
#include <string>

#include "support/catch.hpp"

TEST_CASE("JSON", "[checkpoint]") {
  const nf4::Json json("j", R"( {"a" : "x\"\\\n", "b":[1, 2,{"c":-1.5e1}], "n":null,"t":true} )");
  CHECK(json.text("a") == "x\"\\\\n");
  CHECK(json.size("b/1") == 2);
  CHECK(json.number("b/2/c") == -15);
  CHECK((json.flag("t") && json.flag("n", true) && !json.has("n") && !json.has("b/3")));
  CHECK(json.size("n", 7) == 7);
  const auto error = [](auto function) -> std::string {
    try {
      function();
    } catch (const nf4::Error &found) {
      return found.what();
    }
    return "";
  };
  CHECK(error([&] { json.text("n"); }) == "j: n is missing");
  CHECK(error([&] { json.size("a", 7); }) == "j: a is \"x\"\\\\n\"");
  CHECK(error([&] { json.size("b/1", 7, 1); }) == "j: b/1 is 2");
  CHECK(error([&] { json.number("b"); }) == "j: b is []");
  CHECK(error([&] { json.flag("b/0"); }) == "j: b/0 is 1");
  CHECK(error([&] { json.choice("a", {"y", "z"}); }) == "j: a is x\"\\\\n; expected: y, z");
  for (const char *number : {"1e999", "0x10", "nan", "1,", "\"1\"", "--1"})
    CHECK(!error([&] { nf4::Json("j", number).number(""); }).empty());
  for (const char *text : {"", "{", "[1", "[1,]", "{1:2}", "{\"a\"1}", "{\"a\":}", "\"a", "1 2"})
    CHECK(error([&] { nf4::Json("j", text); }).rfind("j: not JSON at '", 0) == 0);
  CHECK(error([&] { nf4::Json("j", R"({"a":1,"a":1})"); }) == "j: \"a\" is there twice");
  CHECK(error([&] { nf4::Json("j", std::string(1 << 20, '[')); }).rfind("j: not JSON", 0) == 0);
  CHECK(error([&] { nf4::Json("j", std::string(64, '[') + std::string(64, ']')); }).empty());
  std::string many = "[0";
  for (int i = 0; i < 4'000'000; ++i) many += ",0";
  CHECK(error([&] { nf4::Json("j", many + "]"); }).rfind("j: not JSON", 0) == 0);
}
