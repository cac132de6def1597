// include/nf4/json.hpp.
#include <nf4/json.hpp>
#include <string>

#include "support/catch.hpp"
#include "support/error_of.hpp"

TEST_CASE("JSON", "[checkpoint]") {
  const nf4::Json json("j", R"( {"a" : "x\"\\\n", "b":[1, 2,{"c":-1.5e1}], "n":null,"t":true} )");
  CHECK(json.text("a") == "x\"\\\n");
  CHECK(json.size("b/1") == 2);
  CHECK(json.number("b/2/c") == -15);
  CHECK((json.flag("t") && json.flag("n", true) && !json.has("n") && !json.has("b/3")));
  CHECK(json.size("n", 7) == 7);
  CHECK(error_of([&] { json.text("n"); }) == "j: n is missing");
  CHECK(error_of([&] { json.size("a", 7); }) == "j: a is \"x\"\\\\x0a\"");
  CHECK(error_of([&] { json.size("b/1", 7, 1); }) == "j: b/1 is 2");
  CHECK(error_of([&] { json.number("b"); }) == "j: b is []");
  CHECK(error_of([&] { json.flag("b/0"); }) == "j: b/0 is 1");
  CHECK(error_of([&] { json.choice("a", {"y", "z"}); }) == "j: a is x\"\\\\x0a; expected: y, z");
  for (const char *number : {"1e999", "\"1\"", "true", "[]"})
    CHECK(!error_of([&] { nf4::Json("j", number).number(""); }).empty());
  for (const char *number : {"0", "-0.5e+3", "10", "1E2", "0e0"})
    CHECK(error_of([&] { nf4::Json("j", number).number(""); }).empty());
  for (const char *text : {"",
                           "{",
                           "[1",
                           "[1,]",
                           "{1:2}",
                           "{\"a\"1}",
                           "{\"a\":}",
                           "\"a",
                           "1 2",
                           "foo",
                           "True",
                           "1.2.3",
                           "007",
                           "-",
                           "1.",
                           ".5",
                           "1e",
                           "+1",
                           "0x10",
                           "--1",
                           "nan",
                           "1,",
                           "NaN",
                           "\"\\q\"",
                           "\"\n\"",
                           "\"\t\"",
                           "\"\\",
                           "\"\\u12",
                           "\"\\u12g4\"",
                           "\"\\ud800\"",
                           "\"\\udc00\"",
                           "\"\\ud800\\u0041\"",
                           "[,1]",
                           "[1 2]",
                           "{,}",
                           "'a'"}) {
    INFO(text);
    CHECK(error_of([&] { nf4::Json("j", text); }).rfind("j: not JSON at '", 0) == 0);
  }
  for (const char *word : {"NaN", "Infinity", "-Infinity"}) {
    CHECK(nf4::Json("j", word, true).word == word);
    CHECK(!error_of([&] { nf4::Json("j", word, true).number(""); }).empty());
    CHECK(!error_of([&] { nf4::Json("j", word); }).empty());
  }
}

TEST_CASE("strings of JSON", "[checkpoint]") {
  const auto text = [](const std::string &json) { return nf4::Json("j", json).text(""); };
  CHECK(text(R"("\"\\\/\b\f\n\r\t")") == "\"\\/\b\f\n\r\t");
  CHECK(text(R"("\u0041\u00e9\u20ac\ud83d\ude00")") == "A\u00e9\u20ac\U0001f600");
  CHECK(text("\"A\u00e9\u20ac\U0001f600\"") == "A\u00e9\u20ac\U0001f600");
  for (const char *bytes : {"\x80", "\xc3", "\xc0\x80", "\xe0\x80\x80", "\xed\xa0\x80", "\xff",
                            "\xf0\x80\x80\x80", "\xf4\x90\x80\x80"})
    CHECK(error_of([&] { text("\"" + std::string(bytes) + "\""); }) == "j: not UTF-8");
  // A line feed, and a backslash and an n, are not the same key; but "a" and \u0061 are.
  const nf4::Json keys("j", R"({"a\\n":1,"a\n":2})");
  CHECK((keys.size("a\\n") == 1 && keys.size("a\n") == 2));
  CHECK(error_of([&] { nf4::Json("j", R"({"a":1,"a":1})"); }) == "j: \"a\" is there twice");
  CHECK(error_of([&] { nf4::Json("j", R"({"a":1,"\u0061":1})"); }) == "j: \"a\" is there twice");
}

TEST_CASE("members of JSON", "[checkpoint]") {
  std::string many = "[0", object;
  for (int i = 300; i > 0; --i)
    object += (i < 300 ? ",\"" : "{\"") + std::to_string(i) + "\":" + std::to_string(i);
  const nf4::Json json("j", object + "}");
  for (int i = 1; i <= 300; ++i) CHECK(json.size(std::to_string(i)) == i);
  CHECK((!json.has("0") && !json.has("301") && !json.has("1/1")));
  const nf4::Json array("j", "[1,2]");
  CHECK((!array.has("x") && !array.has("1x") && !array.has("-1") && !array.has("2")));
  const auto refused = [](const std::string &text) {
    return error_of([&] { nf4::Json("j", text); }).rfind("j: not JSON", 0) == 0;
  };
  CHECK(refused(std::string(1 << 20, '[')));
  CHECK(!refused(std::string(64, '[') + std::string(64, ']')));
  for (int i = 0; i < 999'998; ++i) many += ",0";
  CHECK(!refused(many + "]"));
  CHECK(refused(many + ",0]"));
}

TEST_CASE("messages have no control characters", "[checkpoint]") {
  CHECK(nf4::printable("a \u00e9 \u4e2d \U0001f600 \\") == "a \u00e9 \u4e2d \U0001f600 \\");
  CHECK(nf4::printable("\x1b[31m\n\x7f") == "\\x1b[31m\\x0a\\x7f");
  CHECK(nf4::printable("\u009b\u202e\u2069") == "\\xc2\\x9b\\xe2\\x80\\xae\\xe2\\x81\\xa9");
  CHECK(nf4::printable("\xff\xe2\x82") == "\\xff\\xe2\\x82");
  CHECK(nf4::printable(std::string_view("\0", 1)) == "\\x00");
  CHECK(error_of([] { nf4::require(false, "a\x1b", 1, "\n"); }) == "a\\x1b1\\x0a");
}
