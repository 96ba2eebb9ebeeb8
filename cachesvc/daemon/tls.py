"""Mutual TLS, of the API's TCP port and between nodes."""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import TYPE_CHECKING

from cachesvc.config import Tls
from cachesvc.core.errors import InvalidInput

if TYPE_CHECKING:
    import grpc


def server_credentials(tls: Tls) -> grpc.ServerCredentials:
    """They demand a client certificate. Raises as `read_tls`."""
    import grpc

    key, certificate, ca = read_tls(tls)
    return grpc.ssl_server_credentials([(key, certificate)], ca, require_client_auth=True)


def client_credentials(tls: Tls) -> grpc.ChannelCredentials:
    """They show our certificate, and demand one of the host that is called. Raises as `read_tls`."""
    import grpc

    key, certificate, ca = read_tls(tls)
    return grpc.ssl_channel_credentials(ca, key, certificate)


def read_tls(tls: Tls) -> tuple[bytes, bytes, bytes]:
    """Key, certificate and the certificates that sign the others'. Raises InvalidInput for files that cannot be used."""
    try:
        key, certificate, ca = (Path(name).read_bytes() for name in (tls.key, tls.certificate, tls.ca))
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(tls.certificate, tls.key, password="")  # else it would ask for one
        context.load_verify_locations(tls.ca)
    except ssl.SSLError as error:
        reason = error.reason or "no PEM"
        raise InvalidInput(
            f"{tls.certificate}, {tls.key} or {tls.ca} is not what TLS needs ({reason})"
        ) from None
    except OSError as error:
        raise InvalidInput(f"{error.filename} cannot be read ({error.strerror})") from None
    return key, certificate, ca
