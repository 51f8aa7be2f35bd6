//! Pools that are really full: a request that does not fit is refused before any application is
//! disturbed, a failed one leaves nothing, and reserved space accepts every write.

use std::fs::OpenOptions;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use nix::fcntl::{FallocateFlags, fallocate};
use nix::sys::statvfs::statvfs;
use tonic::Code;

use super::held::{Probe, Release, arm, await_stop, end_of, go_on};
use super::{GIB, MIB, Node, pattern, refused, rounds};
use slackwater_testkit::snapshots::{from_snapshot, from_volume};
use slackwater_testkit::{WAIT_TIMEOUT, eventually, mount, run};

/// A foreign file that takes all the free space of a pool.
struct Full {
    path: PathBuf,
    bytes: u64,
}

impl Full {
    fn fill(node: &Node) -> Full {
        Full::by(node, 1 << 30, Duration::ZERO)
    }

    /// Fills slowly, as writers do.
    fn fill_slowly(node: &Node) -> Full {
        Full::by(node, 1 << 20, Duration::from_millis(1))
    }

    /// Reserves the space without writing, also to the last block.
    fn by(node: &Node, mut step: i64, pause: Duration) -> Full {
        let path = node.disk.mount_point.join("stranger");
        let file = std::fs::File::create(&path).unwrap();
        let mut at = 0;
        while step >= 4096 {
            match fallocate(&file, FallocateFlags::empty(), at, step) {
                Ok(()) => at += step,
                Err(_) => step /= 2,
            }
            std::thread::sleep(pause);
        }
        let bytes = at as u64;
        Full { path, bytes }
    }
}

impl Drop for Full {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.path);
        // xfs frees the blocks in the background. Others may have taken a part of them.
        let is_full = || {
            let found = self.path.parent().map(statvfs);
            let found = found.and_then(std::result::Result::ok);
            found.is_some_and(|found| {
                found.blocks_available() * found.fragment_size() < self.bytes / 2
            })
        };
        let begun = Instant::now();
        while is_full() && begun.elapsed() < WAIT_TIMEOUT {
            std::thread::sleep(Duration::from_millis(20));
        }
    }
}

/// Writes a file in place, bypassing the page cache, or returns the first error.
pub fn overwrite(path: &Path, seed: u8, bytes: usize) -> std::io::Result<()> {
    let file = OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(false)
        .custom_flags(nix::libc::O_DSYNC)
        .open(path)?;
    for (at, piece) in pattern(seed, bytes).chunks(1 << 20).enumerate() {
        file.write_all_at(piece, (at as u64) << 20)?;
    }
    file.sync_all()
}

#[track_caller]
pub fn check(path: &Path, seed: u8, bytes: usize) {
    run("sync", &["-f", path.to_str().unwrap()]);
    super::check_pattern(path, seed, bytes);
}

const BYTES: usize = 48 << 20;
const THICK: [(&str, &str); 1] = [("allocation", "thick")];

pub async fn staged(
    node: &Node,
    name: &str,
    size: u64,
    fs: &str,
    parameters: &[(&str, &str)],
) -> (String, PathBuf) {
    let id = node.client.create(name, size, mount(fs), parameters).await;
    let (id, staging) = (id.unwrap(), node.staging(name));
    node.stage(&id, &staging, mount(fs)).await;
    (id, staging)
}

