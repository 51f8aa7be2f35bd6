//! Blocks into a file: lengths, checksums, compression, and attempts that continue.

use std::fs;
use std::io::Write;
use std::os::unix::fs::MetadataExt;

use serde_json::json;
use slackwater_populate::failure::Next;

use crate::server::{Server, Step, broken, object, reply, serves};
use crate::support::{Volume, compressed, digest, fill, noise, qcow2};

fn gzip(bytes: &[u8]) -> Vec<u8> {
    let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    encoder.write_all(bytes).expect("it is compressed");
    encoder.finish().expect("it is compressed")
}

#[test]
fn blocks_of_every_length_become_a_file() {
    for length in [0, 1, 511, 512, 65_536, 65_537, 3_000_000] {
        let content = noise(length);
        let server = serves(content.clone());
        let volume = Volume::new();
        let sum = digest(&content);
        let source = json!({"source": {"http": {"unverified": false, "sha256": sum}}});
        let outcome = fill(&volume.config(&server.url("/x"), source));
        outcome.good();
        assert!(volume.read("disk.img") == content, "{length}");
        assert_eq!(volume.names(), ["disk.img"]);
        assert_eq!(outcome.last["received"], length);
        assert_eq!(outcome.last["total"], length);
        assert_eq!(outcome.last["written"], length);
    }
}

#[test]
fn zeros_take_no_space() {
    let mut content = vec![0; 8 << 20];
    content[5 << 20] = 1;
    let server = serves(content.clone());
    let volume = Volume::new();
    fill(&volume.config(&server.url("/x"), json!({"fileName": "data.raw"}))).good();
    assert!(volume.read("data.raw") == content);
    let metadata = fs::metadata(volume.root().join("data.raw")).expect("metadata");
    assert!(
        metadata.blocks() * 512 <= 256 << 10,
        "{}",
        metadata.blocks()
    );
}

#[test]
fn compressed_blocks_are_recognized_and_their_checksum_is_of_what_is_sent() {
    let content = [noise(300_000), vec![0; 300_000], noise(100)].concat();
    let packed = [
        gzip(&content),
        compressed("xz", &content),
        compressed("zstd", &content),
    ];
    for packed in packed {
        let server = serves(packed.clone());
        let volume = Volume::new();
        let source = json!({"source": {"http": {"unverified": false, "sha256": digest(&packed)}}});
        let outcome = fill(&volume.config(&server.url("/x"), source));
        outcome.good();
        assert!(volume.read("disk.img") == content);
        assert_eq!(outcome.last["received"], packed.len());
        assert_eq!(outcome.last["written"], content.len());
        assert!(
            outcome.last.get("durable").is_none(),
            "no attempt continues within it"
        );
    }
}

#[test]
fn a_wrong_checksum_reports_both() {
    let server = serves(b"content".to_vec());
    let volume = Volume::new();
    let wrong = "ab".repeat(32);
    let source = json!({"source": {"http": {"unverified": false, "sha256": wrong}}});
    let outcome = fill(&volume.config(&server.url("/x"), source));
    let failure = outcome.failure("ChecksumMismatch");
    assert_eq!(failure.next, Next::Nothing);
    let text = failure.to_string();
    assert!(
        text.contains(&wrong) && text.contains(&digest(b"content")),
        "{text}"
    );
}

#[test]
fn what_is_corrupt_is_refused() {
    let mut packed = gzip(&noise(100_000));
    let middle = packed.len() / 2;
    packed[middle] ^= 1;
    for bytes in [packed, gzip(b"x")[..15].to_vec()] {
        let volume = Volume::new();
        let outcome = fill(&volume.config(&serves(bytes).url("/x"), json!({})));
        assert_eq!(outcome.failure("Corrupt").next, Next::Nothing);
    }
}

#[test]
fn a_bomb_is_stopped_by_the_size_of_the_volume_and_by_the_limit_of_bytes() {
    let volume = Volume::new();
    let server = serves(noise(100_000));
    let limited = volume.config(
        &server.url("/x"),
        json!({"limits": {"receivedBytes": 99_999}}),
    );
    assert_eq!(fill(&limited).failure("TooLarge").next, Next::Nothing);
    fill(&volume.config(
        &server.url("/x"),
        json!({"limits": {"receivedBytes": 100_000}}),
    ))
    .good();
}

#[test]
fn a_bomb_is_stopped_by_the_time_of_the_attempt() {
    // 64 GiB of zeros.
    let bomb = gzip(&vec![0; 64 << 20]).repeat(1024);
    let volume = Volume::new();
    let begun = std::time::Instant::now();
    let limits = json!({"limits": {"seconds": 2}});
    let outcome = fill(&volume.config(&serves(bomb).url("/x"), limits));
    let failure = outcome.result.as_ref().expect_err("it is stopped");
    // A temporary folder may be smaller than that.
    assert!(
        ["TimeLimit", "TooLarge"].contains(&failure.reason),
        "{failure}"
    );
    assert!(begun.elapsed() < std::time::Duration::from_secs(20));
    assert!(
        outcome.last["written"]
            .as_u64()
            .is_some_and(|bytes| bytes < 64 << 30)
    );
}

