//! The real driver, killed before and after each effect of a snapshot with a hook: quiesced
//! applications are released each time, and the same call succeeds afterwards.

use std::path::PathBuf;

use super::GOOD;
use super::hook_folder::HookFolder;
use slackwater_testkit::node::{GIB, definition};
use slackwater_testkit::{Client, Disk, Scratch, Server, block, eventually, mount};

/// More effects than a snapshot has. The sweep ends when no effect is left.
const MOST: usize = 200;

struct HookFixture {
    server: Server,
    gate: PathBuf,
    hook_folder: HookFolder,
    #[expect(dead_code, reason = "dropped before the fields that it depends on")]
    disk: Disk,
    /// The last field, because the others depend on it and are dropped first.
    scratch: Scratch,
}

impl HookFixture {
    fn new() -> HookFixture {
        let hook_folder = HookFolder::new();
        let hook = hook_folder.hook("db", GOOD);
        let config = hook_folder.path("slackwater.toml");
        let text = format!(
            "[[hook]]\nname = \"db\"\ncommand = {:?}\nvolume = \"*\"\nuser = \"nobody\"\n",
            hook.command
        );
        std::fs::write(&config, text).unwrap();
        let scratch = Scratch::new();
        let disk = Disk::new(&scratch, "pool", "xfs", 4 * GIB);
        let pool = definition(&disk.mount_point);
        let more = ["--config", config.to_str().unwrap()];
        let server = Server::spawn(&scratch, &[&pool], &more, &[]);
        server.wait_ready();
        HookFixture {
            server,
            gate: hook_folder.path("gate"),
            hook_folder,
            disk,
            scratch,
        }
    }

    /// Restarts the driver. Its effects are counted from now on.
    fn arm(&mut self, fault: &str) -> Client {
        let _ = std::fs::remove_file(&self.gate);
        let faults = format!("{fault},effect.all:after={}", self.gate.display());
        self.server.restart_with(&[("SLACKWATER_FAULT", &faults)]);
        std::fs::write(&self.gate, "").unwrap();
        self.server.client()
    }

    /// How often applications were quiesced, after waiting until they were released as often.
    fn quiesced(&self) -> usize {
        let count = |word: &str| {
            self.hook_folder
                .lines("log")
                .iter()
                .filter(|l| *l == word)
                .count()
        };
        eventually("all are released", || {
            // A session that has just been started quiesces after its driver's death, too.
            sessions_of(&self.hook_folder) == 0 && count("quiesced") == count("released")
        });
        count("quiesced")
    }
}

/// Running sessions of this folder.
fn sessions_of(hook_folder: &HookFolder) -> usize {
    let script = hook_folder.path("db.sh");
    let script = script.to_str().unwrap();
    let processes = std::fs::read_dir("/proc").unwrap().flatten();
    let runs = processes.filter(|process| {
        let words = std::fs::read(process.path().join("cmdline")).unwrap_or_default();
        let mut words = words.split(|byte| *byte == 0);
        words.next() == Some(b"/bin/sh") && words.next() == Some(script.as_bytes())
    });
    runs.count()
}

async fn sweep(fixture: &mut HookFixture, volume: &str, mode: &str) {
    let class = [
        ("consistency", "application"),
        ("freezeTimeout", "30s"),
        ("retries", "0"),
    ];
    let mut deaths_while_quiesced = 0;
    for n in 1..MOST {
        let client = fixture.arm(&format!("effect.{n}:{mode}"));
        let before = fixture.quiesced();
        let name = format!("{mode}-{n}");
        let first = client.snapshot(&name, volume, &class).await;
        if first.is_err() {
            eventually("the driver dies", || !fixture.server.is_alive());
        }
        let after = fixture.quiesced();
        if first.is_ok() {
            assert!(n > 5, "{mode}: a snapshot has only {n} effects");
            assert!(deaths_while_quiesced > 0, "{mode}: none while quiesced");
            return;
        }
        deaths_while_quiesced += usize::from(after > before);
        fixture.server.restart_with(&[]);
        let client = fixture.server.client();
        let snapshot = client.snapshot(&name, volume, &class).await;
        let snapshot = snapshot.unwrap_or_else(|status| panic!("{name}: {status}"));
        assert!(snapshot.ready_to_use, "{name}");
        fixture.quiesced();
        client.delete_snapshot(&snapshot.snapshot_id).await.unwrap();
    }
    panic!("{mode}: a snapshot has too many effects");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_driver_killed_at_any_effect_with_a_raw_device_releases() {
    let mut fixture = HookFixture::new();
    let client = fixture.server.client();
    let volume = client.create("data", GIB / 2, block(), &[]).await.unwrap();
    let kubelet = fixture.scratch.dir("kubelet");
    let (staging, target) = (kubelet.join("staging"), kubelet.join("device"));
    std::fs::create_dir(&staging).unwrap();
    client.stage(&volume, &staging, block()).await.unwrap();
    let published = client.publish(&volume, &staging, &target, block(), false);
    published.await.unwrap();
    for mode in ["kill", "kill-after"] {
        sweep(&mut fixture, &volume, mode).await;
    }
    fixture.server.restart_with(&[]);
    let client = fixture.server.client();
    client.unpublish(&volume, &target).await.unwrap();
    client.unstage(&volume, &staging).await.unwrap();
}

/// With the guard: file systems that a killed driver leaves frozen are thawed, or the repeat could
/// not freeze.
#[tokio::test(flavor = "multi_thread")]
async fn a_driver_killed_at_any_effect_with_a_file_system_releases() {
    let mut fixture = HookFixture::new();
    let client = fixture.server.client();
    let volume = client
        .create("data", GIB / 2, mount("ext4"), &[])
        .await
        .unwrap();
    let staging = fixture.scratch.dir("kubelet").join("staging");
    std::fs::create_dir(&staging).unwrap();
    client
        .stage(&volume, &staging, mount("ext4"))
        .await
        .unwrap();
    for mode in ["kill", "kill-after"] {
        sweep(&mut fixture, &volume, mode).await;
        // The file system is not frozen, so this returns.
        std::fs::write(staging.join(mode), "written").unwrap();
    }
    fixture.server.restart_with(&[]);
    let client = fixture.server.client();
    client.unstage(&volume, &staging).await.unwrap();
}
