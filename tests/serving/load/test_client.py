"""The client against a server on loopback: when tokens came, what is sent, and what fails how."""

import asyncio
import json
import shutil
import ssl
import subprocess
import time
from contextlib import suppress
from dataclasses import replace

import pytest

from kvprof.errors import FailedError, UsageError
from kvprof.serving.load.client import Client, Dialect, Prompts
from kvprof.serving.load.http import Address, parse_address
from kvprof.serving.load.requests import Request
from tests.serving.load.fake_server import Behaviour, FakeServer


def client_of(server, **options):
    return Client([parse_address(server.url)], "fake", **options)


def asked(server, *requests, **options):
    """Send requests one after the other; return their outcomes."""

    async def ask():
        client = client_of(server, **options)
        await client.find_dialect()
        prompts = Prompts()
        return [
            await client.complete(one, client.body(one, prompts), start=time.perf_counter())
            for one in requests
        ]

    return asyncio.run(ask())


ONE = Request(0, 0.0, 100, 12)


@pytest.mark.parametrize("pieces", [1, 3])
def test_each_token_has_its_time(pieces):
    with FakeServer(Behaviour(token_seconds=0.004, pieces=pieces)) as server:
        (one,) = asked(server, ONE)
    assert one.failure is None
    assert len(one.tokens) == 12
    assert list(one.tokens) == sorted(one.tokens)
    assert len(set(one.tokens)) == 12 // pieces
    assert one.tokens[-1] - one.sent >= 0.04  # no sooner than the server writes
    sent = server.bodies[-1]
    assert (len(sent["prompt"]), sent["max_tokens"], sent["ignore_eos"]) == (100, 12, True)
    assert "min_tokens" not in sent  # some servers refuse it, and it adds nothing


def test_a_server_that_takes_less_is_asked_for_less():
    lacking = Behaviour(takes_ids=False, takes_ignore_eos=False, takes_counts=False, pieces=2)

    async def find(server):
        client = client_of(server)
        return await client.find_dialect()

    with FakeServer(lacking) as server:
        found = asyncio.run(find(server))
        (one,) = asked(server, ONE)
    assert (found.ids, found.to_the_end, found.counted) == (False, False, False)
    assert len(found.lacks()) == 3
    assert one.failure is None
    assert len(one.tokens) == 6  # pieces, which is all that is told
    assert isinstance(server.bodies[-1]["prompt"], str)
    with FakeServer(Behaviour(takes_ids=False)) as server:
        found = asyncio.run(find(server))
    assert found.tokens_per_word == pytest.approx(2.0)  # as the server counts words


@pytest.mark.parametrize("refusal", [400, 404, 422, 500, 200])
def test_whatever_a_server_says_to_what_it_does_not_take_it_is_asked_for_less(refusal):
    """With 200 an event tells of an error."""

    async def find(server):
        return await client_of(server).find_dialect()

    for lacking, expected in (
        ({"takes_ids": False}, (False, True, True)),
        ({"takes_ignore_eos": False}, (True, False, True)),
        ({"takes_counts": False}, (True, True, False)),
    ):
        with FakeServer(Behaviour(refusal=refusal, **lacking)) as server:
            found = asyncio.run(find(server))
        assert (found.ids, found.to_the_end, found.counted) == expected
    with FakeServer(Behaviour(fails={1: "503"})) as server, pytest.raises(FailedError):
        asyncio.run(find(server))
    assert len(server.bodies) == 1  # who is busy takes no less for that


@pytest.mark.parametrize("longest", [2, 3, 12, 40, 67, 68, None])
def test_a_server_is_asked_no_more_than_it_takes(longest):
    async def find(server):
        return await client_of(server).find_dialect(longest)

    with FakeServer(Behaviour(longest=longest)) as server:
        assert asyncio.run(find(server)) == Dialect()
    (asked_for,) = server.bodies
    assert len(asked_for["prompt"]) + asked_for["max_tokens"] == min(68, longest or 68)