#[test]
fn a_connection_that_breaks_continues_where_it_was() {
    let content = noise(2_000_000);
    let expected = content.clone();
    let server = Server::new(move |request| {
        let steps = object(request, "\"1\"", &content);
        match request.from() {
            None => broken(steps, 700_001),
            Some(700_001) => broken(steps, 1),
            Some(_) => steps,
        }
    });
    let volume = Volume::new();
    let source = json!({"source": {"http": {"unverified": false, "sha256": digest(&expected)}}});
    fill(&volume.config(&server.url("/x"), source)).good();
    assert!(volume.read("disk.img") == expected);
    let requests = server.requests();
    assert_eq!(requests.len(), 3);
    assert_eq!(requests[1].header("if-range"), Some("\"1\""));
    assert_eq!(requests[2].header("range"), Some("bytes=700002-"));
}

#[test]
fn two_versions_of_an_object_are_never_mixed() {
    let server = Server::new(|request| match request.from() {
        None => broken(object(request, "\"1\"", &[1; 1000]), 500),
        Some(_) => object(request, "\"2\"", &[2; 1000]),
    });
    let volume = Volume::new();
    let outcome = fill(&volume.config(&server.url("/x"), json!({})));
    assert_eq!(outcome.failure("SourceChanged").next, Next::NewVolume);
    // A server that ignores If-Range, and sends the rest of another object.
    let server = Server::new(|request| match request.from() {
        None => broken(object(request, "\"1\"", &[1; 1000]), 500),
        Some(from) => {
            let range = format!("Content-Range: bytes {from}-999/1000");
            reply("206 Partial Content", &["ETag: \"2\"", &range], &[2; 500])
        }
    });
    let outcome = fill(&volume.config(&server.url("/x"), json!({})));
    assert_eq!(outcome.failure("SourceChanged").next, Next::NewVolume);
}

#[test]
fn a_broken_connection_without_a_strong_etag_is_a_new_attempt() {
    for etag in ["W/\"1\"", "1"] {
        let server = Server::new(move |request| broken(object(request, etag, &[1; 1000]), 500));
        let volume = Volume::new();
        let outcome = fill(&volume.config(&server.url("/x"), json!({})));
        assert_eq!(outcome.failure("TransferFailed").next, Next::Again);
        assert_eq!(server.requests().len(), 1, "{etag}");
        assert!(outcome.last.get("durable").is_none());
        assert!(outcome.last.get("validator").is_none());
    }
}

/// Fails an attempt, and returns its volume and where the next one continues.
fn interrupted(content: &[u8], at: usize) -> (Volume, serde_json::Value) {
    let content = content.to_vec();
    // From the second request on, nothing is sent.
    let server = Server::new(move |request| match request.from() {
        None => broken(object(request, "\"1\"", &content), at),
        Some(_) => reply("403 Forbidden", &[], b""),
    });
    let volume = Volume::new();
    let outcome = fill(&volume.config(&server.url("/x"), json!({})));
    outcome.failure("ServerRefused");
    (volume, json!(null))
}

#[test]
fn an_attempt_continues_that_of_a_pod_that_is_gone() {
    let content = noise(1_500_000);
    let expected = content.clone();
    let half = content.clone();
    let server = Server::new(move |request| match request.from() {
        None => [
            broken(object(request, "\"1\"", &half), 1_200_000),
            vec![Step::Wait(std::time::Duration::from_secs(30))],
        ]
        .into_iter()
        .flatten()
        .collect(),
        Some(_) => reply("503 Busy", &[], b""),
    });
    let volume = Volume::new();
    let short = json!({"limits": {"silenceSeconds": 1, "seconds": 4}});
    let first = fill(&volume.config(&server.url("/x"), short));
    assert_eq!(
        first.result.as_ref().expect_err("it fails").next,
        Next::Again
    );
    assert_eq!(first.last["durable"], 1_200_000);
    assert_eq!(first.last["validator"], json!([34, 49, 34]));
    let resume = json!({"bytes": first.last["durable"], "validator": "\"1\""});
    let server = serves(content);
    let more = json!({"resume": resume, "source": {"http": {"unverified": false, "sha256": digest(&expected)}}});
    let second = fill(&volume.config(&server.url("/x"), more.clone()));
    second.good();
    assert!(volume.read("disk.img") == expected);
    assert_eq!(second.last["received"], 1_500_000);
    let requests = server.requests();
    assert_eq!(requests[0].header("range"), Some("bytes=1200000-"));
    assert_eq!(requests[0].header("if-range"), Some("\"1\""));
    // The part that was there is hashed again: one changed byte of it is noticed.
    let mut changed = volume.read("disk.img");
    changed[5] ^= 1;
    fs::write(volume.root().join("disk.img"), &changed[..1_200_000]).expect("it is written");
    let third = fill(&volume.config(&server.url("/x"), more));
    assert_eq!(third.failure("ChecksumMismatch").next, Next::NewVolume);
}

