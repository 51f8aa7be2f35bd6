//! The driver on two thin pools of LVM, killed before and after each kind of effect that it has there,
//! and in `make soak` before and after each single effect.

use std::collections::BTreeSet;
use std::fs::{self, OpenOptions};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::Instant;

use nix::sys::signal::Signal;
use slackwater::csi::VolumeGroupSnapshot;
use slackwater::fault;
use slackwater_testkit::guest::in_guest;
use slackwater_testkit::snapshots::{from_snapshot, members};
use slackwater_testkit::{
    Client, Scratch, Sweep, archive_command, block, eventually, left_out, mount, run, state_of,
};

use super::killed::{Killed, wait_for_reader};
use crate::guest_guard::fixture::{guards, signal};
use crate::guest_lvm::{
    MAPPED, OTHER, Volume, create_other_pool, create_pool, end_both_pools, read_at, runtime,
    write_at,
};
use crate::guest_pool::slackwater;

const MIB: u64 = 1 << 20;
const DISKS: [&str; 1] = ["pool:3G"];
const POOLS: [&str; 2] = [
    "default=lvm:slackwater-vg/thin,init,rawBlock=unfiltered,trim=1h",
    OTHER,
];
/// The effects that only pools of files have.
#[rustfmt::skip]
const OF_FILES: &[&str] = &[
    "allocate", "write_in_place", "make_like", "shorten", "zero", "hint_extents", "trim",
    "clone_whole", "clone_ahead", "clone_rest", "unshare", "attach_loop", "detach_loop",
    "detach_dead_loop", "resize_loop", "set_direct_io", "renew_loop", "load_linear",
];
const KILLS: [&str; 2] = ["kill", "kill-after"];
const HOOK: &str = r#"
[[hook]]
name = "hook"
command = ["/bin/sh", "-c", "echo READY; cat >/dev/null"]
pvc = "t/files"
"#;

/// The name of a volume, its file system if it has one, its size in MiB, and a parameter.
type Plan = (
    &'static str,
    &'static str,
    u64,
    (&'static str, &'static str),
);
const VOLUMES: [Plan; 4] = [
    ("raw", "", 32, ("wipe", "none")),
    ("files", "ext4", 64, ("wipe", "discard")),
    ("tree", "btrfs", 128, ("wipe", "none")),
    ("thick", "", 32, ("allocation", "thick")),
];

/// A life of volumes, with a driver that is killed in it.
struct Life<'a> {
    driver: &'a mut Killed,
    scratch: &'a Scratch,
    /// With what happens only after other programs or deaths at certain moments.
    with_rare: bool,
    volumes: Vec<Volume>,
    copies: Vec<Volume>,
}

