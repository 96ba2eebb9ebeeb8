"""The end of a certificate, as OpenSSL, trustme and `cryptography` write it; and the warnings before it."""

from __future__ import annotations

import logging
import subprocess
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest
import trustme
from hypothesis import given
from hypothesis import strategies as st

from cachesvc.config import Tls
from cachesvc.core.errors import InvalidInput
from cachesvc.core.placement.traits import DAY_S
from cachesvc.daemon.access.tls import CertificateWatch, certificate_end

CA = trustme.CA()


def written(path: Path, *ends: datetime) -> str:
    """A file of certificates that end then; return its path."""
    begin = datetime(2001, 1, 1, tzinfo=timezone.utc)
    issued = [CA.issue_cert("node", not_before=begin, not_after=end) for end in ends]
    path.write_bytes(b"".join(each.cert_chain_pems[0].bytes() for each in issued))
    return str(path)


@given(st.datetimes(datetime(2001, 1, 2), datetime(2199, 12, 31)))
def test_the_end_is_read_before_and_after_2050(
    tmp_path_factory: pytest.TempPathFactory, end: datetime
) -> None:
    end = end.replace(microsecond=0, tzinfo=timezone.utc)
    path = written(tmp_path_factory.mktemp("one") / "node.pem", end)
    assert certificate_end(path) == int(end.timestamp())


def test_a_chain_ends_with_its_first(tmp_path: Path) -> None:
    early, late = (datetime(year, 5, 6, tzinfo=timezone.utc) for year in (2030, 2040))
    assert certificate_end(written(tmp_path / "chain.pem", late, early)) == int(early.timestamp())


def test_a_certificate_of_openssl(tmp_path: Path) -> None:
    key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-keyout", "k.pem"]
    command = ["openssl", "req", "-x509", *key, "-out", "c.pem", "-days", "9", "-subj", "/CN=node"]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
    said = subprocess.run(
        ["openssl", "x509", "-in", "c.pem", "-noout", "-enddate"],
        cwd=tmp_path,
        check=True,
        capture_output=True,
    )
    end = datetime.strptime(said.stdout.decode().strip(), "notAfter=%b %d %H:%M:%S %Y GMT")
    assert certificate_end(str(tmp_path / "c.pem")) == int(end.replace(tzinfo=timezone.utc).timestamp())


@given(st.binary(max_size=200), st.integers(0, 400))
def test_damaged_files_are_a_typed_error(
    tmp_path_factory: pytest.TempPathFactory, noise: bytes, cut: int
) -> None:
    import base64

    path = tmp_path_factory.mktemp("bad") / "node.pem"
    whole = CA.cert_pem.bytes()
    body = base64.b64encode(noise + b"\x30\x82\x01")
    for content in (
        noise,
        b"-----BEGIN CERTIFICATE-----\n" + body + b"\n-----END CERTIFICATE-----\n",
        whole[:cut],
    ):
        path.write_bytes(content)
        with pytest.raises(InvalidInput):
            certificate_end(str(path))


def test_the_log_warns_at_each_stage_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    end = datetime.now(timezone.utc).replace(microsecond=0) + timedelta(days=100)
    path = written(tmp_path / "node.pem", end)
    now = [0.0]
    watch = CertificateWatch(Tls(path, "", ""), lambda: now[0])
    with caplog.at_level(logging.WARNING):
        for days in (40, 29, 28, 6.5, 6, 0.9, -1, -2):
            now[0] = end.timestamp() - days * DAY_S
            watch.look()
        assert watch.ends == int(end.timestamp())
        written(tmp_path / "node.pem", end + timedelta(days=400))
        watch.look()
    lines = [each.getMessage() for each in caplog.records]
    assert [line.split("; ")[0].rpartition(", ")[2] for line in lines[:3]] == [
        "in 29.0 days",
        "in 6.5 days",
        "in 0.9 days",
    ]
    assert len(lines) == 4
    assert "has expired" in lines[3]
    Path(path).unlink()
    watch.look()
    assert watch.ends == 0
