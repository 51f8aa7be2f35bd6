# The driver's image: docker build -t slackwater .
ARG BUILD_IMAGE=docker.io/library/rust:1.95-slim-trixie
ARG BASE_IMAGE=docker.io/library/debian:trixie-slim

FROM ${BUILD_IMAGE} AS build
WORKDIR /src
COPY Cargo.toml Cargo.lock rust-toolchain.toml build.rs ./
COPY proto proto
COPY src src
RUN cargo build --release --locked --bin slackwater

# What it starts, and nothing else: mkfs.ext4, mkfs.xfs, mkfs.btrfs, and blkid of util-linux.
FROM ${BASE_IMAGE}
RUN apt-get update \
    && apt-get install --yes --no-install-recommends e2fsprogs xfsprogs btrfs-progs util-linux \
    && rm -rf /var/lib/apt/lists/*
COPY --from=build /src/target/release/slackwater /usr/local/bin/slackwater
ENTRYPOINT ["/usr/local/bin/slackwater"]
CMD ["serve"]