impl Life<'_> {
    fn new<'a>(driver: &'a mut Killed, scratch: &'a Scratch, with_rare: bool) -> Life<'a> {
        Life {
            driver,
            scratch,
            with_rare,
            volumes: Vec::new(),
            copies: Vec::new(),
        }
    }

    async fn live(&mut self) {
        let begun = Instant::now();
        let phase =
            |name: &str, left: usize| println!("{name}: {:?}, {left} left", begun.elapsed());
        self.create().await;
        phase("created", self.driver.left.len());
        let group = self.cut("cut").await;
        phase("cut", self.driver.left.len());
        if self.with_rare {
            self.trim().await;
            phase("trimmed", self.driver.left.len());
            self.leave_suspended().await;
            phase("left suspended", self.driver.left.len());
        }
        self.grow().await;
        phase("grown", self.driver.left.len());
        self.restore(&members(&group)).await;
        phase("restored", self.driver.left.len());
        self.carry(&members(&group)[0]).await;
        phase("archives", self.driver.left.len());
        self.end(&group).await;
        phase("end", self.driver.left.len());
    }

    /// Stages and publishes a volume, until that succeeds.
    async fn up(driver: &mut Killed, volume: &Volume) {
        let up = async |client: Client| volume.try_up(&client).await;
        driver.done("up", up).await;
    }

    async fn down(driver: &mut Killed, volume: &Volume) {
        let down = async |client: Client| volume.try_down(&client).await;
        driver.done("down", down).await;
    }

    async fn create(&mut self) {
        for (name, fs, size, class) in VOLUMES {
            let how = if fs.is_empty() { block() } else { mount(fs) };
            let claim = [
                ("csi.storage.k8s.io/pvc/namespace", "t"),
                ("csi.storage.k8s.io/pvc/name", name),
                class,
            ];
            let create = async |client: Client| {
                let created = client.create(name, size * MIB, how.clone(), &claim);
                created.await
            };
            let id = self.driver.done(name, create).await;
            let volume = Volume::of(self.scratch, name, id, how.clone());
            Life::up(self.driver, &volume).await;
            write(&volume, 1);
            self.volumes.push(volume);
        }
    }

    /// The volumes of a pool that was never trimmed are trimmed at once.
    async fn trim(&mut self) {
        let notes = || {
            let pools = fs::read_dir("/run/slackwater/pools").unwrap();
            let notes = pools.map(|pool| pool.unwrap().path().join("trash/trimmed"));
            notes.filter(|note| note.exists()).collect::<Vec<_>>()
        };
        let had = notes();
        had.iter().for_each(|note| fs::remove_file(note).unwrap());
        self.driver.restart().await;
        while notes().len() < had.len() {
            self.driver.was_killed().await;
        }
    }

    /// A guard that was killed after it has suspended a device, together with the driver.
    async fn leave_suspended(&mut self) {
        let ids: Vec<String> = self.volumes.iter().map(|it| it.id.clone()).collect();
        let driver = &mut *self.driver;
        while !driver.serves("guard.suspend:stop-after").await {
            driver.note_death();
        }
        let client = driver.server.client();
        let cut = tokio::spawn(async move { client.group("left", &ids, &[]).await });
        let is_stopped =
            |pid: &u32| state_of(&Path::new("/proc").join(format!("{pid}/stat"))) == Some('T');
        while !guards().iter().any(is_stopped) {
            assert!(!cut.is_finished(), "{}", driver.server.log());
            tokio::time::sleep(std::time::Duration::from_millis(5)).await;
        }
        driver.server.kill();
        guards()
            .into_iter()
            .for_each(|pid| signal(pid, Signal::SIGKILL));
        eventually("the guard's end", || guards().is_empty());
        driver.restart().await;
        cut.abort();
    }

    async fn cut(&mut self, name: &str) -> VolumeGroupSnapshot {
        let ids: Vec<String> = self.volumes.iter().map(|it| it.id.clone()).collect();
        let class = [("consistency", "application")];
        let cut = async |client: Client| client.group(name, &ids, &class).await;
        self.driver.done(name, cut).await
    }

    /// Volumes grow while they are staged, and an ext4 while it is not.
    async fn grow(&mut self) {
        let volumes = &self.volumes;
        let [raw, files, tree, thick] = &volumes[..] else {
            unreachable!()
        };
        let driver = &mut *self.driver;
        write(raw, 2);
        Life::down(driver, files).await;
        for (volume, size) in [(files, 128), (tree, 256), (thick, 64)] {
            let grow = async |client: Client| client.expand(&volume.id, size * MIB).await;
            driver.done("grow", grow).await;
        }
        Life::up(driver, files).await;
        if self.with_rare {
            // As a driver leaves it that is killed at a resume.
            driver.server.kill();
            load_again(thick);
            driver.restart().await;
        }
        for volume in [thick, tree] {
            let grow = async |client: Client| client.expand_node(&volume.id, &volume.target).await;
            driver.done("grow on the node", grow).await;
        }
        for (volume, byte) in volumes.iter().zip([2, 1, 1, 1]) {
            assert_eq!(read(volume), byte);
        }
        write_at(&thick.target, 48 * MIB, 3);
        let total = async |client: Client| client.stats(&files.id, &files.target).await;
        let (total, _) = driver.done("stats", total).await;
        assert!(total > 100 * MIB, "{total}");
    }

    /// Creates a volume from a snapshot, and reads it.
    async fn restore_one(&mut self, name: &str, n: usize, snapshot: &str, class: &[(&str, &str)]) {
        let how = self.volumes[n].how.clone();
        let size = VOLUMES[n].2 * MIB;
        let create = async |client: Client| {
            let source = from_snapshot(snapshot);
            let made = client.create_from(name, size, how.clone(), source, class);
            made.await
        };
        let id = self.driver.done(name, create).await.volume_id;
        let copy = Volume::of(self.scratch, name, id, how.clone());
        Life::up(self.driver, &copy).await;
        assert_eq!(read(&copy), 1, "{name}");
        self.copies.push(copy);
    }

    async fn restore(&mut self, snapshots: &[String]) {
        for (n, snapshot) in snapshots.iter().enumerate() {
            let name = format!("copy-{n}");
            self.restore_one(&name, n, snapshot, &[VOLUMES[n].3]).await;
        }
        if self.with_rare {
            let more = with_hook(self.scratch);
            self.driver.serve(self.scratch, &POOLS, &more).await;
        }
        let other = [("pool", "other")];
        self.restore_one("elsewhere", 0, &snapshots[0], &other)
            .await;
    }

    /// A snapshot is exported and imported, and restored while it is exported.
    async fn carry(&mut self, snapshot: &str) {
        let driver = &mut *self.driver;
        let archive = driver.archive(&["export", snapshot], &[]).await;
        let import = ["import", "--name", "imported", "--json"];
        let printed = driver.archive(&import, &archive).await;
        let printed: serde_json::Value = serde_json::from_slice(&printed).unwrap();
        let id = printed["volumes"][0]["id"].as_str().unwrap().to_string();
        let imported = Volume::of(self.scratch, "imported", id, block());
        Life::up(driver, &imported).await;
        assert_eq!(read(&imported), 1);
        self.copies.push(imported);

        let socket = driver.server.socket().to_path_buf();
        let beside = async |client: Client| {
            let _waits = wait_for_reader(archive_command(&socket, &["export", snapshot]));
            let source = from_snapshot(snapshot);
            let made = client.create_from("beside", 32 * MIB, block(), source, &[]);
            made.await
        };
        let id = driver.done("beside", beside).await.volume_id;
        let beside = Volume::of(self.scratch, "beside", id, block());
        Life::up(driver, &beside).await;
        assert_eq!(read(&beside), 1);
        self.copies.push(beside);
    }

    /// Unmount, mount and cut work again; then everything is deleted.
    async fn end(&mut self, group: &VolumeGroupSnapshot) {
        for volume in &self.volumes {
            Life::down(self.driver, volume).await;
            Life::up(self.driver, volume).await;
        }
        let again = self.cut("again").await;
        let driver = &mut *self.driver;
        for group in [group, &again] {
            let snapshots = members(group);
            let delete = async |client: Client| {
                let id = &group.group_snapshot_id;
                client.delete_group(id, &snapshots).await
            };
            driver.done("delete the group", delete).await;
        }
        for volume in self.volumes.iter().chain(&self.copies) {
            Life::down(driver, volume).await;
            let delete = async |client: Client| client.delete(&volume.id).await;
            driver.done("delete", delete).await;
        }
        let listed = driver.done("list", async |client: Client| client.list().await);
        assert_eq!(listed.await, Vec::<String>::new());
        let listed = slackwater(&["volumes"], self.scratch);
        assert!(!listed.contains("thin device"), "{listed}");
    }
}