@pytest.mark.parametrize(
    ("fault", "failure"),
    [("503", "HTTP 503"), ("cut", "connection lost"), ("error", "server error")],
)
def test_failures_have_a_name_and_keep_what_came(fault, failure):
    with FakeServer(Behaviour(fails={2: fault})) as server:
        (one,) = asked(server, ONE)
    assert one.failure == failure
    assert len(one.tokens) == (0 if fault == "503" else 1)


def test_a_request_that_takes_too_long_is_given_up():
    with FakeServer(Behaviour(fails={2: "hang"})) as server:
        (one,) = asked(server, ONE, timeout=0.2)
    assert (one.failure, one.tokens) == ("timeout", ())


def test_nobody_there_is_told():
    client = Client([Address("127.0.0.1", 9)], "fake")
    outcome = asyncio.run(client.complete(ONE, b"{}", start=time.perf_counter()))
    assert outcome.failure == "connection refused"
    with pytest.raises(FailedError, match="connection refused"):
        asyncio.run(client.find_dialect())
    assert asyncio.run(client.status()) == "connection refused"


def test_an_answer_that_is_an_error_is_an_answer():
    with FakeServer(Behaviour(key="s3cret")) as server:
        assert asyncio.run(client_of(server).models()) == (None, None)
        assert type(asyncio.run(client_of(server).status())) is int


def test_what_is_no_http_is_told():
    async def ask():
        async def answer(reader, writer):
            await reader.readline()
            writer.write(b"220 mail ready\r\n")
            writer.close()

        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        client = Client([Address("127.0.0.1", port)], "fake")
        outcome = await client.complete(ONE, b"{}", start=time.perf_counter())
        server.close()
        return outcome

    assert asyncio.run(ask()).failure == "no HTTP answer"


def test_a_key_is_sent_and_enters_nothing():
    with FakeServer(Behaviour(key="s3cret")) as server:
        (one,) = asked(server, ONE, key="s3cret")
        assert one.failure is None
        with pytest.raises(FailedError, match="HTTP 401") as refused:
            asked(server, ONE, key="another")
    assert "another" not in str(refused.value)
    assert "s3cret" not in json.dumps([vars(one.request), one.failure])


def answered(body, head=b"Connection: close", start=b"HTTP/1.1 200 OK", request=ONE, **options):
    """Send a request to a server that answers these bytes, whatever it is asked."""

    async def ask():
        async def answer(reader, writer):
            await reader.readuntil(b"\r\n\r\n")
            writer.write(start + b"\r\n" + head + b"\r\n\r\n" + body)
            with suppress(ConnectionError):
                await writer.drain()
            writer.close()

        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        address = Address("127.0.0.1", server.sockets[0].getsockname()[1])
        client = Client([address], "fake", **options)
        outcome = await client.complete(request, b"", start=time.perf_counter())
        models = await client.models()
        server.close()
        return outcome, models

    return asyncio.run(ask())


def piece(text="x", reason=None, tokens=None):
    said = {"choices": [{"text": text, "finish_reason": reason}]}
    if tokens is not None:
        said["usage"] = {"completion_tokens": tokens}
    return b"data: " + json.dumps(said).encode() + b"\n\n"


@pytest.mark.parametrize("opening", [piece(""), piece(None), piece("", ""), piece("", None, 0)])
@pytest.mark.parametrize("counted", [False, True])
def test_nothing_before_the_first_text_is_a_token(opening, counted):
    said = [piece("x", "length" if n == 12 else "", n if counted else None) for n in range(1, 13)]
    (one, _) = answered(opening + b"".join(said))
    assert (one.failure, len(one.tokens), one.uneven) == (None, 12, False)
    # A reason without text is no end, and no end is told.
    (one, _) = answered(opening + b"".join(said[:11]))
    assert one.failure == "connection lost"
    (one, _) = answered(opening + b"".join(said[:11]) + b"data: [DONE]\n\n")
    assert one.failure == "ended early"