#[test]
fn an_attempt_begins_again_if_the_server_cannot_continue() {
    let (volume, _) = interrupted(&noise(1000), 600);
    let resume = |bytes: u64| json!({"resume": {"bytes": bytes, "validator": "\"1\""}});
    // Changed since: shorter, too.
    let server = Server::new(|request| object(request, "\"2\"", &[2; 500]));
    fill(&volume.config(&server.url("/x"), resume(600))).good();
    assert_eq!(volume.read("disk.img"), [2; 500]);
    // Ranges are ignored.
    let server = Server::new(|_| reply("200 OK", &[], &[3; 700]));
    fill(&volume.config(&server.url("/x"), resume(500))).good();
    assert_eq!(volume.read("disk.img"), [3; 700]);
    // Everything was there already: no byte follows.
    let server = serves(vec![4; 700]);
    fill(&volume.config(&server.url("/x"), resume(700))).good();
    assert_eq!(volume.read("disk.img"), [4; 700]);
    // Less is on the volume than the controller believes.
    let outcome = fill(&volume.config(&server.url("/x"), resume(701)));
    assert_eq!(outcome.failure("ResumeFailed").next, Next::NewVolume);
}

#[test]
fn a_range_that_was_not_requested_is_not_written() {
    let (volume, _) = interrupted(&[1; 1000], 600);
    let server = Server::new(|_| {
        let headers = ["ETag: \"1\"", "Content-Range: bytes 500-999/1000"];
        reply("206 Partial Content", &headers, &[1; 500])
    });
    let resume = json!({"resume": {"bytes": 600, "validator": "\"1\""}});
    let outcome = fill(&volume.config(&server.url("/x"), resume));
    assert_eq!(outcome.failure("TransferFailed").next, Next::Again);
    let outcome = fill(&volume.config(&server.url("/x"), json!({})));
    assert_eq!(outcome.failure("ServerRefused").next, Next::Nothing);
}

#[test]
fn a_qcow2_image_becomes_its_disk() {
    let content = [noise(200_000), vec![0; 100_000], noise(65_536)].concat();
    let image = qcow2(&content);
    for packed in [image.clone(), gzip(&image)] {
        let volume = Volume::new();
        let sum = digest(&packed);
        let source = json!({"source": {"http": {"unverified": false, "sha256": sum}}});
        let outcome = fill(&volume.config(&serves(packed).url("/x"), source));
        outcome.good();
        let disk = volume.read("disk.img");
        assert!(disk.starts_with(&content) && disk.len().is_multiple_of(65_536));
        assert_eq!(volume.names(), ["disk.img"]);
        assert!(outcome.last.get("durable").is_none());
    }
}

#[test]
fn a_qcow2_image_is_judged_before_all_of_it_is_received() {
    let mut image = qcow2(&noise(8 << 20));
    image[8..16].copy_from_slice(&64_u64.to_be_bytes());
    image[64..64 + 11].copy_from_slice(b"/etc/passwd");
    let volume = Volume::new();
    let begin = image[..65_536].to_vec();
    let server = Server::new(move |request| {
        let mut steps = broken(object(request, "\"1\"", &image), begin.len());
        steps.push(Step::Wait(std::time::Duration::from_secs(60)));
        steps
    });
    let outcome =
        fill(&volume.config(&server.url("/x"), json!({"limits": {"silenceSeconds": 30}})));
    assert_eq!(outcome.failure("FormatRefused").next, Next::Nothing);
    assert!(volume.names().is_empty());
    let mut large = qcow2(&noise(1000));
    large[24..32].copy_from_slice(&(1_u64 << 60).to_be_bytes());
    let outcome = fill(&volume.config(&serves(large).url("/x"), json!({})));
    assert_eq!(outcome.result.expect_err("too large").next, Next::Nothing);
}

#[test]
fn a_wrong_checksum_of_a_qcow2_image_is_noticed_before_it_is_converted() {
    let server = serves(qcow2(&noise(1000)));
    let volume = Volume::new();
    let source = json!({"source": {"http": {"unverified": false, "sha256": "ab".repeat(32)}}});
    fill(&volume.config(&server.url("/x"), source)).failure("ChecksumMismatch");
    assert!(volume.names().is_empty());
}
