//! A file system that was not unmounted cleanly is checked before it is mounted.

use std::path::Path;

use tonic::Code;

use super::{Node, check_pattern, refused, write_pattern};
use slackwater_testkit::{mount, run, slackwater, succeeds};

/// Changes the ext4 on an image that is not attached.
fn debugfs(image: &Path, commands: &[&str]) {
    for command in commands {
        run("debugfs", &["-w", "-R", command, image.to_str().unwrap()]);
    }
}

/// Whether all of an ext4 is without errors.
fn is_sound(image: &Path) -> bool {
    succeeds("e2fsck", &["-f", "-n", image.to_str().unwrap()])
}

/// A volume with data, unstaged.
async fn used(node: &Node, name: &str, staging: &Path) -> String {
    let id = node.staged(name, staging, "ext4").await;
    write_pattern(&staging.join("data"), 5, 1 << 20);
    write_pattern(&staging.join("other"), 6, 1 << 20);
    node.client.unstage(&id, staging).await.unwrap();
    node.assert_no_device(&id);
    id
}

#[tokio::test]
async fn an_ext4_that_was_not_unmounted_cleanly_is_repaired_before_it_is_mounted() {
    let node = Node::new();
    for (name, state) in [("invalid", "0"), ("error", "3")] {
        let staging = node.staging(name);
        let id = used(&node, name, &staging).await;
        let image = node.image(&id);
        // A file with a wrong link count, which a mount does not notice by itself.
        let state = format!("ssv state {state}");
        debugfs(&image, &["sif other links_count 7", &state]);
        assert!(!is_sound(&image));
        node.stage(&id, &staging, mount("ext4")).await;
        check_pattern(&staging.join("data"), 5, 1 << 20);
        check_pattern(&staging.join("other"), 6, 1 << 20);
        node.client.unstage(&id, &staging).await.unwrap();
        node.assert_no_device(&id);
        assert!(is_sound(&image), "{name}");
        node.client.delete(&id).await.unwrap();
    }
    node.assert_nothing_left();
}

#[tokio::test]
async fn an_ext4_that_needs_manual_repair_is_not_mounted() {
    let node = Node::new();
    let staging = node.staging("broken");
    let id = used(&node, "broken", &staging).await;
    let image = node.image(&id);
    debugfs(&image, &["clri <2>", "ssv state 3"]);
    for _ in 0..2 {
        let message = refused(
            node.client.stage(&id, &staging, mount("ext4")).await,
            Code::FailedPrecondition,
        );
        assert!(message.contains(&id), "{message}");
        assert!(message.contains("e2fsck -p"), "{message}");
        node.assert_no_device(&id);
    }
    // The solution that the error names.
    assert!(message_names_the_solution(&node, &id).await);
    assert_eq!(check(&node, &id, &["--repair"]).0, Some(0));
    assert!(is_sound(&image));
    node.stage(&id, &staging, mount("ext4")).await;
    node.unstage_and_delete(&id, &staging).await;
    node.assert_nothing_left();
}

async fn message_names_the_solution(node: &Node, id: &str) -> bool {
    let staging = node.staging("broken");
    let answer = node.client.stage(id, &staging, mount("ext4")).await;
    let message = refused(answer, Code::FailedPrecondition);
    message.contains(&format!("slackwater volumes check {id} --repair"))
}

/// `slackwater volumes check` while the driver runs. Returns the exit code and the output.
fn check(node: &Node, id: &str, more: &[&str]) -> (Option<i32>, String) {
    let endpoint = format!("unix://{}", node.server.socket().display());
    let words = ["volumes", "check", id, "--endpoint", &endpoint];
    run_command(slackwater().args(words).args(more))
}

fn run_command(command: &mut std::process::Command) -> (Option<i32>, String) {
    let output = command.output().unwrap();
    let text = [output.stdout, output.stderr].concat();
    let text = String::from_utf8_lossy(&text).into_owned();
    (output.status.code(), text)
}

#[tokio::test]
async fn the_running_driver_checks_an_idle_volume() {
    let node = Node::new();
    for fs in ["ext4", "xfs", "btrfs"] {
        let staging = node.staging(fs);
        let id = node.staged(fs, &staging, fs).await;
        for more in [&[][..], &["--repair"]] {
            let (code, text) = check(&node, &id, more);
            assert_eq!(code, Some(1), "{text}");
            assert!(text.contains("it is mounted at"), "{text}");
        }
        node.client.unstage(&id, &staging).await.unwrap();
        let (code, text) = check(&node, &id, &[]);
        assert_eq!(code, Some(0), "{text}");
        assert!(text.contains("has no errors"), "{text}");
        node.assert_no_device(&id);
        node.client.delete(&id).await.unwrap();
    }
    let (code, text) = check(&node, "nothing", &[]);
    assert_eq!(code, Some(1), "{text}");
    node.assert_nothing_left();
}

#[tokio::test]
async fn a_check_without_repair_changes_nothing() {
    let node = Node::new();
    let staging = node.staging("look");
    let id = used(&node, "look", &staging).await;
    let image = node.image(&id);
    debugfs(&image, &["sif other links_count 7"]);
    let (code, text) = check(&node, &id, &[]);
    assert_eq!(code, Some(1), "{text}");
    assert!(text.contains("has errors"), "{text}");
    assert!(!is_sound(&image));
    let (code, text) = check(&node, &id, &["--repair"]);
    assert_eq!(code, Some(0), "{text}");
    assert!(is_sound(&image));
    node.stage(&id, &staging, mount("ext4")).await;
    check_pattern(&staging.join("other"), 6, 1 << 20);
    node.unstage_and_delete(&id, &staging).await;
    node.assert_nothing_left();
}

#[tokio::test]
async fn without_a_driver_the_command_locks_the_pool() {
    let mut node = Node::new();
    let staging = node.staging("alone");
    let id = used(&node, "alone", &staging).await;
    let pool = format!("default=file:{}", node.disk.mount_point.display());
    let (record, state) = (node.scratch.join("node.json"), node.scratch.join("state"));
    let words = ["volumes", "check", &id, "--pool", &pool, "--node-record"];
    let mut command = slackwater();
    command
        .args(words)
        .arg(&record)
        .arg("--state-dir")
        .arg(&state);
    let (code, text) = run_command(&mut command);
    assert_eq!(code, Some(1), "{text}");
    assert!(text.contains("process"), "{text}");
    node.server.kill();
    let (code, text) = run_command(&mut command);
    assert_eq!(code, Some(0), "{text}");
    node.server.restart();
    node.client = node.server.client();
    node.client.delete(&id).await.unwrap();
    node.assert_nothing_left();
}
