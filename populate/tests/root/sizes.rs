//! Content of no byte, of one byte, and of one byte more than the volume has: in each format, compressed and not,
//! and from each kind of source.

use std::fs;
use std::process::Command;

use serde_json::{Value, json};
use slackwater_populate::failure::Next;
use slackwater_testkit::unmount;

use crate::Device;
use crate::server::{Server, Tls, object, reply, serves};
use crate::support::{Volume, compressed, digest, fill, noise, qcow2, tar};

/// Bytes of the volume.
const CAPACITY: usize = 1 << 20;
const SIZES: [usize; 3] = [0, 1, CAPACITY + 1];
const PROGRAMS: [&str; 4] = ["", "gzip", "xz", "zstd"];

/// A volume whose file system has this number of bytes.
struct Small(Volume);

impl Small {
    fn new() -> Small {
        let volume = Volume::new();
        let size = format!("size={CAPACITY}");
        let mounted = Command::new("mount")
            .args(["-t", "tmpfs", "-o", &size, "none"])
            .arg(volume.root())
            .status();
        assert!(mounted.expect("mount starts").success());
        Small(volume)
    }
}

impl Drop for Small {
    fn drop(&mut self) {
        unmount(&self.0.root());
    }
}

/// What the volume should have. What is too much for it is small when it is compressed.
fn bytes(size: usize) -> Vec<u8> {
    vec![if size > CAPACITY { 0 } else { 7 }; size]
}

fn packed(program: &str, content: Vec<u8>) -> Vec<u8> {
    match program {
        "" => content,
        program => compressed(program, &content),
    }
}

/// An image whose disk has exactly these bytes.
fn disk_image(content: &[u8]) -> Vec<u8> {
    let mut image = qcow2(content);
    image[24..32].copy_from_slice(&(content.len() as u64).to_be_bytes());
    image
}

fn archive(content: &[u8]) -> Vec<u8> {
    let folder = tempfile::TempDir::with_prefix("slackwater-").expect("a folder");
    fs::write(folder.path().join("f"), content).expect("a file");
    tar(folder.path(), &[])
}

/// Fills a small volume, and expects one file in it.
fn check(what: &str, size: usize, file: &str, config: impl Fn(&Volume) -> Value) {
    let small = Small::new();
    let outcome = fill(&config(&small.0));
    let what = format!("{what}, {size} bytes");
    if size > CAPACITY {
        let failure = outcome.result.expect_err(&what);
        assert_eq!(
            (failure.reason, failure.next),
            ("TooLarge", Next::Nothing),
            "{what}"
        );
        return;
    }
    if let Err(failure) = outcome.result {
        panic!("{what}: {}: {failure}", failure.reason);
    }
    assert_eq!(small.0.names(), [file], "{what}");
    assert!(small.0.read(file) == bytes(size), "{what}");
}

#[test]
fn objects_of_each_format_have_any_size_up_to_that_of_the_file_system() {
    type Format = (&'static str, &'static str, fn(&[u8]) -> Vec<u8>);
    let formats: [Format; 3] = [
        ("raw", "disk.img", |content| content.to_vec()),
        ("qcow2", "disk.img", disk_image),
        ("tar", "f", archive),
    ];
    for (format, file, form) in formats {
        for program in PROGRAMS {
            for size in SIZES {
                let server = serves(packed(program, form(&bytes(size))));
                let what = format!("{format} {program}");
                check(&what, size, file, |volume| {
                    volume.config(&server.url("/x"), json!({}))
                });
            }
        }
    }
}

#[test]
fn disks_of_each_format_have_any_size_up_to_that_of_the_device() {
    type Format = (&'static str, fn(&[u8]) -> Vec<u8>);
    let formats: [Format; 2] = [("raw", |content| content.to_vec()), ("qcow2", disk_image)];
    let scratch = tempfile::TempDir::with_prefix("slackwater-").expect("a folder");
    for (format, form) in formats {
        for program in PROGRAMS {
            for size in SIZES {
                let device = Device::new(&noise(CAPACITY));
                let server = serves(packed(program, form(&bytes(size))));
                let outcome = device.fill(&server.url("/x"), json!({"scratch": scratch.path()}));
                let what = format!("{format} {program}, {size} bytes");
                if size > CAPACITY {
                    let failure = outcome.result.expect_err(&what);
                    assert_eq!((failure.reason, failure.next), ("TooLarge", Next::Nothing));
                    continue;
                }
                assert!(outcome.result.is_ok(), "{what}");
                let mut expected = bytes(size);
                expected.resize(CAPACITY, 0);
                assert!(device.content() == expected, "{what}");
            }
        }
    }
}

/// A registry with one image of one layer.
fn registry(tls: &Tls, layer: Vec<u8>) -> Server {
    let blob = format!("sha256:{}", digest(&layer));
    let size = layer.len();
    let manifest = json!({"schemaVersion": 2, "layers": [{"digest": blob, "size": size}]});
    Server::at("127.0.0.1", Some(tls), move |request| {
        match request.path().contains("/manifests/") {
            true => reply("200 OK", &[], manifest.to_string().as_bytes()),
            false => reply("200 OK", &[], &layer),
        }
    })
}

#[test]
fn images_have_any_size_up_to_that_of_the_file_system() {
    let tls = Tls::new();
    for program in ["", "gzip", "zstd"] {
        for size in SIZES {
            let server = registry(&tls, packed(program, archive(&bytes(size))));
            for (path, file) in [(None, "f"), (Some("f"), "disk.img")] {
                let what = format!("{path:?} of an image, {program}");
                check(&what, size, file, |volume| {
                    let mut config = volume.config("", json!({}));
                    let image = format!("{}/team/app:v1", server.address);
                    config["source"] = json!({"oci": {"image": image}});
                    if let Some(path) = path {
                        config["source"]["oci"]["path"] = json!(path);
                    }
                    config["network"] = json!({"certificates": tls.authority});
                    config
                });
            }
        }
    }
}

#[test]
fn objects_of_a_bucket_have_any_size_up_to_that_of_the_file_system() {
    for size in SIZES {
        let server = Server::new(move |request| match request.path().contains("list-type") {
            true => {
                let list = format!(
                    "<ListBucketResult><Contents><Key>p/f</Key><ETag>\"1\"</ETag><Size>{size}</Size></Contents></ListBucketResult>"
                );
                reply("200 OK", &[], list.as_bytes())
            }
            false => object(request, "\"1\"", &bytes(size)),
        });
        for (field, value, file) in [("key", "p/f", "disk.img"), ("prefix", "p/", "f")] {
            check(&format!("a {field}"), size, file, |volume| {
                let mut config = volume.config("", json!({}));
                config["source"] = json!({"s3": {"endpoint": server.origin(), "bucket": "bucket",
                    "unverified": true}});
                config["source"]["s3"][field] = json!(value);
                config
            });
        }
    }
}
