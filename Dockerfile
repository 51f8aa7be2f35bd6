# The driver's image.
#
#   docker build -t slackwater .                            builds the programs too
#   docker build -t slackwater --target prebuilt -f Dockerfile target/release
#                                                           takes the two that cargo has built
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
COPY src src
RUN cargo build --release --locked --bins

FROM base
COPY --from=build /src/target/release/slackwater /src/target/release/slackwater-guard /usr/local/bin/