/// Loads the table of a volume's device into it, and does not switch to it.
fn load_again(volume: &Volume) {
    let devices = run("dmsetup", &["ls", "--target", "thin"]);
    let uuid = volume.id.split_once('.').unwrap().1;
    let mut names = devices.lines().filter_map(|line| line.split('\t').next());
    let name = names.find(|name| name.ends_with(uuid)).unwrap();
    let table = run("dmsetup", &["table", name]);
    run("dmsetup", &["load", name, "--table", table.trim()]);
}

/// Writes a byte to most of a device, or to a file.
fn write(volume: &Volume, byte: u8) {
    if volume.target.is_dir() {
        let file = volume.target.join("data");
        fs::write(&file, vec![byte; MIB as usize]).unwrap();
        return fs::File::open(file).unwrap().sync_all().unwrap();
    }
    let device = OpenOptions::new().write(true).open(&volume.target).unwrap();
    for at in 0..24 {
        device
            .write_all_at(&[byte; MIB as usize], at * MIB)
            .unwrap();
    }
    device.sync_all().unwrap();
}

fn read(volume: &Volume) -> u8 {
    match volume.target.is_dir() {
        true => read_at(&volume.target.join("data"), MIB - 4096),
        false => read_at(&volume.target, 24 * MIB - 4096),
    }
}

