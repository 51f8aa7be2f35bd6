//! Mutations of valid content of each format, through the whole attempt: each ends with a volume or with a
//! failure that no other attempt would change, and nothing beside the volume is touched.

use std::fs;
use std::os::unix::fs::symlink;
use std::sync::{Arc, Mutex};

use proptest::prelude::*;
use proptest::sample::Index;
use proptest::test_runner::{Config, TestRunner};
use serde_json::{Value, json};

use crate::images::{Registry, layer};
use crate::server::{Server, object, reply};
use crate::support::{Outcome, Volume, compressed, fill, noise, qcow2, tar};

const CASES: u32 = 96;

#[derive(Clone, Debug)]
enum Mutation {
    Set(Index, u8),
    Insert(Index, Vec<u8>),
    Remove(Index, usize),
    Truncate(Index),
}

impl Mutation {
    fn apply(&self, input: &mut Vec<u8>) {
        let length = input.len();
        match self {
            Mutation::Set(at, byte) if length > 0 => input[at.index(length)] = *byte,
            Mutation::Set(..) => {}
            Mutation::Insert(at, bytes) => {
                let at = at.index(length + 1);
                input.splice(at..at, bytes.iter().copied());
            }
            Mutation::Remove(at, count) => {
                let at = at.index(length + 1);
                input.drain(at..length.min(at + count));
            }
            Mutation::Truncate(at) => input.truncate(at.index(length + 1)),
        }
    }
}

fn mutations() -> impl Strategy<Value = Vec<Mutation>> {
    let at = any::<Index>;
    let one = prop_oneof![
        6 => (at(), any::<u8>()).prop_map(|(at, byte)| Mutation::Set(at, byte)),
        2 => (at(), prop::collection::vec(any::<u8>(), 1..9))
            .prop_map(|(at, bytes)| Mutation::Insert(at, bytes)),
        2 => (at(), 1..64_usize).prop_map(|(at, count)| Mutation::Remove(at, count)),
        1 => at().prop_map(Mutation::Truncate),
    ];
    prop::collection::vec(one, 1..6)
}

/// A volume with a file beside it.
fn volume() -> Volume {
    let volume = Volume::new();
    fs::create_dir(volume.folder.path().join("outside")).expect("a folder");
    fs::write(volume.folder.path().join("outside/kept"), "kept").expect("a file");
    volume
}

fn check(volume: &Volume, outcome: &Outcome) {
    let outside = volume.folder.path().join("outside");
    let kept = fs::read(outside.join("kept")).expect("it is there");
    assert_eq!(kept, b"kept");
    assert_eq!(fs::read_dir(outside).expect("a folder").count(), 1);
    if let Err(failure) = &outcome.result {
        // A disk of zeros can be as large as the file system of the test.
        let is_final = failure.exit_code() == 10 || failure.reason == "TimeLimit";
        assert!(is_final, "{}: {failure}", failure.reason);
    }
    let received = outcome.last["received"].as_u64().expect("a number");
    assert!(received <= 1 << 20, "{received}");
}

/// Passes mutations of each seed to a test.
fn run(seeds: &[Vec<u8>], test: impl Fn(&[u8])) {
    let config = Config {
        cases: CASES,
        failure_persistence: None,
        ..Config::default()
    };
    let inputs = (any::<Index>(), mutations());
    let ran = TestRunner::new(config).run(&inputs, |(seed, mutations)| {
        let mut input = seed.get(seeds).clone();
        mutations
            .iter()
            .for_each(|mutation| mutation.apply(&mut input));
        test(&input);
        Ok(())
    });
    ran.unwrap_or_else(|failure| panic!("{failure}"));
}

/// A folder whose archive has files, links and a folder.
fn sample() -> tempfile::TempDir {
    let folder = tempfile::TempDir::with_prefix("slackwater-").expect("a folder");
    fs::create_dir(folder.path().join("d")).expect("a folder");
    fs::write(folder.path().join("d/f"), noise(700)).expect("a file");
    symlink("../outside", folder.path().join("s")).expect("a link");
    fs::hard_link(folder.path().join("d/f"), folder.path().join("h")).expect("a link");
    folder
}

/// Raw, qcow2 and tar, as they are and compressed.
fn objects() -> Vec<Vec<u8>> {
    let sample = sample();
    let archives = [
        tar(sample.path(), &["--format=gnu"]),
        tar(sample.path(), &["--format=pax"]),
    ];
    let plain = [vec![noise(600), qcow2(&noise(1000))], archives.to_vec()].concat();
    let packed = ["gzip", "xz", "zstd"].map(|program| {
        let each = plain.iter().map(|bytes| compressed(program, bytes));
        each.collect::<Vec<_>>()
    });
    [plain.clone(), packed.concat()].concat()
}

