//! Confinement, in a process of its own: it cannot be undone.

use std::fs;
use std::process::Command;

use serde_json::json;
use slackwater_populate::config::Config;
use slackwater_populate::confine::{Confinement, confine};
use slackwater_populate::report::Report;
use slackwater_populate::run::Attempt;

use crate::server::serves;
use crate::support::{Volume, noise, policy, qcow2, tar};

/// The configuration of the process that is confined.
const CONFIG: &str = "SLACKWATER_POPULATE_CONFINED";

/// Not a test by itself: another one starts it, as a process.
#[test]
fn an_attempt_that_is_confined() {
    let Ok(text) = std::env::var(CONFIG) else {
        return;
    };
    let config = Config::parse(&text).expect("it is valid");
    let report = Report::new(std::io::sink());
    let attempt = Attempt::prepare(&config, policy(), &report).expect("it is prepared");
    let outside = config_folder(&config).join("../outside");
    fs::write(outside.join("before"), "x").expect("not confined yet");
    confine(&attempt.folders(), Confinement::Required).expect("it is confined");
    for path in ["/etc/passwd", "/proc/self/environ"] {
        assert!(fs::read(path).is_err(), "{path}");
    }
    assert!(fs::read(outside.join("before")).is_err());
    assert!(fs::write(outside.join("after"), "x").is_err());
    assert!(fs::read_dir("/").is_err());
    attempt.run().expect("the target is filled");
}

fn config_folder(config: &Config) -> std::path::PathBuf {
    config
        .scratch
        .clone()
        .expect("a folder")
        .join("..")
        .join("root")
}

#[test]
fn a_confined_process_reaches_its_target_and_names() {
    let folder = tempfile::TempDir::with_prefix("slackwater-").expect("a folder");
    fs::create_dir_all(folder.path().join("a/b")).expect("a folder");
    fs::write(folder.path().join("a/b/f"), noise(1000)).expect("a file");
    fs::hard_link(folder.path().join("a/b/f"), folder.path().join("hard")).expect("a link");
    std::os::unix::fs::symlink("a", folder.path().join("soft")).expect("a link");
    let volume = attempt(tar(folder.path(), &[]));
    assert_eq!(volume.names(), ["a", "hard", "soft"]);
    assert_eq!(volume.read("hard"), noise(1000));
    // With a temporary file.
    let volume = attempt(qcow2(&noise(1000)));
    assert!(volume.read("disk.img").starts_with(&noise(1000)));
}

fn attempt(content: Vec<u8>) -> Volume {
    let server = serves(content);
    let volume = Volume::new();
    for name in ["outside", "scratch"] {
        fs::create_dir(volume.folder.path().join(name)).expect("a folder");
    }
    // A name, which has to be resolved by what is left.
    let url = format!("http://localhost:{}/x", server.address.port());
    let config = volume.config(
        &url,
        json!({"scratch": volume.folder.path().join("scratch")}),
    );
    let output = Command::new(std::env::current_exe().expect("this program"))
        .args([
            "--exact",
            "confined::an_attempt_that_is_confined",
            "--nocapture",
        ])
        .env(CONFIG, config.to_string())
        .output()
        .expect("it starts");
    assert!(output.status.success(), "{output:?}");
    volume
}