/// The free space vanishes between its check and the write-back: syncfs fails, and with it the cut.
async fn write_back_without_room(fs: &'static str) {
    let mut node = Node::on("xfs", 2 * GIB);
    let (id, staging) = staged(&node, "v", 400 * MIB, fs, &[]).await;
    std::fs::write(staging.join("synced"), "long ago").unwrap();
    run("sync", &["-f", staging.to_str().unwrap()]);
    arm(&mut node, "effect.guard_sync:stop");
    let release = Release::of(&node);
    let (client, of) = (node.client.clone(), id.clone());
    let call = tokio::spawn(async move { client.snapshot("s", &of, &[("retries", "0")]).await });
    await_stop(&node);
    let full = Full::fill(&node);
    std::fs::write(staging.join("loose"), pattern(1, 64 << 20)).unwrap();
    go_on(&node);
    let response = end_of(call).await.expect_err("not all of it was written");
    assert!(
        response.message().contains("write back volumes"),
        "{fs}: {response}"
    );
    let listed = node.client.snapshots("").await.unwrap();
    assert_eq!(listed, Vec::<String>::new(), "{fs}: {response}");
    assert!(node.disk.snapshots().is_empty(), "{fs}: nothing is left");
    assert!(node.frozen(&[])["frozen"].as_array().unwrap().is_empty());
    drop((full, release));
    node.restart_with(&[]);
    node.unstage_and_delete(&id, &staging).await;
    node.assert_nothing_left();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_write_back_that_fails_on_a_full_pool_is_no_snapshot() {
    for fs in ["xfs", "ext4", "btrfs"] {
        write_back_without_room(fs).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_request_beyond_the_free_space_is_refused_before_any_application_is_quiesced() {
    let config = |scratch: &slackwater_testkit::Scratch| {
        let starts = scratch.join("starts");
        let body = format!("echo start >> {}; echo READY; cat", starts.display());
        let command = ["/bin/sh", "-c", &body];
        format!("[[hook]]\nname = \"db\"\nvolume = \"*\"\ncommand = {command:?}\n")
    };
    let node = Node::configured("xfs", 2 * GIB, config, &[]);
    let client = &node.client;
    let (thick, staging) = staged(&node, "thick", GIB, "ext4", &THICK).await;
    let class = [("consistency", "application")];
    let assert_no_space = |response: Result<_, tonic::Status>| {
        let response = refused(response.map(|_: String| ()), Code::ResourceExhausted);
        assert!(response.contains("pool default"), "{response}");
        assert!(node.disk.snapshots().is_empty() && node.disk.trash().is_empty());
        assert_eq!(node.disk.volumes().len(), 1);
    };
    let alone = client.snapshot("s", &thick, &class).await;
    assert_no_space(alone.map(|snapshot| snapshot.snapshot_id));
    let ids = std::slice::from_ref(&thick);
    let group = client.group("g", ids, &class).await;
    assert_no_space(group.map(|group| group.group_snapshot_id));
    let clone = client.create_from("c", GIB, mount("ext4"), from_volume(&thick), &[]);
    assert_no_space(clone.await.map(|volume| volume.volume_id));
    assert!(
        !node.scratch.join("starts").exists(),
        "no application was quiesced"
    );
    Probe::start(&staging).goes_on();
    node.unstage_and_delete(&thick, &staging).await;
    await_room(client, GIB).await;

    let (thin, staging) = staged(&node, "thin", GIB, "ext4", &[]).await;
    let snapshot = client.snapshot("s", &thin, &class).await.unwrap();
    let starts = std::fs::read_to_string(node.scratch.join("starts")).unwrap();
    assert_eq!(starts.lines().count(), 1);
    let source = from_snapshot(&snapshot.snapshot_id);
    for parameters in [&THICK[..], &[]] {
        // Reservations that cannot be kept: thick at any time, thin in addition to what is already
        // reserved.
        let restored = client.create_from("r", 2 * GIB, mount("ext4"), source.clone(), parameters);
        refused(restored.await, Code::ResourceExhausted);
        assert_eq!((node.disk.volumes().len(), node.disk.trash().len()), (1, 0));
    }
    client.delete_snapshot(&snapshot.snapshot_id).await.unwrap();
    node.unstage_and_delete(&thin, &staging).await;
    node.assert_nothing_left();
}

/// xfs frees the blocks of deleted files a moment later.
async fn await_room(client: &slackwater_testkit::Client, bytes: u64) {
    let start = Instant::now();
    while client.capacity(&[]).await.unwrap() < bytes {
        assert!(start.elapsed() < WAIT_TIMEOUT, "the free space comes back");
        tokio::time::sleep(std::time::Duration::from_millis(20)).await;
    }
}

/// A request to a driver whose pool fills.
#[derive(Clone)]
enum Ask {
    Cut { volume: String },
    Restore { snapshot: String },
}

impl Ask {
    async fn of(&self, client: &slackwater_testkit::Client) -> Result<String, tonic::Status> {
        match self {
            Ask::Cut { volume } => {
                let created = client.snapshot("s", volume, &[("retries", "0")]).await;
                created.map(|snapshot| snapshot.snapshot_id)
            }
            Ask::Restore { snapshot } => {
                let source = from_snapshot(snapshot);
                let created = client.create_from("r", 400 * MIB, mount("xfs"), source, &[]);
                created.await.map(|volume| volume.volume_id)
            }
        }
    }

    async fn undo(&self, client: &slackwater_testkit::Client, created: &str) {
        let undone = match self {
            Ask::Cut { .. } => client.delete_snapshot(created).await,
            Ask::Restore { .. } => client.delete(created).await,
        };
        undone.unwrap();
    }

    /// The number of existing objects, listed or not.
    fn count_objects(&self, node: &Node) -> usize {
        match self {
            Ask::Cut { .. } => node.disk.snapshots().len(),
            Ask::Restore { .. } => node.disk.volumes().len(),
        }
    }
}

/// The pool fills to the last block before one effect of a call, and has free space again when the
/// call is repeated. Returns whether the driver reached that effect, and whether the call failed
/// because of it.
async fn full_at(node: &mut Node, n: usize, ask: &Ask) -> Option<bool> {
    let before = ask.count_objects(node);
    arm(node, &format!("effect.{n}:stop"));
    let release = Release::of(node);
    let (client, asked) = (node.client.clone(), ask.clone());
    let call = tokio::spawn(async move { asked.of(&client).await });
    eventually("the driver stops, or the call ends", || {
        node.server.is_stopped() || call.is_finished()
    });
    let full = node.server.is_stopped().then(|| Full::fill(node));
    go_on(node);
    let answer = end_of(call).await;
    let (met, failed) = (full.is_some(), answer.is_err());
    if let Err(status) = &answer {
        // Either nothing is left, or the answer is not final.
        let is_clean = ask.count_objects(node) == before || status.code() == Code::Aborted;
        assert!(is_clean, "{n}: {status}\n{}", node.server.log());
    }
    drop((full, release));
    let created = match answer {
        Ok(created) => created,
        Err(_) => {
            // The failure is remembered, but not across a restart.
            node.restart_with(&[]);
            let again = ask.of(&node.client).await;
            again.unwrap_or_else(|status| panic!("{n}: {status}\n{}", node.server.log()))
        }
    };
    assert_eq!(ask.count_objects(node), before + 1, "{n}");
    if !met {
        // A planned fault would occur in the next call.
        node.restart_with(&[]);
    }
    ask.undo(&node.client, &created).await;
    assert_eq!(ask.count_objects(node), before, "{n}");
    met.then_some(failed)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_pool_that_fills_at_any_step_of_a_cut_or_restore_leaves_all_or_nothing() {
    let mut node = Node::on("xfs", 3 * GIB);
    let (id, staging) = staged(&node, "v", 400 * MIB, "xfs", &[]).await;
    overwrite(&staging.join("data"), 1, 8 << 20).unwrap();
    let snapshot = node.client.snapshot("kept", &id, &[]).await.unwrap();
    let snapshot = snapshot.snapshot_id;
    let (step, dirty) = (rounds(6, 1), staging.join("dirty"));
    let volume = id.clone();
    let restore = snapshot.clone();
    for ask in [Ask::Cut { volume }, Ask::Restore { snapshot: restore }] {
        let (mut met, mut failed) = (0, 0);
        for n in (1..).step_by(step) {
            // A thin volume's file system may not survive a full pool. Synced data does.
            if std::fs::write(&dirty, pattern(n as u8, 2 << 20)).is_err() {
                node.client.unstage(&id, &staging).await.unwrap();
                let staged = node.client.stage(&id, &staging, mount("xfs")).await;
                staged.unwrap();
            }
            match full_at(&mut node, n, &ask).await {
                None => break,
                Some(has_failed) => failed += usize::from(has_failed),
            }
            met += 1;
        }
        assert!(met * step > 12 && failed > 0, "{met} met, {failed} failed");
        super::check_pattern(&staging.join("data"), 1, 8 << 20);
    }
    node.restart_with(&[]);
    node.client.delete_snapshot(&snapshot).await.unwrap();
    node.unstage_and_delete(&id, &staging).await;
    node.assert_nothing_left();
}

#[tokio::test(flavor = "multi_thread")]
async fn overwriting_shared_blocks_on_a_full_pool_fails_only_for_thin_volumes() {
    let node = Node::on("xfs", 3 * GIB);
    let client = &node.client;
    let (thin, of_thin) = staged(&node, "thin", 512 * MIB, "ext4", &[]).await;
    let (thick, of_thick) = staged(&node, "thick", 512 * MIB, "xfs", &THICK).await;
    for staging in [&of_thin, &of_thick] {
        overwrite(&staging.join("data"), 1, BYTES).unwrap();
    }
    let ids = [thin.clone(), thick.clone()];
    let group = client.group("g", &ids, &[]).await.unwrap();
    let members = slackwater_testkit::snapshots::members(&group);
    let full = Full::fill(&node);
    // All these blocks are shared with the snapshot, and no other block is free.
    overwrite(&of_thin.join("data"), 2, BYTES).unwrap_err();
    overwrite(&of_thick.join("data"), 2, BYTES).unwrap();
    check(&of_thick.join("data"), 2, BYTES);
    assert!(client.is_ready().await);
    let response = client.snapshot("s", &thin, &[]).await;
    refused(response, Code::ResourceExhausted);
    drop(full);
    // The snapshots are unchanged.
    for (member, fs) in members.iter().zip(["ext4", "xfs"]) {
        let source = from_snapshot(member);
        let restored = client.create_from(fs, 512 * MIB, mount(fs), source, &[]);
        let restored = restored.await.unwrap().volume_id;
        let place = node.staging("restored");
        client.stage(&restored, &place, mount(fs)).await.unwrap();
        check(&place.join("data"), 1, BYTES);
        node.unstage_and_delete(&restored, &place).await;
    }
    let id = &group.group_snapshot_id;
    client.delete_group(id, &members).await.unwrap();
    node.unstage_and_delete(&thin, &of_thin).await;
    node.unstage_and_delete(&thick, &of_thick).await;
    node.assert_nothing_left();
}

/// The un-share that gives a thick volume blocks of its own is interrupted, by a kill or by a
/// foreign process that fills the pool: there is no snapshot, and the volume accepts every write on
/// a full pool.
#[tokio::test(flavor = "multi_thread")]
async fn a_thick_volume_accepts_every_write_also_when_its_un_share_is_interrupted() {
    let mut node = Node::on("xfs", 2 * GIB);
    let (id, staging) = staged(&node, "v", 512 * MIB, "xfs", &THICK).await;
    overwrite(&staging.join("data"), 1, BYTES).unwrap();
    for (seed, fault) in [(2, "effect.unshare:kill"), (3, "effect.unshare:stop")] {
        node.restart_with(&[("SLACKWATER_FAULT", fault)]);
        let release = Release::of(&node);
        let (client, of) = (node.client.clone(), id.clone());
        let call = tokio::spawn(async move { client.snapshot("s", &of, &[]).await });
        let full = if fault.contains("stop") {
            await_stop(&node);
            let full = Full::fill(&node);
            go_on(&node);
            refused(end_of(call).await, Code::ResourceExhausted);
            full
        } else {
            end_of(call).await.unwrap_err();
            assert_eq!(node.server.wait(), None, "the driver was killed");
            node.restart_with(&[]);
            Full::fill(&node)
        };
        eventually("the interrupted un-share is finished", || {
            node.disk.snapshots().is_empty()
        });
        overwrite(&staging.join("data"), seed, BYTES).unwrap();
        check(&staging.join("data"), seed, BYTES);
        drop((full, release));
    }
    node.restart_with(&[]);
    let snapshot = node.client.snapshot("s", &id, &[]).await.unwrap();
    let deleted = node.client.delete_snapshot(&snapshot.snapshot_id).await;
    deleted.unwrap();
    node.unstage_and_delete(&id, &staging).await;
    node.assert_nothing_left();
}

/// From its first clone to the end of its un-share, a thick volume shares blocks with its copy.
/// Here that lasts while the guard is stopped, before it freezes: only the copy waits.
#[tokio::test(flavor = "multi_thread")]
async fn a_copy_is_aborted_for_its_thick_source_when_the_pool_fills() {
    let mut node = Node::on("xfs", 16 * GIB);
    let (id, staging) = staged(&node, "v", 512 * MIB, "xfs", &THICK).await;
    overwrite(&staging.join("data"), 1, BYTES).unwrap();
    // The remaining space suffices for a full copy, and little more.
    let large_file = node.disk.mount_point.join("most");
    let bytes = (14 * GIB).to_string();
    run(
        "fallocate",
        &["--length", &bytes, large_file.to_str().unwrap()],
    );
    for (seed, clone) in [(2, false), (3, true)] {
        node.restart_with(&[("SLACKWATER_FAULT", "guard.freeze:stop")]);
        let release = Release::of(&node);
        let free_before = node.disk.volumes().len();
        let (client, of) = (node.client.clone(), id.clone());
        let call = tokio::spawn(async move {
            if clone {
                let source = from_volume(&of);
                let created = client.create_from("c", 512 * MIB, mount("xfs"), source, &[]);
                return created.await.map(drop);
            }
            let patient = [("freezeTimeout", "10s"), ("retries", "0")];
            client.snapshot("s", &of, &patient).await.map(drop)
        });
        release.await_stopped_guard();
        let full = Full::fill_slowly(&node);
        overwrite(&staging.join("data"), seed, BYTES).expect("every write is accepted");
        release.kill_guards();
        refused(end_of(call).await, Code::ResourceExhausted);
        let left = (node.disk.volumes().len(), node.disk.snapshots().len());
        assert_eq!(left, (free_before, 0), "nothing of the copy is left");
        overwrite(&staging.join("data"), seed + 2, BYTES).expect("the blocks are not shared");
        check(&staging.join("data"), seed + 2, BYTES);
        drop((full, release));
        let path = node.disk.mount_point.clone();
        eventually("the pool has freed the foreign file's space", || {
            let left = nix::sys::statvfs::statvfs(&path).unwrap();
            left.blocks_available() * left.fragment_size() > GIB
        });
    }
    node.restart_with(&[]);
    let snapshot = node.client.snapshot("s", &id, &[]).await.unwrap();
    let deleted = node.client.delete_snapshot(&snapshot.snapshot_id).await;
    deleted.unwrap();
    std::fs::remove_file(large_file).unwrap();
    node.unstage_and_delete(&id, &staging).await;
    node.assert_nothing_left();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_copy_whose_pool_fills_fails_and_leaves_nothing() {
    let mut node = Node::on("ext4", GIB);
    let (id, staging) = staged(&node, "v", 128 * MIB, "ext4", &[]).await;
    overwrite(&staging.join("data"), 1, 64 << 20).unwrap();
    node.client.unstage(&id, &staging).await.unwrap();
    let volume = id.clone();
    let clone = from_volume(&id);
    for of_volume in [false, true] {
        arm(&mut node, "effect.copy_range:stop");
        let release = Release::of(&node);
        let (client, volume, source) = (node.client.clone(), volume.clone(), clone.clone());
        let call = tokio::spawn(async move {
            if of_volume {
                let clone = client.create_from("c", 128 * MIB, mount("ext4"), source, &[]);
                return clone.await.map(drop);
            }
            client.snapshot("s", &volume, &[]).await.map(drop)
        });
        await_stop(&node);
        let full = Full::fill(&node);
        go_on(&node);
        refused(end_of(call).await, Code::ResourceExhausted);
        let left = (node.disk.snapshots().len(), node.disk.volumes().len());
        assert_eq!((left, node.disk.trash().len()), ((0, 1), 0));
        drop((full, release));
    }
    node.restart_with(&[]);
    let snapshot = node.client.snapshot("s", &id, &[]).await.unwrap();
    let deleted = node.client.delete_snapshot(&snapshot.snapshot_id).await;
    deleted.unwrap();
    node.client.delete(&id).await.unwrap();
    node.assert_nothing_left();
}
