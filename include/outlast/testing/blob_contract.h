// What every Blob keeps, ours and a third party's: run all cases against a fresh store.
//
//   for (const auto& one : outlast::testing::BlobContract())
//     EXPECT_TRUE(one.check(*MakeMyBlob()).ok()) << one.name;
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "outlast/store/blob.h"

namespace outlast::testing {

struct BlobContractCase {
  std::string name;  // a true sentence in CamelCase
  // OK, or what was found and wanted. Leaves objects behind; wants a store that is empty under the
  // prefixes that it uses, which begin with its name.
  std::function<absl::Status(Blob& blob)> check;
};

std::vector<BlobContractCase> BlobContract();

}  // namespace outlast::testing