@pytest.mark.parametrize(("pieces", "total"), [(4, 12), (12, 12), (13, 12), (6, 4)])
def test_the_server_s_count_is_spread_over_the_pieces(pieces, total):
    usage = b'data: {"choices": [], "usage": {"completion_tokens": %d}, "error": null}\n\n' % total
    more = usage + b"data: [DONE]\n\n"
    (one, _) = answered(piece() * pieces + more, request=replace(ONE, output=total))
    assert (one.failure, len(one.tokens), one.uneven) == (None, total, pieces != total)
    assert len(set(one.tokens)) <= min(pieces, total)
    assert list(one.tokens) == sorted(one.tokens)


@pytest.mark.parametrize("count", ["NaN", '"12"', "[12]", "1e-300", "12.5", "-1", "1" + "0" * 400])
@pytest.mark.parametrize("which", ["completion_tokens", "prompt_tokens"])
def test_what_is_no_count_of_tokens_damages_its_answer_alone(count, which):
    usage = b'data: {"choices": [], "usage": {"%s": %s}}\n\n' % (which.encode(), count.encode())
    (one, _) = answered(piece() * 12 + usage)
    assert (one.failure, len(one.tokens)) == ("damaged answer", 12)


@pytest.mark.parametrize("reason", [None, "length"])
def test_a_server_that_claims_more_tokens_than_asked_for_is_not_believed(reason):
    (one, _) = answered(piece() + piece("x", reason, 10**9))
    assert one.failure == "more tokens than asked for"
    assert len(one.tokens) <= ONE.output


@pytest.mark.parametrize("endless", [piece(), b"data: {}\n\n"])
def test_pieces_without_end_are_given_up_though_nobody_counts_them(endless):
    (one, _) = answered(endless * 10_000)
    assert one.failure == "more tokens than asked for"
    assert len(one.tokens) < 100


@pytest.mark.parametrize(("stated", "known"), [(80, 80), (-5, None), (0, None), (10**40, None)])
def test_a_length_that_no_request_has_is_not_known(stated, known):
    entry = json.dumps({"data": [{"id": "m", "max_model_len": stated}]}).encode()
    assert answered(entry)[1] == ("m", known)


def test_what_nests_too_deep_is_a_damaged_answer():
    deep = b"[" * 100_000
    one, models = answered(piece() + b"data: " + deep + b"\n\n")
    assert (one.failure, len(one.tokens)) == ("damaged answer", 1)
    assert models == (None, None)
    assert answered(deep)[1] == (None, None)


def test_answers_before_the_answer_say_nothing():
    before = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n"
    one, models = answered(piece() * 11 + piece("x", "length"), start=before + b"HTTP/1.1 200 OK")
    assert (one.failure, len(one.tokens)) == (None, 12)
    assert models == (None, None)


@pytest.mark.parametrize("head", [b"A: " + b"a" * 2**22, b"\r\n".join([b"A: " + b"a" * 999] * 999)])
def test_heads_without_end_are_no_answer(head):
    one, _ = answered(piece(), head)
    assert one.failure not in (None, "timeout")
    assert not one.tokens
    assert answered(b'{"data": [{"id": "m"}]}' + b" " * 2**23)[1] == (None, None)  # nor a body


