// S3 and what speaks it (radosgw, MinIO and others), as a Blob. Link outlast::s3 and call
// RegisterS3.
//
//   s3://BUCKET/PREFIX[?endpoint=http://HOST:PORT][&region=NAME][&addressing=path|host]
//
// What the URI leaves out comes from AWS_ENDPOINT_URL_S3 or AWS_ENDPOINT_URL, AWS_REGION or
// AWS_DEFAULT_REGION (us-east-1); buckets are addressed by path where an endpoint is given, else by
// host. Credentials come from AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and AWS_SESSION_TOKEN, or
// from profile AWS_PROFILE (default) of AWS_SHARED_CREDENTIALS_FILE (~/.aws/credentials), which is
// read again when a token has expired; never from the URI, and they are never in a message. Not
// supported: instance roles and SSO (export what they give), unsigned access.
//
// Requests are signed by Signature Version 4 with the body's SHA-256, so that the server checks
// what came; the ETag of each part is checked against its MD5 here. 429, 5xx, SlowDown and lost
// connections are tried again with growing, random pauses until the call's time is up, then
// kUnavailable. Objects from 16 MiB go in parts of 8 MiB, four at a time, and so do ranges.
// PutMode::kCreate is `If-None-Match: *`. Of a large object that header goes with the last request,
// which servers older than AWS's of November 2024 ignore there: several at once may then both
// succeed. Small ones are safe wherever the server honours it (radosgw 16.2 does).
// A put that is killed leaves parts behind, which no listing shows: give the bucket a lifecycle
// rule (AbortIncompleteMultipartUpload).
#pragma once

#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "outlast/store/blob.h"

namespace outlast {

class Plugins;

// The scheme "s3".
absl::Status RegisterS3(Plugins& plugins);

// kInvalidArgument: the URI; kFailedPrecondition: no credentials, and where they were looked for.
// Nothing is sent yet.
absl::StatusOr<std::unique_ptr<Blob>> MakeS3Blob(const std::string& uri);

// Makes the bucket, for tests and first steps. OK if it is the caller's already.
absl::Status MakeS3Bucket(const std::string& uri);

}  // namespace outlast
