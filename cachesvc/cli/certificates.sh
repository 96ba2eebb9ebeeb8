#!/bin/bash
# Makes the files of mutual TLS for a cluster: an authority, and certificates that it signs.
#
#   certificates.sh cachesvc-peers                  one certificate for all nodes: ./node.pem, node.key and ca.pem
#   certificates.sh cachesvc-peers node1 node2 ...  one for each node: ./NODE/node.pem, node.key and ca.pem
#
# The first argument is the name in every certificate, for --tls-name. That of a node has the node's name or address too. The
# three files go to the node, and ca.key goes to none. A certificate begins an hour ago, so that clocks may differ, and ends
# after DAYS days, 365 unless that variable is set. Where ca.key is present, the same command renews certificates, and ca.pem
# stays as it is. Daemons use replaced files from the next connection on.
set -euo pipefail
umask 077
if [[ ${1:--} == -* ]]; then
    sed -n '2,/^set/{/^set/d;s/^# \?//p}' "$0" >&2
    exit 2
fi
name=$1
shift
days=${DAYS:-365}
ca_key=ca.key
new_key=(-newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes)
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

# Sign the request $1 for $2 days with the X.509 extensions $3; further arguments go to openssl. `openssl ca` sets the
# beginning, which other commands cannot before OpenSSL 3.4.
sign() {
    local request=$1 for_days=$2 extensions=$3
    shift 3
    cat >"$work/ca.conf" <<END
[ca]
default_ca = here
[here]
database = $work/index
new_certs_dir = $work
rand_serial = yes
default_md = sha256
policy = any
x509_extensions = these
[any]
commonName = supplied
[these]
$extensions
END
    : >"$work/index"
    openssl ca -batch -notext -config "$work/ca.conf" -keyfile "$ca_key" -in "$request" "$@" \
        -startdate "$(date -u -d '1 hour ago' +%Y%m%d%H%M%SZ)" -enddate "$(date -u -d "$for_days days" +%Y%m%d%H%M%SZ)"
}

# Make the files of one certificate in the folder $1 for the names that follow.
certify() {
    local folder=$1 names="" each
    shift
    for each in "$@"; do
        if [[ $each =~ ^[0-9.]+$|: ]]; then names+=",IP:$each"; else names+=",DNS:$each"; fi
    done
    mkdir -p "$folder"
    openssl req "${new_key[@]}" -keyout "$folder/node.key.new" -out "$work/node.csr" -subj "/CN=${*: -1}"
    sign "$work/node.csr" "$days" "subjectAltName = ${names#,}
extendedKeyUsage = serverAuth,clientAuth
subjectKeyIdentifier = hash
authorityKeyIdentifier = keyid" -cert ca.pem -out "$folder/node.pem.new"
    [ "$folder" = . ] || cp ca.pem "$folder/ca.pem"
    mv "$folder/node.key.new" "$folder/node.key"
    mv "$folder/node.pem.new" "$folder/node.pem"
}

if [ ! -e ca.key ]; then
    ca_key=ca.key.new
    openssl req "${new_key[@]}" -keyout "$ca_key" -out "$work/ca.csr" -subj "/CN=$name authority"
    sign "$work/ca.csr" 3650 "basicConstraints = critical,CA:TRUE
keyUsage = critical,keyCertSign
subjectKeyIdentifier = hash" -selfsign -out ca.pem
    mv "$ca_key" ca.key
    ca_key=ca.key
fi
if [ $# = 0 ]; then
    certify . "$name"
fi
for node in "$@"; do
    certify "$node" "$name" "$node"
done
