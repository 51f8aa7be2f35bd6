//! The real driver, killed before and after each effect of a snapshot with a hook: whoever was
//! quiesced is released each time, and the same call succeeds afterwards.

use std::path::PathBuf;

use super::GOOD;
use super::ground::Ground;
use super::support::node::{GIB, definition};
use super::support::{Client, Disk, Scratch, Server, block, eventually, mount};

/// More effects than a snapshot has: the sweep ends where none is left.
const MOST: usize = 200;

struct World {
    server: Server,
    gate: PathBuf,
    ground: Ground,
    #[expect(dead_code, reason = "goes before what it stands on")]
    disk: Disk,
    /// Last: what the others stand on goes last.
    scratch: Scratch,
}

impl World {
    fn new() -> World {
        let ground = Ground::new();
        let hook = ground.hook("db", GOOD);
        let config = ground.path("slackwater.toml");
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
        World {
            server,
            gate: ground.path("gate"),
            ground,
            disk,
            scratch,
        }
    }

    /// Restarts the driver; its effects are counted from now on.
    fn arm(&mut self, plan: &str) -> Client {
        let _ = std::fs::remove_file(&self.gate);
        let gate = self.gate.to_str().unwrap().to_string();
        let environment = [
            ("SLACKWATER_FAULT_AFTER", &*gate),
            ("SLACKWATER_FAULT", plan),
        ];
        self.server.restart_with(&environment);
        std::fs::write(&self.gate, "").unwrap();
        self.server.client()
    }

    /// How often it has quiesced; and as often it has released, at last.
    fn quiesced(&self) -> usize {
        let count = |word: &str| {
            self.ground
                .lines("log")
                .iter()
                .filter(|l| *l == word)
                .count()
        };
        eventually("all are released", || {
            // A session that had just been started quiesces after its driver's death, too.
            sessions_of(&self.ground) == 0 && count("quiesced") == count("released")
        });
        count("quiesced")
    }
}

/// Sessions of this folder that run.
fn sessions_of(ground: &Ground) -> usize {
    let script = ground.path("db.sh");
    let script = script.to_str().unwrap();
    let processes = std::fs::read_dir("/proc").unwrap().flatten();
    let runs = processes.filter(|process| {
        let words = std::fs::read(process.path().join("cmdline")).unwrap_or_default();
        let mut words = words.split(|byte| *byte == 0);
        words.next() == Some(b"/bin/sh") && words.next() == Some(script.as_bytes())
    });
    runs.count()
}

async fn sweep(world: &mut World, volume: &str, mode: &str) {
    let class = [
        ("consistency", "application"),
        ("freezeTimeout", "30s"),
        ("retries", "0"),
    ];
    let mut deaths_while_quiesced = 0;
    for n in 1..MOST {
        let client = world.arm(&format!("{n}:{mode}"));
        let before = world.quiesced();
        let name = format!("{mode}-{n}");
        let first = client.snapshot(&name, volume, &class).await;
        if first.is_err() {
            eventually("the driver dies", || !world.server.is_alive());
        }
        let after = world.quiesced();
        if first.is_ok() {
            assert!(n > 5, "{mode}: a snapshot has only {n} effects");
            assert!(deaths_while_quiesced > 0, "{mode}: none while quiesced");
            return;
        }
        deaths_while_quiesced += usize::from(after > before);
        world.server.restart_with(&[]);
        let client = world.server.client();
        let snapshot = client.snapshot(&name, volume, &class).await;
        let snapshot = snapshot.unwrap_or_else(|status| panic!("{name}: {status}"));
        assert!(snapshot.ready_to_use, "{name}");
        world.quiesced();
        client.delete_snapshot(&snapshot.snapshot_id).await.unwrap();
    }
    panic!("{mode}: a snapshot has no end");
}

#[tokio::test(flavor = "multi_thread")]
async fn killed_at_any_effect_with_a_raw_device_it_releases() {
    let mut world = World::new();
    let client = world.server.client();
    let volume = client.create("data", GIB / 2, block(), &[]).await.unwrap();
    let kubelet = world.scratch.dir("kubelet");
    let (staging, target) = (kubelet.join("staging"), kubelet.join("device"));
    std::fs::create_dir(&staging).unwrap();
    client.stage(&volume, &staging, block()).await.unwrap();
    let published = client.publish(&volume, &staging, &target, block(), false);
    published.await.unwrap();
    for mode in ["kill-before", "kill-after"] {
        sweep(&mut world, &volume, mode).await;
    }
    world.server.restart_with(&[]);
    let client = world.server.client();
    client.unpublish(&volume, &target).await.unwrap();
    client.unstage(&volume, &staging).await.unwrap();
}

/// With the guard: what a death leaves frozen is thawed, or the repeat could not freeze.
#[tokio::test(flavor = "multi_thread")]
async fn killed_at_any_effect_with_a_file_system_it_releases() {
    let mut world = World::new();
    let client = world.server.client();
    let volume = client
        .create("data", GIB / 2, mount("ext4"), &[])
        .await
        .unwrap();
    let staging = world.scratch.dir("kubelet").join("staging");
    std::fs::create_dir(&staging).unwrap();
    client
        .stage(&volume, &staging, mount("ext4"))
        .await
        .unwrap();
    for mode in ["kill-before", "kill-after"] {
        sweep(&mut world, &volume, mode).await;
        // Not frozen, so it returns.
        std::fs::write(staging.join(mode), "written").unwrap();
    }
    world.server.restart_with(&[]);
    let client = world.server.client();
    client.unstage(&volume, &staging).await.unwrap();
}
