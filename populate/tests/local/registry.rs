//! A real registry of images, docker-registry, with TLS and a password. Images are made with umoci, and pushed
//! with skopeo. Registries that misbehave are in `images.rs`.

use std::fs;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use serde_json::{Value, json};
use slackwater_testkit::packages;

use crate::server::Tls;
use crate::support::{Outcome, Volume, digest, fill, noise, qcow2};

/// The user `puller` with the password `hunter2`, as `htpasswd -B` hashes it, and for a header.
const USERS: &str = "puller:$2y$05$abcdefghijklmnopqrstuuoXuKqgZXLiJqzfmMXDDhSFPIvxV7t8.\n";
const KEYS: &str = "puller:hunter2";
const HEADER: &str = "cHVsbGVyOmh1bnRlcjI=";
/// It starts within a second. The machine may be busy.
const START: Duration = Duration::from_secs(120);

/// The program, if this machine has it. Otherwise the tests are left out.
fn program() -> Option<PathBuf> {
    packages::find("docker-registry", "images of a real registry")
}

fn run(program: &str, words: &[&str]) -> String {
    let ran = Command::new(program).args(words).output();
    let ran =
        ran.unwrap_or_else(|error| panic!("{program}: {error} (deploy/deps test installs it)"));
    assert!(ran.status.success(), "{program} {words:?}: {ran:?}");
    String::from_utf8(ran.stdout).expect("text")
}

/// A running registry. It is killed when this is dropped.
struct Registry {
    child: Child,
    address: String,
    tls: Tls,
    folder: tempfile::TempDir,
}

impl Registry {
    fn new(program: &Path) -> Registry {
        let folder = tempfile::TempDir::with_prefix("slackwater-").expect("a folder");
        let tls = Tls::new();
        let write = |name: &str, content: &str| {
            let path = folder.path().join(name);
            fs::write(&path, content).expect("a file");
            path
        };
        let (users, certificate, key) = (
            write("users", USERS),
            write("tls.crt", &tls.own.0),
            write("tls.key", &tls.own.1),
        );
        let until = Instant::now() + START;
        loop {
            // The port is free until another program takes it, and then this begins again.
            let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
            let address = listener.local_addr().expect("an address").to_string();
            drop(listener);
            let settings = json!({
                "version": "0.1",
                "storage": {"filesystem": {"rootdirectory": folder.path().join("blobs")}},
                "http": {"addr": address, "tls": {"certificate": certificate, "key": key}},
                "auth": {"htpasswd": {"realm": "test", "path": users}},
            });
            // JSON is YAML.
            let settings = write("settings.yaml", &settings.to_string());
            let log = fs::File::create(folder.path().join("log")).expect("a file");
            let mut child = Command::new(program)
                .arg("serve")
                .arg(settings)
                .env("OTEL_TRACES_EXPORTER", "none")
                .stdin(Stdio::null())
                .stdout(log.try_clone().expect("a file"))
                .stderr(log)
                .spawn()
                .expect("it starts");
            while child.try_wait().expect("a child").is_none() {
                if std::net::TcpStream::connect(&address).is_ok() {
                    return Registry {
                        child,
                        address,
                        tls,
                        folder,
                    };
                }
                assert!(Instant::now() < until, "it does not listen");
                thread::sleep(Duration::from_millis(20));
            }
            assert!(Instant::now() < until, "it ends again and again");
        }
    }

    /// The folder of images, in the layout of OCI.
    fn layout(&self) -> String {
        let path = self.folder.path().join("layout");
        path.to_str().expect("text").to_string()
    }

    /// Creates an image with a layer for each of these lists of files, by path and content.
    fn create(&self, tag: &str, layers: &[&[(&str, &[u8])]]) {
        let layout = self.layout();
        if !Path::new(&layout).exists() {
            run("umoci", &["init", "--layout", &layout]);
        }
        let image = format!("{layout}:{tag}");
        run("umoci", &["new", "--image", &image]);
        for files in layers {
            let from = tempfile::TempDir::with_prefix("slackwater-").expect("a folder");
            for (name, content) in *files {
                let path = from.path().join(name);
                fs::create_dir_all(path.parent().expect("a folder")).expect("a folder");
                fs::write(path, content).expect("a file");
            }
            let from = from.path().to_str().expect("text");
            run(
                "umoci",
                &["insert", "--rootless", "--image", &image, from, "/"],
            );
        }
    }

    /// Pushes an image under the name of its tag, and returns its digest there.
    fn push(&self, tag: &str, more: &[&str]) -> String {
        let from = format!("oci:{}:{tag}", self.layout());
        let to = format!("docker://{}/team/app:{tag}", self.address);
        let mut words = vec!["--insecure-policy", "copy", "--quiet"];
        words.extend(["--dest-tls-verify=false", "--dest-creds", KEYS]);
        words.extend(more);
        words.extend([from.as_str(), to.as_str()]);
        run("skopeo", &words);
        let format = "--format={{.Digest}}";
        let words = [
            "inspect",
            "--tls-verify=false",
            "--creds",
            KEYS,
            format,
            &to,
        ];
        run("skopeo", &words).trim().to_string()
    }