#[test]
fn a_mutated_object_ends_with_a_volume_or_a_refusal() {
    let content: Arc<Mutex<Vec<u8>>> = Arc::default();
    let served = content.clone();
    let server = Server::new(move |request| {
        let content = served.lock().expect("no panic").clone();
        object(request, "\"1\"", &content)
    });
    run(&objects(), |input| {
        *content.lock().expect("no panic") = input.to_vec();
        for format in [None, Some("raw"), Some("qcow2"), Some("tar")] {
            let volume = volume();
            let limits = json!({"seconds": 20, "entries": 50});
            let more = match format {
                Some(format) => json!({"format": format, "limits": limits}),
                None => json!({"limits": limits}),
            };
            let outcome = fill(&volume.config(&server.url("/x"), more));
            check(&volume, &outcome);
        }
    });
}

#[test]
fn a_mutated_layer_ends_with_a_volume_or_a_refusal() {
    let registry = Registry::new("", None);
    let files: &[(&str, &[u8])] = &[("a", b"1"), ("d/.wh.x", b""), ("d/.wh..wh..opq", b"")];
    let plain = [layer(files, &[]), tar(sample().path(), &[])];
    let packed = plain.each_ref().map(|bytes| compressed("gzip", bytes));
    let lower = registry.blob(&layer(&[("d/x", b"2"), ("d/f", b"3")], &[]));
    run(&[plain, packed].concat(), |input| {
        let mutated = registry.blob(input);
        registry.image(&[lower.clone(), mutated]);
        for path in [None, Some("d/f"), Some("d")] {
            let volume = volume();
            let more = path.map_or(json!({}), |path| json!({"source": {"oci": {"path": path}}}));
            let outcome = registry.fill(&volume, ":v1", more);
            check(&volume, &outcome);
        }
    });
}

#[test]
fn a_mutated_manifest_or_list_ends_with_a_volume_or_a_refusal() {
    let registry = Registry::new("", None);
    let blob = registry.blob(&layer(&[("a", b"1")], &[]));
    let image = json!({"schemaVersion": 2, "layers": [blob]}).to_string();
    registry.image(std::slice::from_ref(&blob));
    let digest = registry.image(&[blob]);
    let platform = json!({"os": "linux", "architecture": "amd64"});
    let arm = json!({"os": "linux", "architecture": "arm64"});
    let size = image.len();
    let index = json!({"schemaVersion": 2, "manifests": [
        {"digest": digest, "size": size, "platform": platform},
        {"digest": digest, "size": size, "platform": arm}]});
    run(&[image.into_bytes(), index.to_string().into()], |input| {
        registry.put("manifests/v1", input);
        let volume = volume();
        check(&volume, &registry.fill(&volume, ":v1", json!({})));
    });
}

#[test]
fn a_mutated_list_of_objects_ends_with_a_volume_or_a_failure() {
    const LIST: &str = "<ListBucketResult><IsTruncated>false</IsTruncated><Contents><Key>p/a</Key><ETag>&quot;1&quot;</ETag><Size>5</Size></Contents><Contents><Key>p/d/b</Key><ETag>&quot;1&quot;</ETag><Size>5</Size></Contents></ListBucketResult>";
    let list: Arc<Mutex<Vec<u8>>> = Arc::default();
    let served = list.clone();
    let server = Server::new(move |request| match request.path().contains("list-type") {
        true => reply("200 OK", &[], &served.lock().expect("no panic")),
        false => object(request, "\"1\"", b"12345"),
    });
    run(&[LIST.into()], |input| {
        *list.lock().expect("no panic") = input.to_vec();
        let volume = volume();
        let mut config: Value = volume.config("", json!({}));
        config["source"] = json!({"s3": {"endpoint": server.origin(), "bucket": "bucket",
            "prefix": "p/", "unverified": true}});
        let mut outcome = fill(&config);
        // A list can be better next time, on a new volume.
        if outcome
            .result
            .as_ref()
            .is_err_and(|failure| failure.exit_code() == 12)
        {
            outcome.result = Ok(());
        }
        check(&volume, &outcome);
        let mut names = volume.names().into_iter();
        assert!(names.all(|name| name != "outside"));
    });
}