fn create_pools() {
    create_pool("2G");
    create_other_pool();
}

/// The arguments of a driver with a hook.
fn with_hook(scratch: &Scratch) -> [String; 2] {
    let file = scratch.join("slackwater.toml");
    fs::write(&file, HOOK).unwrap();
    ["--config".into(), file.to_str().unwrap().into()]
}

#[test]
fn a_driver_that_is_killed_at_each_kind_of_effect_completes_every_call_and_leaves_nothing() {
    let test = "guest_kill::effects::a_driver_that_is_killed_at_each_kind_of_effect_completes_every_call_and_leaves_nothing";
    in_guest(test, &DISKS, || {
        create_pools();
        let scratch = Scratch::new();
        let kinds = fault::effects().filter(|name| !OF_FILES.contains(name));
        let faults = kinds.flat_map(|name| KILLS.map(|how| format!("effect.{name}:{how}")));
        let faults: BTreeSet<String> = faults.collect();
        let driver = runtime().block_on(async {
            let more = with_hook(&scratch);
            let mut driver = Killed::start(&scratch, &POOLS[..1], &more, faults).await;
            // Someone who has read the metadata was killed.
            driver.server.kill();
            run(
                "dmsetup",
                &["message", MAPPED, "0", "reserve_metadata_snap"],
            );
            driver.restart().await;
            Life::new(&mut driver, &scratch, true).live().await;
            driver
        });
        assert_eq!(driver.left, BTreeSet::new(), "they do not occur");
        let of_files = driver
            .seen
            .iter()
            .filter(|name| OF_FILES.contains(&name.as_str()));
        assert_eq!(of_files.collect::<Vec<_>>(), Vec::<&String>::new());
        end_both_pools(driver.server);
    });
}

/// Kills the driver at each effect of a life, one life after the other.
fn sweep(test: &str, how: &str) {
    if std::env::var_os("SLACKWATER_SOAK").is_none() {
        return left_out(&format!("{test} (make soak)"));
    }
    in_guest(test, &DISKS, || {
        create_pools();
        let scratch = Scratch::new();
        let driver = runtime().block_on(async {
            let more = with_hook(&scratch);
            let mut driver = Killed::start(&scratch, &POOLS, &more, BTreeSet::new()).await;
            driver.restart().await;
            driver.most = 0;
            Life::new(&mut driver, &scratch, false).live().await;
            driver.note_effects();
            let last = driver.most;
            assert!(last > 200, "{last}");
            let part = Sweep::requested();
            for number in (1..=last).filter(|number| number % part.of == part.n) {
                driver.again(&format!("effect.{number}:{how}")).await;
                Life::new(&mut driver, &scratch, false).live().await;
                println!("{number} of {last}");
                // The number of effects varies slightly.
                assert!(driver.left.is_empty() || number + 20 > last, "{number}");
                driver.left.clear();
            }
            driver
        });
        end_both_pools(driver.server);
    });
}

#[test]
fn a_driver_that_is_killed_before_any_effect_completes_every_call_and_leaves_nothing() {
    let test = "guest_kill::effects::a_driver_that_is_killed_before_any_effect_completes_every_call_and_leaves_nothing";
    sweep(test, "kill");
}

#[test]
fn a_driver_that_is_killed_after_any_effect_completes_every_call_and_leaves_nothing() {
    let test = "guest_kill::effects::a_driver_that_is_killed_after_any_effect_completes_every_call_and_leaves_nothing";
    sweep(test, "kill-after");
}
