//! Who can open a block volume: what a container runtime gives to the user of a pod, and root without
//! capabilities. The node of the device is one of the test, with an owner of its own.

use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown};
use std::path::PathBuf;
use std::process::Command;

use serde_json::json;
use slackwater_populate::config::Config;
use slackwater_populate::report::Report;
use slackwater_populate::run::Attempt;

use crate::Device;
use crate::server::serves;
use crate::support::{Volume, noise, policy};

/// The configuration of the process.
const CONFIG: &str = "SLACKWATER_POPULATE_USERS";
/// A user that is not root.
const USER: u32 = 65532;

/// Not a test by itself: another one starts it, as root without capabilities.
#[test]
fn an_attempt_without_capabilities() {
    let Ok(text) = std::env::var(CONFIG) else {
        return;
    };
    let config = Config::parse(&text).expect("it is valid");
    let report = Report::new(std::io::sink());
    let filled = Attempt::prepare(&config, policy(), &report).and_then(|attempt| attempt.run());
    match filled {
        Ok(()) => println!("it is filled"),
        Err(failure) => println!("{} {}: {failure}", failure.exit_code(), failure.reason),
    }
}

/// A node of the device with this owner, which only the owner may use.
fn node(device: &Device, volume: &Volume, owner: u32) -> PathBuf {
    let path = volume.folder.path().join("node");
    let number = fs::metadata(&device.path).expect("metadata").rdev();
    let number = [nix::sys::stat::major(number), nix::sys::stat::minor(number)];
    let made = Command::new("mknod")
        .arg(&path)
        .arg("b")
        .args(number.map(|part| part.to_string()))
        .status();
    assert!(made.expect("mknod starts").success());
    chown(&path, Some(owner), Some(owner)).expect("an owner");
    fs::set_permissions(&path, fs::Permissions::from_mode(0o600)).expect("a mode");
    path
}

fn fill_as(device: &Device, owner: u32, content: &[u8]) -> String {
    let volume = Volume::new();
    let server = serves(content.to_vec());
    let mut config = volume.config(&server.url("/x"), json!({}));
    config["target"] = json!({"block": node(device, &volume, owner)});
    let output = Command::new("setpriv")
        .args(["--bounding-set=-all", "--inh-caps=-all", "--no-new-privs"])
        .arg(std::env::current_exe().expect("this program"))
        .args([
            "--exact",
            "users::an_attempt_without_capabilities",
            "--nocapture",
        ])
        .env(CONFIG, config.to_string())
        .output()
        .expect("setpriv starts");
    assert!(output.status.success(), "{output:?}");
    String::from_utf8(output.stdout).expect("text")
}

#[test]
fn a_block_volume_that_the_user_may_not_open_is_refused_with_both_ways_out() {
    let device = Device::new(&vec![7; 1 << 20]);
    let content = noise(1000);
    let printed = fill_as(&device, USER, &content);
    assert!(printed.contains("10 DeviceRefused: open "), "{printed}");
    for way in [
        "device_ownership_from_security_context of the container runtime",
        "root without capabilities in a namespace that allows the baseline profile",
    ] {
        assert!(printed.contains(way), "{printed}");
    }
    assert_eq!(device.content(), vec![7; 1 << 20]);
    // Its own device needs no capability.
    let printed = fill_as(&device, 0, &content);
    assert!(printed.contains("it is filled"), "{printed}");
    assert!(device.content().starts_with(&content));
}