    /// Makes an index of images for several architectures, and returns the tag of it.
    fn index(&self, images: &[(&str, &str)]) -> &'static str {
        let path = Path::new(&self.layout()).join("index.json");
        let mut top: Value =
            serde_json::from_slice(&fs::read(&path).expect("a file")).expect("JSON");
        let listed = top["manifests"].as_array().expect("a list").clone();
        let manifests = images.iter().map(|(tag, architecture)| {
            let has_tag =
                |one: &&Value| one["annotations"]["org.opencontainers.image.ref.name"] == **tag;
            let mut found = listed.iter().find(has_tag).expect("an image").clone();
            found["platform"] = json!({"os": "linux", "architecture": architecture});
            found
                .as_object_mut()
                .expect("an object")
                .remove("annotations");
            found
        });
        let media = "application/vnd.oci.image.index.v1+json";
        let index = json!({"schemaVersion": 2, "mediaType": media,
            "manifests": manifests.collect::<Vec<_>>()});
        let index = index.to_string();
        let digest = digest(index.as_bytes());
        let blobs = Path::new(&self.layout()).join("blobs/sha256");
        fs::write(blobs.join(&digest), &index).expect("a file");
        let entry = json!({"mediaType": media, "digest": format!("sha256:{digest}"),
            "size": index.len(), "annotations": {"org.opencontainers.image.ref.name": "all"}});
        top["manifests"].as_array_mut().expect("a list").push(entry);
        fs::write(&path, top.to_string()).expect("a file");
        "all"
    }

    /// Fills a volume from the image with this version, with or without the password.
    fn fill(&self, volume: &Volume, version: &str, is_known: bool, oci: Value) -> Outcome {
        let mut secret = volume.secret(&[format!("https://{}", self.address)], &self.tls.authority);
        let folder = PathBuf::from(secret["directory"].take().as_str().expect("a path"));
        let auths = match is_known {
            true => json!({"auths": {self.address.clone(): {"auth": HEADER}}}),
            false => json!({"auths": {}}),
        };
        fs::write(folder.join(".dockerconfigjson"), auths.to_string()).expect("a file");
        secret["directory"] = json!(folder);
        let bundle = volume.folder.path().join("bundle");
        fs::write(&bundle, &self.tls.authority).expect("a file");
        let mut config = volume.config("", json!({"secret": secret}));
        config["source"] = json!({"oci": {"image": format!("{}/team/app{version}", self.address)}});
        for (key, value) in oci.as_object().expect("an object") {
            config["source"]["oci"][key] = value.clone();
        }
        config["network"] = json!({"caBundle": bundle});
        fill(&config)
    }
}

impl Drop for Registry {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        if thread::panicking() {
            let log = fs::read_to_string(self.folder.path().join("log")).unwrap_or_default();
            eprintln!("--- the log of the registry ---\n{log}");
        }
    }
}

#[test]
fn images_that_others_made_are_read_from_a_real_registry_with_its_password() {
    let Some(program) = program() else { return };
    let registry = Registry::new(&program);
    let large = noise(3_000_000);
    let lower: &[(&str, &[u8])] = &[("a", b"1"), ("d/b", b"1"), ("d/large", &large)];
    let upper: &[(&str, &[u8])] = &[("d/b", b"2"), ("e/c", b"3")];
    registry.create("v1", &[lower, upper]);
    let pushed = registry.push("v1", &[]);
    let check = |version: &str| {
        let volume = Volume::new();
        let outcome = registry.fill(&volume, version, true, json!({}));
        outcome.good();
        assert_eq!(volume.names(), ["a", "d", "e"], "{version}");
        assert_eq!(volume.read("d/b"), b"2");
        assert_eq!(volume.read("e/c"), b"3");
        assert!(volume.read("d/large") == large);
        outcome.last["digest"].clone()
    };
    let hex = |digest: &Value| {
        let bytes = digest.as_array().expect("numbers").iter();
        let bytes = bytes.map(|byte| format!("{:02x}", byte.as_u64().expect("a byte")));
        format!("sha256:{}", bytes.collect::<String>())
    };
    assert_eq!(hex(&check(":v1")), pushed);
    check(&format!("@{pushed}"));
    // The layers of the same image in other formats.
    for form in [
        &["--dest-compress-format", "zstd"][..],
        &["--format", "v2s2"][..],
    ] {
        registry.push("v1", form);
        check(":v1");
    }
    let refused = registry.fill(&Volume::new(), ":v1", false, json!({}));
    assert!(refused.failure("ServerRefused").to_string().contains("401"));
    let missing = registry.fill(&Volume::new(), ":v2", true, json!({}));
    assert!(missing.failure("ServerRefused").to_string().contains("404"));
}

#[test]
fn a_disk_comes_from_the_image_of_its_platform() {
    let Some(program) = program() else { return };
    let registry = Registry::new(&program);
    let (here, there) = (noise(1_000_000), noise(700_000));
    registry.create("here", &[&[("disk/vm.img", &here)]]);
    registry.create("there", &[&[("disk/vm.qcow2", &qcow2(&there))]]);
    let all = registry.index(&[("here", "amd64"), ("there", "arm64")]);
    registry.push(all, &["--all"]);
    let version = format!(":{all}");
    for (architecture, content) in [("amd64", &here), ("arm64", &there)] {
        let volume = Volume::new();
        let oci =
            json!({"path": "disk", "platform": {"os": "linux", "architecture": architecture}});
        registry.fill(&volume, &version, true, oci).good();
        assert_eq!(volume.names(), ["disk.img"]);
        assert!(
            volume.read("disk.img").starts_with(content),
            "{architecture}"
        );
    }
    let oci = json!({"path": "disk", "platform": {"os": "linux", "architecture": "s390x"}});
    let refused = registry.fill(&Volume::new(), &version, true, oci);
    refused.failure("ImageRefused");
}
