// Published examples of Signature Version 4.
//
// AWS's own test suite (aws-sig-v4-test-suite: key AKIDEXAMPLE, secret
// wJalrXUtnFEMI/K7MDENG+bPxRfiCYEXAMPLEKEY, 2015-08-30T12:36:00Z, us-east-1, service "service"),
// and the examples of "Amazon S3 API Reference, Authenticating Requests: Using the Authorization
// Header" (AKIAIOSFODNN7EXAMPLE, 2013-05-24).
#include "adapters/sigv4.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "outlast/base/digest.h"

namespace outlast {
namespace {

using ::testing::EndsWith;
using ::testing::HasSubstr;

constexpr std::string_view kEmptyHash =
    "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855";

std::string SuiteSignature(SignedRequest request) {
  request.headers.emplace_back("Host", "example.amazonaws.com");
  request.headers.emplace_back("X-Amz-Date", "20150830T123600Z");
  request.payload_hash = kEmptyHash;
  const std::string value =
      Authorization(request, {"AKIDEXAMPLE", "wJalrXUtnFEMI/K7MDENG+bPxRfiCYEXAMPLEKEY", ""},
                    "20150830T123600Z", "us-east-1", "service");
  return value.substr(value.rfind('=') + 1);
}

TEST(SigV4, SignsGetVanillaAsTheSuiteDoes) {
  EXPECT_EQ(SuiteSignature({.method = "GET"}),
            "5fa00fa31553b73ebf1942676e86291e8372ff2a2260956d9b8aae1d763fbf31");
}

TEST(SigV4, SignsGetVanillaQueryOrderKeyCaseAsTheSuiteDoes) {
  EXPECT_EQ(
      SuiteSignature({.method = "GET", .query = {{"Param2", "value2"}, {"Param1", "value1"}}}),
      "b97d918cfa904a5beff61c982a1b6f458b799221646efd99d3219ec94cdf2500");
}

TEST(SigV4, SignsPostVanillaAsTheSuiteDoes) {
  EXPECT_EQ(SuiteSignature({.method = "POST"}),
            "5da7c1a2acd57cee7505fc6676e4e544621c30862966e37dddb68e92efbe5d6b");
}

TEST(SigV4, SignsGetHeaderValueTrimAsTheSuiteDoes) {
  EXPECT_EQ(
      SuiteSignature({.method = "GET",
                      .headers = {{"My-Header1", " value1"}, {"My-Header2", " \"a   b   c\""}}}),
      "acc3ed3afb60bb290fc8d2dd0098b9911fcaa05412b367055dee359757a9c736");
}

std::string S3Authorization(SignedRequest request) {
  request.headers.emplace_back("host", "examplebucket.s3.amazonaws.com");
  request.headers.emplace_back("x-amz-content-sha256", request.payload_hash);
  request.headers.emplace_back("x-amz-date", "20130524T000000Z");
  return Authorization(request,
                       {"AKIAIOSFODNN7EXAMPLE", "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY", ""},
                       "20130524T000000Z", "us-east-1", "s3");
}

TEST(SigV4, SignsARangedGetAsTheS3ReferenceDoes) {
  EXPECT_EQ(S3Authorization({.method = "GET",
                             .path = "/test.txt",
                             .headers = {{"range", "bytes=0-9"}},
                             .payload_hash = std::string(kEmptyHash)}),
            "AWS4-HMAC-SHA256 Credential=AKIAIOSFODNN7EXAMPLE/20130524/us-east-1/s3/aws4_request, "
            "SignedHeaders=host;range;x-amz-content-sha256;x-amz-date, "
            "Signature=f0e8bdb87c964420e857bd35b5d6ed310bd44f0170aba48dd91039c6036bdb41");
}

TEST(SigV4, SignsAPutAsTheS3ReferenceDoes) {
  const std::string path = "/" + UriEncode("test$file.text", Slashes::kKeep);
  EXPECT_EQ(path, "/test%24file.text");
  EXPECT_THAT(S3Authorization({.method = "PUT",
                               .path = path,
                               .headers = {{"date", "Fri, 24 May 2013 00:00:00 GMT"},
                                           {"x-amz-storage-class", "REDUCED_REDUNDANCY"}},
                               .payload_hash = ToHex(Sha256("Welcome to Amazon S3."))}),
              EndsWith("98ad721746da40c64f1a55b78f14c238d841ea1380cd77a1b5971af0ece108bd"));
}

TEST(SigV4, SignsAQueryWithoutValueAsTheS3ReferenceDoes) {
  EXPECT_THAT(
      S3Authorization(
          {.method = "GET", .query = {{"lifecycle", ""}}, .payload_hash = std::string(kEmptyHash)}),
      EndsWith("fea454ca298b7da1c68078a5d1bdbfbbe0d65c699e0f91ac7a200a0136783543"));
}

TEST(SigV4, SignsAListingAsTheS3ReferenceDoes) {
  EXPECT_THAT(S3Authorization({.method = "GET",
                               .query = {{"prefix", "J"}, {"max-keys", "2"}},
                               .payload_hash = std::string(kEmptyHash)}),
              EndsWith("34b48302e7b5fa45bde8084f4b7868a86f0a534bc59db6670ed5711ef69dc6f7"));
}

TEST(SigV4, HoldsNoSecretInItsValue) {
  EXPECT_THAT(S3Authorization({.method = "GET", .payload_hash = std::string(kEmptyHash)}),
              Not(HasSubstr("wJalr")));
}

TEST(UriEncode, LeavesOnlyUnreservedCharacters) {
  EXPECT_EQ(UriEncode("a b/c~_-.+=é", Slashes::kKeep), "a%20b/c~_-.%2B%3D%C3%A9");
  EXPECT_EQ(UriEncode("a/b", Slashes::kEncode), "a%2Fb");
}

}  // namespace
}  // namespace outlast
