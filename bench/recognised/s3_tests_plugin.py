"""A plugin of pytest for the suite of `s3_tests`, which runs in that suite's own environment.

Reads and writes of objects go to the endpoint under test. What makes the place for them goes to the source itself: buckets,
their settings, and the removal of both after each test.
"""

from __future__ import annotations

import json
import os
import re
from typing import Any

import boto3
import pytest

OWN = frozenset(
    {
        "AbortMultipartUpload",
        "CompleteMultipartUpload",
        "CopyObject",
        "CreateMultipartUpload",
        "DeleteObject",
        "DeleteObjects",
        "GetBucketLocation",
        "GetObject",
        "HeadBucket",
        "HeadObject",
        "ListBuckets",
        "ListObjects",
        "ListObjectsV2",
        "ListParts",
        "PutObject",
        "UploadPart",
        "UploadPartCopy",
    }
)
READS = re.compile(
    r"test_(100_continue|atomic_(dual_)?read|basic_key_count|bucket_(create_special_key|get_location|head|list|notexist)"
    r"|buckets_create_then_list|copy_object_if|get_object_if|head_bucket|list_buckets|list_multipart_upload$"
    r"|multipart_(checksum|copy|get_part|single_get_part|upload|use_cksum)|non_multipart_get_part"
    r"|object_(checksum|copy|head|metadata|raw_authenticated|raw_get|raw_response|read|requestid|set_get)"
    r"|object_write_(cache|check|file|read)|ranged_)"
)
"""The tests that read objects, metadata and listings, and those that write an object and read it back."""

_boto3: Any = boto3
_real_client, _real_resource = _boto3.client, _boto3.resource


def _source() -> Any:
    return _real_client(
        "s3",
        endpoint_url=os.environ["SOURCE_ENDPOINT"],
        aws_access_key_id=os.environ["SOURCE_KEY"],
        aws_secret_access_key=os.environ["SOURCE_SECRET"],
    )


def _routed(client: Any) -> Any:
    call = client._make_api_call

    def routed(operation: str, arguments: dict[str, Any]) -> Any:
        own = operation in OWN and "ACL" not in arguments  # which is NotImplemented here
        made = call if own else _source()._make_api_call
        return made(operation, arguments)

    client._make_api_call = routed
    return client


def _with_token(given: dict[str, Any]) -> dict[str, Any]:
    token = os.environ.get("ENDPOINT_TOKEN")
    if token and given.get("aws_access_key_id") == os.environ["ENDPOINT_KEY"]:
        return {"region_name": "us-east-1", **given, "aws_session_token": token}
    return {"region_name": "us-east-1", **given}


def _client(service_name: str, **given: Any) -> Any:
    return _routed(_real_client(service_name, **_with_token(given)))


def _resource(service_name: str, **given: Any) -> Any:
    found = _real_resource(service_name, **_with_token(given))
    _routed(found.meta.client)
    return found


def _clean() -> None:
    client = _source()
    for bucket in (each["Name"] for each in client.list_buckets()["Buckets"]):
        for page in client.get_paginator("list_object_versions").paginate(Bucket=bucket):
            rows = [*page.get("Versions", ()), *page.get("DeleteMarkers", ())]
            if keys := [{"Key": row["Key"], "VersionId": row["VersionId"]} for row in rows]:
                client.delete_objects(Bucket=bucket, Delete={"Objects": keys})
        client.delete_bucket(Bucket=bucket)


def pytest_configure() -> None:
    """Route the clients that the suite makes."""
    from s3tests import functional

    _boto3.client, _boto3.resource = _client, _resource
    functional.setup = functional.teardown = _clean


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out the tests that do not read."""
    left = [item for item in items if not READS.match(item.name)]
    config.hook.pytest_deselected(items=left)
    items[:] = [item for item in items if READS.match(item.name)]


@pytest.hookimpl(hookwrapper=True)
def pytest_runtest_makereport(item: pytest.Item, call: pytest.CallInfo[None]) -> Any:
    """Write the result of each test as a line of JSON."""
    report = (yield).get_result()
    if report.when == "call" or report.outcome != "passed":
        error = "" if call.excinfo is None else f"{call.excinfo.typename}: {call.excinfo.value}"
        with open(os.environ["RESULTS"], "a") as file:
            print(json.dumps([item.name, report.outcome, error[:300]]), file=file)
