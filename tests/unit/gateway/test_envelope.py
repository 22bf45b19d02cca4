"""One address for every client, an id for each request, and the key wherever it stands."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from starlette.requests import Request

from agentjet.gateway.envelope import Envelope, key_of, one_version, request_id


@pytest.mark.parametrize("path", ["/messages", "/v1/messages", "/v1/v1/messages"])
def test_a_base_url_with_or_without_the_version_is_the_same_place(path):
    assert one_version(path) == "/v1/messages"


@given(st.lists(st.sampled_from(["v1", "v10", "models", "m", ""]), max_size=5))
def test_a_path_has_the_version_once(parts):
    path = one_version("/" + "/".join(parts))
    assert path.startswith("/v1")
    assert one_version(path) == path
    assert not path.startswith("/v1/v1/")


def request(**headers):
    named = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
    return Request({"type": "http", "headers": named})


@pytest.mark.parametrize(
    ("headers", "key"),
    [
        ({}, ""),
        ({"authorization": "Basic x"}, ""),
        ({"authorization": "bearer aj-1"}, "aj-1"),
        ({"x_api_key": "aj-1"}, "aj-1"),
        ({"x_api_key": "aj-1", "authorization": "Bearer other"}, "aj-1"),
        ({"x_api_key": "other", "authorization": "Bearer aj-1"}, "aj-1"),
        ({"x_api_key": "other"}, "other"),
    ],
)
def test_the_key_is_found_under_either_header(headers, key):
    assert key_of(request(**headers)) == key


async def test_a_response_names_its_request():
    sent = []

    async def app(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        sent.append((scope["path"], request_id(Request(scope))))

    async def send(message):
        sent.append(dict(message["headers"]))

    await Envelope(app)({"type": "http", "path": "/messages", "headers": []}, None, send)
    headers, (path, name) = sent
    assert path == "/v1/messages"
    assert name.startswith("req_")
    assert headers == {b"x-request-id": name.encode(), b"request-id": name.encode()}