def test_what_is_wrong_about_tls_is_named(tmp_path):
    """A certificate of nobody's, a port that speaks TLS asked without it, and the other way."""
    openssl = shutil.which("openssl")
    if openssl is None:
        pytest.skip("openssl is not installed")
    pem = tmp_path / "own.pem"
    new = ("req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=localhost")
    made = [openssl, *new, "-keyout", pem, "-out", tmp_path / "cert.pem"]
    subprocess.run(made, check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(tmp_path / "cert.pem", pem)

    async def ask(of_server, of_client):
        async def answer(reader, writer):
            await reader.readline()
            writer.write(b"HTTP/1.1 400 Bad Request\r\n\r\n")
            writer.close()

        server = await asyncio.start_server(answer, "127.0.0.1", 0, ssl=of_server)
        address = Address("127.0.0.1", server.sockets[0].getsockname()[1], tls=of_client)
        client = Client([address], "fake")
        with pytest.raises(FailedError) as refused:
            await client.find_dialect()
        said = await client.status()
        server.close()
        return said, str(refused.value)

    words = {(context, True): "certificate", (context, False): "https://", (None, True): "http://"}
    for who, word in words.items():
        assert all(word in said for said in asyncio.run(ask(*who)))


def test_a_page_is_no_event_stream():
    """A connection that ends without a word may be lost; one that says something else is not."""
    assert answered(b"<html>\n<p>sign in</p>\n</html>\n")[0].failure == "no event stream"
    assert answered(b": still here\n\n")[0].failure == "connection lost"
    for cut in (b"", b"\n", b"dat"):
        assert answered(cut)[0].failure == "connection lost"


@pytest.mark.parametrize("size", [b"7fffffffffffffff", b"-5", b"x"])
def test_chunks_of_no_true_size_break_an_answer_off(size):
    head = b"Transfer-Encoding: chunked"
    one, _ = answered(size + b"\r\n" + piece() + b"\r\n", head)
    assert one.failure == "connection lost"


def test_a_server_that_reads_no_more_holds_nobody_beyond_the_timeout():
    async def ask():
        release = asyncio.Event()

        async def sleep(_, writer):
            await release.wait()
            writer.close()

        server = await asyncio.start_server(sleep, "127.0.0.1", 0, limit=2**10)
        address = Address("127.0.0.1", server.sockets[0].getsockname()[1])
        client = Client([address], "fake", timeout=0.2)
        request = client.complete(ONE, b"x" * 2**25, start=time.perf_counter())
        outcome = await asyncio.wait_for(request, 5)
        release.set()
        server.close()
        return outcome

    assert asyncio.run(ask()).failure == "timeout"


@pytest.mark.parametrize(
    ("url", "address"),
    [
        ("http://127.0.0.1:8000", Address("127.0.0.1", 8000)),
        ("localhost:81/v1/", Address("localhost", 81)),
        ("https://a.example/x/v1", Address("a.example", 443, "/x", True)),
    ],
)
def test_addresses_as_people_write_them(url, address):
    assert parse_address(url) == address


@pytest.mark.parametrize(
    "url",
    [
        "ftp://x", "http://", "http://x:port", "http://me:pw@x", "http://x?key=sk-1",
        "http://x/\xe4", "x:0",
    ],
)  # fmt: skip
def test_other_addresses_are_refused_without_their_secrets(url):
    with pytest.raises(UsageError) as refused:
        parse_address(url)
    assert "pw" not in str(refused.value)
    assert "sk-1" not in str(refused.value)


def test_prompts_share_what_their_requests_say_and_nothing_else():
    prompts = Prompts()
    one = prompts.ids(Request(0, 0.0, 1100, 1, 1024, 1, (1, 2, 3)))
    two = prompts.ids(Request(1, 0.0, 2000, 1, 1024, 1, (1, 2, 4, 5)))
    assert (len(one), len(two)) == (1100, 2000)
    assert one[:1024] == two[:1024]
    assert one[1024:1100] != two[1024:1100]
    apart = [prompts.ids(Request(n, 0.0, 64, 1)) for n in range(2)]
    assert apart[0] != apart[1]
    session = [prompts.ids(Request(n, 0.0, 64, 1, 32, 7)) for n in range(2)]
    assert session[0][:32] == session[1][:32]
    assert session[0][32:] != session[1][32:]
    assert Prompts().ids(Request(0, 0.0, 64, 1)) != apart[0]  # another load, another text
    assert len(prompts.words(Request(0, 0.0, 100, 1), 2.0).split()) == 50
