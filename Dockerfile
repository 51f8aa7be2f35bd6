# The driver's image, and that of the program that fills volumes.
#
#   docker build -t slackwater .                            builds the programs too
#   docker build -t slackwater --target prebuilt -f Dockerfile target/release
#                                                           takes the two that cargo has built
#   docker build -t slackwater-populate --target populate .
#                                                           the same of slackwater-populate
#   docker build -t slackwater-populate --target populate-prebuilt -f Dockerfile target/release
ARG BUILD_IMAGE=docker.io/library/rust:1.95-slim-trixie
ARG BASE_IMAGE=docker.io/library/debian:trixie-slim

# What they start, and nothing else: mkfs.ext4, mkfs.xfs, mkfs.btrfs, and blkid of util-linux.
FROM ${BASE_IMAGE} AS base
RUN apt-get update \
    && apt-get install --yes --no-install-recommends e2fsprogs xfsprogs btrfs-progs util-linux \
    && rm -rf /var/lib/apt/lists/*
ENTRYPOINT ["/usr/local/bin/slackwater"]
CMD ["serve"]

# The base must be as new as what the program was linked with.
FROM base AS prebuilt
COPY slackwater slackwater-guard /usr/local/bin/

FROM ${BUILD_IMAGE} AS build
WORKDIR /src
COPY Cargo.toml Cargo.lock rust-toolchain.toml build.rs ./
COPY proto proto
COPY core core
COPY guard guard
COPY kubectl-slackwater kubectl-slackwater
COPY populate populate
COPY testkit testkit
COPY src src

# Certificates, and below /files everything that slackwater-populate needs: no shell, no mount, no mkfs.
FROM ${BASE_IMAGE} AS populate-base
RUN apt-get update \
    && apt-get install --yes --no-install-recommends ca-certificates \
    && rm -rf /var/lib/apt/lists/* \
    && mkdir -p /files/etc/ssl/certs \
    && cp /etc/ssl/certs/ca-certificates.crt /files/etc/ssl/certs/ \
    && echo 'hosts: files dns' >/files/etc/nsswitch.conf \
    && echo 'nonroot:x:65532:65532::/:/sbin/nologin' >/files/etc/passwd \
    && cp --parents --dereference /usr/lib/os-release /files
# Adds the program's libraries, with the paths that its loader finds them at, and what scanners and lawyers
# look for: the packages that these files are from, and their licenses.
RUN printf '%s\n' '#!/bin/sh -e' \
    'libraries=$(ldd /files/usr/local/bin/slackwater-populate | grep -o "/[^ ]*")' \
    'cp --parents --dereference $libraries /files' \
    'packages=$(for one in $libraries; do dpkg-query --search "*/${one##*/}"; done | cut -d : -f 1 | sort -u)' \
    'mkdir -p /files/var/lib/dpkg' \
    'dpkg-query --status ca-certificates $packages >/files/var/lib/dpkg/status' \
    'for one in ca-certificates $packages; do cp --parents --dereference /usr/share/doc/$one/copyright /files; done' \
    >/usr/local/bin/collect && chmod +x /usr/local/bin/collect

FROM populate-base AS populate-prebuilt-files
COPY slackwater-populate /files/usr/local/bin/
RUN collect

FROM scratch AS populate-prebuilt
COPY --from=populate-prebuilt-files /files /
USER 65532:65532
ENTRYPOINT ["/usr/local/bin/slackwater-populate"]

FROM build AS populate-build
RUN cargo build --release --locked --package slackwater-populate

FROM populate-base AS populate-files
COPY --from=populate-build /src/target/release/slackwater-populate /files/usr/local/bin/
RUN collect

FROM scratch AS populate
COPY --from=populate-files /files /
USER 65532:65532
ENTRYPOINT ["/usr/local/bin/slackwater-populate"]

FROM build AS driver-build
RUN cargo build --release --locked --bins

FROM base
COPY --from=driver-build /src/target/release/slackwater /src/target/release/slackwater-guard /usr/local/bin/
