#!/bin/bash
# Makes the files of mutual TLS for a cluster: an authority, and one certificate for all nodes.
#
#   certificates.sh cachesvc-peers
#
# The argument is the name in the certificate, for --tls-name. It writes node.pem, node.key and ca.pem, which go to every
# node, and ca.key, which goes to none. Where ca.key is present the certificate is renewed, and ca.pem stays as it is.
set -euo pipefail
umask 077
name=${1:?the name in the certificate is missing}
days=365
key=(-newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes)

if [ ! -e ca.key ]; then
    openssl req -x509 "${key[@]}" -keyout ca.key -out ca.pem -days 3650 -subj "/CN=$name authority" \
        -addext keyUsage=critical,keyCertSign
fi
openssl req "${key[@]}" -keyout node.key.new -out node.csr -subj "/CN=$name"
cat >node.ext <<END
subjectAltName=DNS:$name
extendedKeyUsage=serverAuth,clientAuth
subjectKeyIdentifier=hash
authorityKeyIdentifier=keyid
END
openssl x509 -req -in node.csr -extfile node.ext -CA ca.pem -CAkey ca.key -CAcreateserial -out node.pem -days "$days"
mv node.key.new node.key
rm node.csr node.ext
